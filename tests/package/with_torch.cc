// An ordinary LibTorch program that uses hvd as a user would.
#include <hvd/torch.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>

namespace {

/// Options by the names of some of their fields: what is left out has its default, and compilers
/// have nothing to say (-Wextra).
void name_some_options(torch::optim::Optimizer& optimizer, const torch::nn::Linear& model) {
  const hvd::AllreduceOptions allreduce{.name = "a"};
  const hvd::AllgatherOptions allgather{.name = "a"};
  const hvd::AlltoallOptions alltoall{.name = "a"};
  const hvd::AlltoallBufferOptions alltoall_buffer{.name = "a"};
  const hvd::ReducescatterOptions reducescatter{.op = hvd::ReduceOp::Sum};
  const hvd::BroadcastOptions broadcast{.root_rank = 0};
  const hvd::Buffer buffer{.data = nullptr};
  const hvd::Config config{.fusion_threshold_bytes = 1 << 20};
  const hvd::DistributedOptimizer wrapped(optimizer, {}, {.op = hvd::ReduceOp::Sum});
  const hvd::DistributedDataParallelOptions ddp{.process_set = {}};
  const hvd::DataParallelOptions data_parallel{.replicas = 2};
  const hvd::ElasticSampler sampler(4, true, 0, {.shares = hvd::Shares::Uneven});
  const hvd::GradScaler scaler({.init_scale = 4});
  const hvd::ExponentialMovingAverage average(*model, {.decay = 0.5});
  const hvd::WarmupOptions warmup{.steps = 5};
  const hvd::CheckpointOptions checkpoint{.keep_last = 2};
  const hvd::Checkpoint::Extra extra{.strings = {{"a", "b"}}};
}

}  // namespace

int main() {
  hvd::init();
  const double size = hvd::size();
  const auto sum = hvd::allreduce(torch::full({3}, hvd::rank() + 1.0),
                                  {.name = "greeting", .op = hvd::ReduceOp::Sum});
  const bool summed = sum.allclose(torch::full({3}, size * (size + 1) / 2));

  torch::manual_seed(hvd::rank());  // ranks start apart: broadcast_parameters brings them together
  torch::nn::Linear model(4, 2);
  hvd::broadcast_parameters(*model, 0);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  hvd::DistributedOptimizer optimizer(sgd, model->named_parameters());
  {
    torch::nn::Linear other(2, 2);
    torch::optim::SGD plain(other->parameters(), 0.1);
    name_some_options(plain, other);
  }
  optimizer.zero_grad();
  model->forward(torch::randn({8, 4})).pow(2).mean().backward();  // other data on every rank
  optimizer.step();

  const auto weight = model->weight.detach();
  const bool together =
      torch::equal(hvd::broadcast(weight.clone(), {.name = "weight", .root_rank = 0}), weight);
  std::printf("with_torch: rank %d of %d: sum %s, parameters %s\n", hvd::rank(), hvd::size(),
              summed ? "right" : "WRONG", together ? "together" : "APART");
  hvd::shutdown();
  return summed && together ? 0 : 1;
}
