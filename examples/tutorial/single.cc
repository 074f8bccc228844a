// One process: the ordinary LibTorch program that the other programs change, without hvd.
//   ./single
#include <torch/torch.h>

#include "epoch_sampler.h"
#include "tutorial.h"

int main() {
  const auto device = first_device();
  torch::manual_seed(0);

  auto network = make_network();
  network->to(device);
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
      const auto scores = network->forward(batch.data.to(device));
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
