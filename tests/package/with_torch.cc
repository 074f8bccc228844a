// An ordinary LibTorch program that uses hvd as a user would.
#include <hvd/torch.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>

int main() {
  hvd::init();
  const double size = hvd::size();
  const auto sum = hvd::allreduce(torch::full({3}, hvd::rank() + 1.0), {.name = "greeting", .op = hvd::ReduceOp::Sum});
  const bool summed = sum.allclose(torch::full({3}, size * (size + 1) / 2));

  torch::manual_seed(hvd::rank());  // ranks start apart: broadcast_parameters brings them together
  torch::nn::Linear model(4, 2);
  hvd::broadcast_parameters(*model, 0);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  hvd::DistributedOptimizer optimizer(sgd, model->named_parameters());
  optimizer.zero_grad();
  model->forward(torch::randn({8, 4})).pow(2).mean().backward();  // other data on every rank
  optimizer.step();

  const auto weight = model->weight.detach();
  const bool together = torch::equal(hvd::broadcast(weight.clone(), {.name = "weight", .root_rank = 0}), weight);
  std::printf("with_torch: rank %d of %d: sum %s, parameters %s\n", hvd::rank(), hvd::size(), summed ? "right" : "WRONG",
              together ? "together" : "APART");
  hvd::shutdown();
  return summed && together ? 0 : 1;
}
