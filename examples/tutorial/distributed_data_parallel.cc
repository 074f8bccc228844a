// DistributedDataParallel: a process for each GPU (or several on one host's cores), which average
// their gradients during backward.
//   hvdrun -np 4 ./distributed_data_parallel
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
  // gives all ranks rank 0's weights; averages gradients from now on
  hvd::DistributedDataParallel model(network);
  torch::optim::SGD optimizer(network->parameters(),
                              torch::optim::SGDOptions(kLearningRate).momentum(kMomentum));

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
      const auto scores = model.forward(batch.data.to(device));
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
