// Mixed precision: convolutions and products in 16 bits, weights and sums in fp32.
//   hvdrun -np 4 ./mixed_precision
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

  // fp16 on GPUs, whose small gradients need the scaler; bf16 on CPUs, where the scaler does no
  // harm.
  const auto type = device.is_cuda() ? torch::kHalf : torch::kBFloat16;
  hvd::GradScaler scaler;

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
      torch::Tensor loss;
      {
        // around forward and loss; backward stays outside
        const hvd::AutocastGuard autocast(device.type(), type);
        const auto scores = model.forward(batch.data.to(device));
        loss = torch::cross_entropy_loss(scores, batch.target.to(device));
      }
      optimizer.zero_grad();
      scaler.scale(loss).backward();
      scaler.step(optimizer);  // no rank steps if the gradients of any have overflowed
      scaler.update();
      loss_sum += loss.detach();
      ++steps;
    }
    // the loss of all ranks: all call it, one prints it
    const double loss = hvd::allreduce(loss_sum / steps).item<double>();
    if (hvd::rank() == 0) report(epoch, loss);
  }
  hvd::shutdown();
}
