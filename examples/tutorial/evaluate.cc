// Evaluation on all ranks: each sample once, whatever the number of ranks, and one result.
//   hvdrun -np 4 ./evaluate
#include <hvd/torch.h>
#include <torch/torch.h>

#include "tutorial.h"

/// Returns loss, top-1 and top-5 over the test images of all ranks. All ranks call it.
hvd::Evaluation evaluate(torch::nn::Sequential& network, const torch::Device& device) {
  // Uneven: 1003 images on 4 ranks are 251, 251, 251 and 250. Samplers for training pad: they would
  // count some images twice.
  auto images = Images(kTestImages, 2).map(torch::data::transforms::Stack<>());
  const hvd::ElasticSampler sampler(*images.size(), /*shuffle=*/false, 0,
                                    {.shares = hvd::Shares::Uneven});
  const auto loader = torch::data::make_data_loader(std::move(images), sampler, kBatch);

  const torch::NoGradGuard no_grad;
  // Batch norm's statistics of all ranks, until the end of this function.
  const hvd::AveragedBuffers averaged(network);
  network->eval();
  hvd::EvaluationTally tally;
  for (auto& batch : *loader)
    tally.add(network->forward(batch.data.to(device)), batch.target.to(device));
  network->train();
  return tally.average();  // sums of all ranks over the samples of all ranks
}

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
  hvd::DistributedOptimizer optimizer(std::move(sgd), network->named_parameters());
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
    const hvd::Evaluation test = evaluate(network, device);
    if (hvd::rank() == 0)
      std::printf("test: %ld images, loss %.6f, top-1 %.4f, top-5 %.4f\n", test.samples, test.loss,
                  test.top1, test.top5);
  }
  hvd::shutdown();
}
