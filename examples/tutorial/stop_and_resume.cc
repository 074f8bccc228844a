// A run that any rank may stop, after any step, and that goes on with the step after it: with the
// same bits, or on another number of ranks.
//   hvdrun -np 4 ./stop_and_resume FOLDER [STEP]     stops after so many steps, as a signal to one
//                                                    rank does
//   hvdrun -np 4 ./stop_and_resume FOLDER
#include <hvd/torch.h>
#include <torch/torch.h>

#include <csignal>
#include <cstdlib>
#include <sstream>
#include <string>

#include "tutorial.h"

volatile std::sig_atomic_t asked = 0;  // by SIGTERM, as Slurm and Kubernetes send it, on this rank

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : ".";
  const int stop_after = argc > 2 ? std::atoi(argv[2]) : 0;
  std::signal(SIGTERM, [](int) { asked = 1; });
  hvd::init();
  const auto device = hvd::local_device();
  // Each rank has random numbers of its own, and starts with rank 0's weights nevertheless
  torch::manual_seed(hvd::rank());

  auto network = make_network();
  network->to(device);
  auto sgd = std::make_unique<torch::optim::SGD>(
      network->parameters(), torch::optim::SGDOptions(kLearningRate).momentum(kMomentum));
  hvd::broadcast_parameters(network, 0);  // rank 0's weights and buffers on all ranks
  hvd::DistributedOptimizer optimizer(std::move(sgd), network->named_parameters());
  torch::optim::StepLR decay(optimizer, /*step_size=*/1, /*gamma=*/0.5);

  auto images = Images(kTrainImages).map(torch::data::transforms::Stack<>());
  hvd::ElasticSampler sampler(*images.size(), /*shuffle=*/true, /*seed=*/0,
                              {.global_batch = kBatch});
  const auto loader =
      torch::data::make_data_loader(std::move(images), sampler, hvd::share_of_batch(kBatch));

  const hvd::Checkpoint checkpoint(folder + "/stopped.pt");
  std::int64_t step = 0;
  if (checkpoint.exists()) {
    std::istringstream state(checkpoint.read_extra().strings.at("sampler"));
    // Epoch, and how much of it is used; the loader's copy takes it from here
    torch::load(sampler, state);
    // LibTorch does not save schedulers. Load after that: the learning rate is in the checkpoint.
    for (std::size_t epoch = 0; epoch < sampler.epoch(); ++epoch) decay.step();
    step = checkpoint.load(network, optimizer);
  }
  for (std::size_t epoch = sampler.epoch(); epoch < kEpochs; sampler.set_epoch(++epoch)) {
    auto loss = torch::zeros({}, device);
    for (auto& batch : *loader) {
      const auto scores = network->forward(batch.data.to(device));
      loss = torch::cross_entropy_loss(scores, batch.target.to(device));
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      sampler.record_batch(static_cast<std::size_t>(batch.target.size(0)));
      if (++step == stop_after && hvd::rank() == hvd::size() - 1) std::raise(SIGTERM);
      // The epoch is over: there is another chance in the next one
      if (sampler.processed() == kTrainImages) continue;
      // A rank that left alone would leave the others waiting: each says whether it was asked.
      if (hvd::any(asked != 0)) {
        std::ostringstream state;
        torch::save(sampler, state);
        checkpoint.save(network, optimizer, step, {.strings = {{"sampler", state.str()}}});
        hvd::shutdown();
        return 0;
      }
    }
    decay.step();
    const double last = hvd::allreduce(loss.detach()).item<double>();  // of the epoch's last batch
    if (hvd::rank() == 0) report(static_cast<int>(epoch), last);
  }
  hvd::shutdown();
}
