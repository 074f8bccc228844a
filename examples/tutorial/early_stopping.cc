// Early stopping: the learning rate decays, the best model is kept, and the run ends when it gets
// no better.
//   hvdrun -np 4 ./early_stopping FOLDER
#include <hvd/torch.h>
#include <torch/torch.h>

#include <limits>
#include <string>

#include "tutorial.h"

// so few images are soon known by heart
inline constexpr int kFewImages = 256, kMostEpochs = 40, kPatience = 3;

/// Returns loss and accuracy over the test images of all ranks, the same on each. All ranks call
/// it.
hvd::Evaluation evaluate(torch::nn::Sequential& network, const torch::Device& device) {
  auto images = Images(kFewImages, 2).map(torch::data::transforms::Stack<>());
  const hvd::ElasticSampler sampler(*images.size(), /*shuffle=*/false, 0,
                                    {.shares = hvd::Shares::Uneven});
  const auto loader = torch::data::make_data_loader(std::move(images), sampler, kBatch);
  const torch::NoGradGuard no_grad;
  network->eval();
  hvd::EvaluationTally tally;
  for (auto& batch : *loader)
    tally.add(network->forward(batch.data.to(device)), batch.target.to(device));
  network->train();
  return tally.average();
}

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : ".";
  hvd::init();
  const auto device = hvd::local_device();
  // each rank has random numbers of its own, and starts with rank 0's weights nevertheless
  torch::manual_seed(hvd::rank());

  auto network = make_network();
  network->to(device);
  auto sgd = std::make_unique<torch::optim::SGD>(
      network->parameters(), torch::optim::SGDOptions(2 * kLearningRate).momentum(kMomentum));
  hvd::broadcast_parameters(network, 0);  // rank 0's weights and buffers on all ranks
  hvd::DistributedOptimizer optimizer(std::move(sgd), network->named_parameters());
  torch::optim::StepLR decay(optimizer, /*step_size=*/5, /*gamma=*/0.5);

  auto images = Images(kFewImages).map(torch::data::transforms::Stack<>());
  hvd::ElasticSampler sampler(*images.size(), /*shuffle=*/true, /*seed=*/0,
                              {.global_batch = kBatch});
  const auto loader =
      torch::data::make_data_loader(std::move(images), sampler, hvd::share_of_batch(kBatch));
  const hvd::Checkpoint best(folder + "/best.pt");
  double best_loss = std::numeric_limits<double>::infinity();
  int worse = 0;  // epochs in a row
  for (int epoch = 0; epoch < kMostEpochs && worse < kPatience; ++epoch) {
    sampler.set_epoch(epoch);  // or every epoch has the order of the first
    for (auto& batch : *loader) {
      const auto scores = network->forward(batch.data.to(device));
      const auto loss = torch::cross_entropy_loss(scores, batch.target.to(device));
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
    }
    decay.step();                                        // on all ranks, so all have the same rate
    const double loss = evaluate(network, device).loss;  // of all ranks, so all decide alike
    if (hvd::rank() == 0) report(epoch, loss);
    worse = loss < best_loss ? 0 : worse + 1;
    if (worse > 0) continue;
    best_loss = loss;
    best.save(network, optimizer, epoch + 1);  // all ranks call it
  }
  const auto epochs = best.load(network, optimizer);  // the best model, on all ranks
  const hvd::Evaluation test = evaluate(network, device);
  if (hvd::rank() == 0)
    std::printf("test: best after %ld epochs, loss %.6f, top-1 %.4f\n", epochs, test.loss,
                test.top1);
  hvd::shutdown();
}
