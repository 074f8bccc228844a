// N ranks equal one process, all ranks hold the same bits, and the fusion threshold changes
// nothing.
#include <memory>

#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;
using torch::nn::Sequential;
using torch::optim::Optimizer;

constexpr int kTrainingSteps = 20;
constexpr std::int64_t kBatch = 4;

Sequential mlp(at::ScalarType type) {
  torch::manual_seed(7);
  Sequential net(torch::nn::Linear(12, 32), torch::nn::Tanh(), torch::nn::Linear(32, 32),
                 torch::nn::ReLU(), torch::nn::Linear(32, 5));
  net->to(type);
  return net;
}

std::unique_ptr<Optimizer> make(const std::string& kind, Sequential& net) {
  if (kind == "SGD")
    return std::make_unique<torch::optim::SGD>(net->parameters(),
                                               torch::optim::SGDOptions(0.05).momentum(0.9));
  return std::make_unique<torch::optim::Adam>(net->parameters(), torch::optim::AdamOptions(0.01));
}

/// The mean loss over `ranks` batches, those from rank `first` on.
at::Tensor loss(Sequential& net, int first, int ranks, int step) {
  const auto type = net->parameters().front().scalar_type();
  torch::manual_seed(1000 + static_cast<std::uint64_t>(step));
  const at::Tensor x = torch::randn({hvd::size() * kBatch, 12}, kDouble)
                           .to(type)
                           .slice(0, first * kBatch, (first + ranks) * kBatch);
  const at::Tensor y = torch::randint(5, {hvd::size() * kBatch}, at::kLong)
                           .slice(0, first * kBatch, (first + ranks) * kBatch);
  return torch::nn::functional::cross_entropy(net->forward(x), y);
}

at::Tensor train_together(const std::string& kind, at::ScalarType type,
                          hvd::DistributedOptimizerOptions options = {}, bool look = true) {
  Sequential net = mlp(type);
  if (hvd::rank() != 0)
    // only the root's start counts
    for (auto& parameter : net->parameters()) parameter.detach().add_(1);
  hvd::broadcast_parameters(*net, 0);
  const auto wrapped = make(kind, net);
  hvd::DistributedOptimizer optimizer(*wrapped, net->named_parameters(), std::move(options));
  hvd::broadcast_optimizer_state(optimizer, 0);
  for (int step = 0; step < kTrainingSteps; ++step) {
    optimizer.zero_grad();
    loss(net, hvd::rank(), 1, step).backward();
    optimizer.step();
    if (look) CHECK(same_on_all_ranks(flat(net)));
  }
  return flat(net);
}

at::Tensor train_alone(const std::string& kind, at::ScalarType type) {
  Sequential net = mlp(type);
  const auto optimizer = make(kind, net);
  for (int step = 0; step < kTrainingSteps; ++step) {
    optimizer->zero_grad();
    loss(net, 0, hvd::size(), step).backward();
    optimizer->step();
  }
  return flat(net);
}

TEST_CASE("p ranks with batch b train as one process with batch p*b") {
  for (const std::string kind : {"SGD", "Adam"}) {
    CAPTURE(kind);
    const at::Tensor together = train_together(kind, kDouble);
    const at::Tensor alone = train_alone(kind, kDouble);
    const double distance = ((together - alone).norm() / alone.norm()).item<double>();
    CAPTURE(distance);
    CHECK(distance < 1e-12);
    CHECK((alone - flat(mlp(kDouble))).norm().item<double>() > 1e-2);  // it has learned something
  }
}

TEST_CASE("bitwise the same from run to run, with any fusion threshold and any grouping") {
  for (const std::string kind : {"SGD", "Adam"}) {
    CAPTURE(kind);
    const at::Tensor first = train_together(kind, kFloat);
    CHECK(same(train_together(kind, kFloat, {}, false), first));
    CHECK(same(train_together(kind, kFloat, {.groups = 3}, false), first));
    for (const std::uint64_t threshold :
         {std::uint64_t{0}, std::uint64_t{1} << 20, std::uint64_t{128} << 20}) {
      CAPTURE(threshold);
      hvd::Config config;
      config.fusion_threshold_bytes = threshold;
      const Restarted world(config);
      CHECK(same(train_together(kind, kFloat, {}, false), first));
    }
    hvd::Config config;
    config.shared_memory = hvd::SharedMemory::Off;
    const Restarted world(config);
    CHECK(same(train_together(kind, kFloat, {}, false), first));
  }
}

}  // namespace
