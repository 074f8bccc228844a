// DataParallel: one process with several replicas of the network, on all its GPUs, or on threads of
// the CPU.
//   OMP_NUM_THREADS=4 ./data_parallel
#include <hvd/torch.h>
#include <torch/torch.h>

#include "epoch_sampler.h"
#include "tutorial.h"

int main() {
  const auto device = first_device();
  torch::manual_seed(0);

  auto network = make_network();
  network->to(device);
  // cuts each batch among the replicas; their gradients add up in `network`
  hvd::DataParallel model(network);
  torch::optim::SGD optimizer(network->parameters(),
                              torch::optim::SGDOptions(kLearningRate).momentum(kMomentum));

  auto images = Images(kTrainImages).map(torch::data::transforms::Stack<>());
  EpochSampler sampler(*images.size());
  const auto loader = torch::data::make_data_loader(std::move(images), sampler, kBatch);
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    sampler.set_epoch(epoch);
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
    report(epoch, (loss_sum / steps).item<double>());
  }
}
