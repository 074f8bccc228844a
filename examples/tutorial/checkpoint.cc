// Checkpoints: a run that is interrupted goes on where its last epoch ended, with the same bits, or
// on another number of ranks.
//   hvdrun -np 4 ./checkpoint FOLDER [EPOCHS]
#include <hvd/torch.h>
#include <torch/torch.h>

#include <cstdlib>
#include <string>

#include "tutorial.h"

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : ".";
  const int epochs = argc > 2 ? std::atoi(argv[2]) : kEpochs;
  hvd::init();
  const auto device = hvd::local_device();
  // each rank has random numbers of its own, and starts with rank 0's weights nevertheless
  torch::manual_seed(hvd::rank());

  auto network = make_network();
  network->to(device);
  auto sgd = std::make_unique<torch::optim::SGD>(
      network->parameters(), torch::optim::SGDOptions(kLearningRate).momentum(kMomentum));
  hvd::broadcast_parameters(network, 0);  // rank 0's weights and buffers on all ranks
  hvd::DistributedOptimizer optimizer(std::move(sgd), network->named_parameters());
  // and its learning rate, momenta... which are there after loading a file
  hvd::broadcast_optimizer_state(optimizer, 0);

  auto images = Images(kTrainImages).map(torch::data::transforms::Stack<>());
  hvd::ElasticSampler sampler(*images.size(), /*shuffle=*/true, /*seed=*/0,
                              {.global_batch = kBatch});
  const auto loader =
      torch::data::make_data_loader(std::move(images), sampler, hvd::share_of_batch(kBatch));

  // All ranks call it, the first one reads and writes. The file is whole at every moment: it is
  // written beside the old one, then renamed.
  const hvd::Checkpoint checkpoint(folder + "/checkpoint.pt");
  int epoch = checkpoint.exists() ? static_cast<int>(checkpoint.load(network, optimizer)) : 0;
  for (; epoch < epochs; ++epoch) {
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
    // weights, momenta, learning rate, random numbers; how many epochs are done
    checkpoint.save(network, optimizer, epoch + 1);
  }
  hvd::shutdown();
}
