// What communication costs a training step: ResNet-18 (SGD with momentum, 32x32 images), steps with a plain optimizer and with the same
// optimizer wrapped in hvd::DistributedOptimizer, in turn within one run. Both are timed from barrier to barrier, so each figure is
// that of the slowest rank.
//   mpirun -np 4 step_bench [rounds] [batch]
#include <hvd/torch.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "examples/models/models.h"

namespace {

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  const std::int64_t batch = argc > 2 ? std::atoi(argv[2]) : 4;
  hvd::init();
  torch::manual_seed(hvd::rank());
  const auto images = torch::randn({batch, 3, 32, 32});
  const auto labels = torch::randint(0, 100, {batch}, torch::kInt64);

  auto make_model = [] { return examples::make_model({.name = "resnet18", .stem = "imagenet", .image = {3, 32, 32}, .classes = 100}); };
  auto plain_model = make_model();
  auto wrapped_model = make_model();
  const auto options = torch::optim::SGDOptions(0.01).momentum(0.9).weight_decay(5e-4);
  torch::optim::SGD plain(plain_model->parameters(), options);
  torch::optim::SGD sgd(wrapped_model->parameters(), options);
  hvd::broadcast_parameters(*wrapped_model, 0);
  hvd::DistributedOptimizer wrapped(sgd, wrapped_model->named_parameters());

  const auto step = [&](auto& model, auto& optimizer) {
    hvd::barrier();
    const auto start = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(model->forward(images), labels).backward();
    optimizer.step();
    hvd::barrier();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  };
  std::vector<double> alone;
  std::vector<double> together;
  std::vector<double> ratios;
  for (int round = -3; round < rounds; ++round) {
    const double a = step(plain_model, plain);
    const double b = step(wrapped_model, wrapped);
    if (round < 0) continue;  // warm-up
    alone.push_back(a);
    together.push_back(b);
    ratios.push_back(b / a);
  }
  const auto stats = hvd::stats();
  if (hvd::rank() == 0)
    std::printf(
        "resnet18 step, %d ranks, batch %lld: without communication %.1f ms, with hvd %.1f ms, ratio %.3f (median of pairs), "
        "%.1f batches per step\n",
        hvd::size(), static_cast<long long>(batch), median(alone), median(together), median(ratios),
        static_cast<double>(stats.batches_run) / (rounds + 3));
  hvd::shutdown();
}
