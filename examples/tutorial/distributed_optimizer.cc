// DistributedOptimizer: Horovod's way. The optimizer is wrapped, not the network; gradients travel
// as fp16.
//   hvdrun -np 4 ./distributed_optimizer
#include <hvd/torch.h>
#include <torch/torch.h>

#include "tutorial.h"

int main() {
  hvd::init();
  const auto device = hvd::local_device();
  // each rank has random numbers of its own, and starts with rank 0's weights nevertheless
  torch::manual_seed(hvd::rank());

  auto network = make_network();
  network->to(device);
  auto sgd = std::make_unique<torch::optim::SGD>(
      network->parameters(), torch::optim::SGDOptions(kLearningRate).momentum(kMomentum));
  hvd::broadcast_parameters(network, 0);  // rank 0's weights and buffers on all ranks
  hvd::DistributedOptimizer optimizer(std::move(sgd), network->named_parameters(),
                                      {.compression = hvd::Compression::fp16()});
  // and its learning rate, momenta... which are there after loading a file
  hvd::broadcast_optimizer_state(optimizer, 0);

  auto images = Images(kTrainImages).map(torch::data::transforms::Stack<>());
  hvd::ElasticSampler sampler(*images.size(), /*shuffle=*/true, /*seed=*/0,
                              {.global_batch = kBatch});
  const auto loader =
      torch::data::make_data_loader(std::move(images), sampler, hvd::share_of_batch(kBatch));
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    sampler.set_epoch(epoch);  // or every epoch has the order of the first
    auto loss_sum = torch::zeros({}, device);
    int steps = 0;
    for (auto& batch : *loader) {
      const auto scores = network->forward(batch.data.to(device));
      const auto loss = torch::cross_entropy_loss(scores, batch.target.to(device));
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      loss_sum += loss.detach();
      ++steps;
    }
    // the loss of all ranks: all call it, one prints it
    const double loss = hvd::allreduce(loss_sum / steps).item<double>();
    if (hvd::rank() == 0) report(epoch, loss);
  }
  hvd::shutdown();
}
