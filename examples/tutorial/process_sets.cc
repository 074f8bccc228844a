// Process sets: two learning rates at once. Ranks 0, 2, ... train one network, ranks 1, 3, ...
// another; the better one goes to all.
//   hvdrun -np 4 ./process_sets
#include <hvd/torch.h>
#include <torch/torch.h>

#include <algorithm>
#include <vector>

#include "tutorial.h"

int main() {
  hvd::init();
  const auto device = hvd::local_device();
  torch::manual_seed(hvd::rank());

  std::vector<hvd::ProcessSet> sets;
  // all ranks make all sets, in the same order
  for (int first = 0; first < std::min(2, hvd::size()); ++first) {
    std::vector<int> ranks;
    for (int rank = first; rank < hvd::size(); rank += 2) ranks.push_back(rank);
    sets.push_back(hvd::add_process_set(ranks));
  }
  const int number = hvd::rank() % 2;
  const hvd::ProcessSet set = sets.at(number);

  auto network = make_network();
  network->to(device);
  auto sgd = std::make_unique<torch::optim::SGD>(
      network->parameters(),
      torch::optim::SGDOptions(number == 0 ? kLearningRate : kLearningRate / 5)
          .momentum(kMomentum));
  hvd::broadcast_parameters(network, 0);  // both networks begin with the same weights
  hvd::DistributedOptimizer optimizer(std::move(sgd), network->named_parameters(),
                                      {.process_set = set});

  auto images = Images(kTrainImages).map(torch::data::transforms::Stack<>());
  hvd::ElasticSampler sampler(*images.size(), /*shuffle=*/true, /*seed=*/0,
                              {.process_set = set, .global_batch = kBatch});
  const auto loader =
      torch::data::make_data_loader(std::move(images), sampler, hvd::share_of_batch(kBatch, set));
  double loss = 0;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    sampler.set_epoch(epoch);  // or every epoch has the order of the first
    auto loss_sum = torch::zeros({}, device);
    int steps = 0;
    for (auto& batch : *loader) {
      const auto scores = network->forward(batch.data.to(device));
      const auto batch_loss = torch::cross_entropy_loss(scores, batch.target.to(device));
      optimizer.zero_grad();
      batch_loss.backward();
      optimizer.step();
      loss_sum += batch_loss.detach();
      ++steps;
    }
    // of the set's ranks
    loss = hvd::allreduce(loss_sum / steps, {.process_set = set}).item<double>();
    if (hvd::rank() == 0) report(epoch, loss);
  }
  const auto losses = hvd::allgather_object(loss);  // of all ranks again
  const auto best =
      static_cast<int>(std::min_element(losses.begin(), losses.end()) - losses.begin());
  hvd::broadcast_parameters(network, best);
  if (hvd::rank() == 0)
    std::printf("losses of the last epoch: %.6f, %.6f; all have the weights of rank %d\n",
                losses.front(), losses[sets.size() - 1], best);
  hvd::shutdown();
}
