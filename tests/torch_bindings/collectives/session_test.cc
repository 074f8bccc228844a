// Features in combination, as a session of training uses them, against one process that computes
// the whole batch: every optimizer, plain and sharded, with accumulation, loss scaling and an
// overflow on one rank, clipping, and other branches on each rank.
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kDouble;
using torch::optim::Optimizer;
using Parameters = std::vector<at::Tensor>;

/// A common layer and one more branch than there are ranks.
struct SessionNet : torch::nn::Module {
  SessionNet() {
    common = register_module("common", torch::nn::Linear(6, 9));
    for (int i = 0; i <= hvd::size(); ++i)
      branches.push_back(register_module("branch" + std::to_string(i), torch::nn::Linear(9, 3)));
    idle = register_parameter("idle", torch::ones({5}));
    to(kDouble);
    int variant = 0;
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : parameters())
      parameter.copy_(data(parameter.sizes(), kDouble, 0, variant++) * 0.3);
  }
  at::Tensor loss(int rank, int step, int pass) {
    const int variant = 2 * step + pass;
    auto& branch = branches[static_cast<std::size_t>((rank + variant) % (hvd::size() + 1))];
    const at::Tensor y = branch(torch::tanh(common(data({5, 6}, kDouble, rank, variant))));
    return torch::mse_loss(y, data({5, 3}, kDouble, rank, variant + 1));
  }
  torch::nn::Linear common{nullptr};
  std::vector<torch::nn::Linear> branches;
  at::Tensor idle;
};

struct SessionKind {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(Parameters)> make;
};
const std::vector<SessionKind>& session_kinds() {
  using namespace torch::optim;
  static const std::vector<SessionKind> all{
      {"SGD",
       [](Parameters p) {
         return std::make_unique<SGD>(
             p, SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01));
       }},
      {"Adam",
       [](Parameters p) {
         return std::make_unique<Adam>(p, AdamOptions(0.01).weight_decay(0.01));
       }},
      {"AdamW",
       [](Parameters p) { return std::make_unique<AdamW>(p, AdamWOptions(0.01).amsgrad(true)); }},
      {"RMSprop",
       [](Parameters p) {
         return std::make_unique<RMSprop>(p, RMSpropOptions(0.01).momentum(0.5));
       }},
      {"Adagrad",
       [](Parameters p) {
         return std::make_unique<Adagrad>(p, AdagradOptions(0.05).lr_decay(0.1));
       }},
  };
  return all;
}

/// Relative to the largest number.
double session_difference(const torch::nn::Module& a, const torch::nn::Module& b) {
  double worst = 0;
  for (const auto& parameter : a.named_parameters())
    worst = std::max(worst, difference(parameter.value(), b.named_parameters()[parameter.key()]) /
                                std::max(1.0, parameter.value().abs().max().item<double>()));
  return worst;
}

TEST_CASE(
    "every optimizer, plain and sharded, with accumulation, scaling, an overflow, clipping and "
    "branches: as one process") {
  with_and_without_one_copy();
  constexpr int kPasses = 2;
  for (const auto& kind : session_kinds()) {
    for (const bool shard : {false, true}) {
      CAPTURE(kind.name);
      CAPTURE(shard);
      SessionNet net, alone;
      const auto wrapped = kind.make(net.parameters());
      const auto reference = kind.make(alone.parameters());
      hvd::DistributedOptimizer optimizer(*wrapped, net.named_parameters(),
                                          {.backward_passes_per_step = kPasses,
                                           .shard_optimizer_state = shard,
                                           .share_parameters = shard && one_copy});
      hvd::GradScaler scaler({.init_scale = 1024, .growth_interval = 3});
      for (int step = 0; step < 7; ++step) {
        CAPTURE(step);
        const bool bad = step == 2;
        optimizer.zero_grad();
        reference->zero_grad();
        for (int pass = 0; pass < kPasses; ++pass) {
          at::Tensor own = net.loss(hvd::rank(), step, pass);
          if (bad && last() && pass == 0) own = own * std::numeric_limits<double>::infinity();
          scaler.scale(own).backward();
          at::Tensor sum = torch::zeros({}, kDouble);
          for (const int rank : everyone()) sum = sum + alone.loss(rank, step, pass);
          (sum / hvd::size()).backward();
        }
        scaler.unscale_(optimizer);
        const double norm = torch::nn::utils::clip_grad_norm_(net.parameters(), 0.2);
        if (!bad) {
          const double expected = torch::nn::utils::clip_grad_norm_(alone.parameters(), 0.2);
          CHECK(expected > 0.2);
          CHECK(std::abs(norm - expected) < 1e-12 * expected);
          reference->step();
        }
        scaler.step(optimizer);
        scaler.update();
        CHECK(session_difference(net, alone) < 1e-12);
        CHECK(scaler.get_scale() == (step < 2 ? 1024 : step < 5 ? 512 : 1024));
        for (const auto& parameter : net.parameters()) CHECK(same_on_all_ranks(parameter));
      }
      CHECK(torch::equal(net.idle, SessionNet().idle));
      CHECK(session_difference(net, SessionNet()) > 1e-3);
    }
  }
}

TEST_CASE("SyncBatchNorm sends once forward and once backward, and nothing in evaluation") {
  torch::nn::BatchNorm2d converted(5);
  hvd::convert_sync_batchnorm(converted);
  hvd::SyncBatchNorm layer(torch::nn::BatchNormOptions(5));
  const auto check = [](const auto& forward, auto& module) {
    const at::Tensor x = data({3, 5, 2, 2}, at::kFloat, hvd::rank()).requires_grad_();
    const std::uint64_t before = hvd::stats().tensors_submitted, once = hvd::size() > 1 ? 1 : 0;
    const auto sent = [before] { return hvd::stats().tensors_submitted - before; };
    const at::Tensor y = forward(x);
    CHECK(sent() == once);
    y.square().sum().backward();
    CHECK(sent() == 2 * once);
    forward(x.detach()).square().sum().backward();
    CHECK(sent() == 3 * once);  // no rank's input needs a gradient
    module->eval();
    forward(x).sum().backward();
    CHECK(sent() == 3 * once);
  };
  check([&](const at::Tensor& x) { return layer->forward(x); }, layer);
  check([&](const at::Tensor& x) { return converted->forward(x); }, converted);
}

TEST_CASE("AveragedBuffers: means while it lives, each rank's own after it, or kept") {
  torch::nn::BatchNorm1d layer(3);
  layer->running_mean.fill_(hvd::rank());
  layer->num_batches_tracked.fill_(10 * hvd::rank());
  const double mean = (hvd::size() - 1) / 2.0;
  {
    const hvd::AveragedBuffers means(layer);
    CHECK(layer->running_mean[2].item<float>() == mean);
    CHECK(layer->running_var[1].item<float>() == doctest::Approx(1));
    CHECK(layer->num_batches_tracked.item<std::int64_t>() == 10 * hvd::rank());  // a count
  }
  CHECK(layer->running_mean[2].item<float>() == hvd::rank());
  {
    hvd::AveragedBuffers means(layer);
    means.keep();
  }
  CHECK(layer->running_mean[0].item<float>() == mean);
  const hvd::AveragedBuffers nothing(torch::nn::Linear(2, 2));
  // whose elements share memory
  torch::nn::Module wide("wide");
  const at::Tensor one = torch::full({2, 1}, 1.0F * hvd::rank());
  wide.register_buffer("wide", one.expand({2, 3}));
  {
    const hvd::AveragedBuffers means(wide);
    CHECK(same(one, torch::full({2, 1}, static_cast<float>(mean))));
  }
  CHECK(one[1].item<float>() == hvd::rank());
  // By name, whatever the order in which a rank has registered them.
  struct Turned : torch::nn::Module {
    at::Tensor a, b;
    explicit Turned(bool turned) {
      if (turned) b = register_buffer("b", torch::full({2}, 10.0F * hvd::rank()));
      a = register_buffer("a", torch::full({2}, 1.0F * hvd::rank()));
      if (!turned) b = register_buffer("b", torch::full({2}, 10.0F * hvd::rank()));
    }
  };
  const Turned turned(last());
  const hvd::AveragedBuffers means(turned);
  CHECK(turned.a[0].item<float>() == mean);
  CHECK(turned.b[0].item<float>() == doctest::Approx(10 * mean));
}

TEST_CASE(
    "AveragedBuffers: a counter stays each rank's own, also where Module::to() has made it a "
    "floating number") {
  struct Net : torch::nn::Module {
    torch::nn::BatchNorm1d norm{nullptr};
    hvd::SyncBatchNorm sync{nullptr};
    torch::nn::BatchNorm1d stateless{nullptr};
    at::Tensor seen, scale, mask;
    Net()
        : norm(register_module("norm", torch::nn::BatchNorm1d(3))),
          sync(register_module("sync", hvd::SyncBatchNorm(torch::nn::BatchNormOptions(3)))),
          stateless(register_module(
              "stateless",
              torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(3).track_running_stats(false)))),
          seen(register_buffer("seen", torch::full({2}, hvd::rank(), at::kLong))),
          scale(register_buffer("scale", torch::full({}, hvd::rank(), kDouble))),
          mask(register_buffer("mask", torch::full({2}, hvd::rank() == 0, at::kBool))) {}
  } net;
  const double mean = (hvd::size() - 1) / 2.0;
  for (const bool converted : {false, true}) {
    if (converted) {
      net.norm->to(kDouble);
      net.sync->to(kDouble);
      CHECK((net.norm->num_batches_tracked.scalar_type() == kDouble));  // what LibTorch does
    }
    for (auto* counter : {&net.norm->num_batches_tracked, &net.sync->num_batches_tracked})
      counter->fill_(10 * hvd::rank());
    for (auto* statistic : {&net.norm->running_mean, &net.sync->running_mean})
      statistic->fill_(hvd::rank());
    {
      const hvd::AveragedBuffers means(net);
      CHECK(net.norm->running_mean[0].item<double>() == mean);
      CHECK(net.sync->running_mean[0].item<double>() == mean);
      CHECK(net.norm->num_batches_tracked.item<double>() == 10 * hvd::rank());
      CHECK(net.sync->num_batches_tracked.item<double>() == 10 * hvd::rank());
      CHECK(net.seen[1].item<double>() == hvd::rank());  // integers and truth values have no mean
      CHECK(net.mask[1].item<bool>() == (hvd::rank() == 0));
      CHECK(net.scale.item<double>() == mean);
    }
    CHECK(net.norm->running_mean[0].item<double>() == hvd::rank());
    CHECK(net.norm->num_batches_tracked.item<double>() == 10 * hvd::rank());
  }
}

}  // namespace
