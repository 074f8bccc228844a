// shard_gradients: bit for bit what the plain optimizer does, with a share of the gradients on each
// rank.
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>

#include "tests/torch_bindings/tied_net.h"
#include "tests/torch_bindings/wrapped_optimizers.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat, at::kHalf;
using hvd::DistributedOptimizer;
using hvd::DistributedOptimizerOptions;
using torch::optim::Optimizer;
using torch::optim::SGD, torch::optim::SGDOptions;

/// A matrix that is cut, a channels-last convolution, a branch that only odd ranks take, and
/// parameters without a gradient.
struct BranchNet : torch::nn::Module {
  explicit BranchNet(at::ScalarType of = kFloat) : type(of) {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3)));
    wide = register_module("wide", torch::nn::Linear(8 * 4 * 4, 67));
    out = register_module("out", torch::nn::Linear(67, 3));
    odd = register_parameter("odd", torch::ones({67}));
    unused = register_parameter("unused", torch::ones({70}));
    frozen = register_parameter("frozen", torch::ones({5}), false);
    to(type);
    const torch::NoGradGuard no_gradient;
    int variant = 0;
    for (auto& parameter : parameters())
      parameter.copy_(data(parameter.sizes(), kDouble, 0, variant++) * 0.1);
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor loss(int rank, int step) {
    const at::Tensor x = data({4, 3, 6, 6}, kDouble, rank, step).to(type);
    const at::Tensor y = data({4, 3}, kDouble, rank, step + 1).to(type);
    at::Tensor h = torch::tanh(wide(torch::relu(conv(x)).flatten(1)));
    if (rank % 2 == 1) h = h * odd;
    return torch::mse_loss(out(h), y);
  }
  at::ScalarType type;
  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear wide{nullptr}, out{nullptr};
  at::Tensor odd, unused, frozen;
};

struct Pair {
  explicit Pair(const NamedOptimizer& kind, DistributedOptimizerOptions options = {})
      : Pair(kind.make, std::move(options)) {}
  Pair(const std::function<std::unique_ptr<Optimizer>(Parameters)>& make,
       DistributedOptimizerOptions options)
      : of_shares(make(shares.parameters())), of_plain(make(plain.parameters())) {
    with_plain =
        std::make_unique<DistributedOptimizer>(*of_plain, plain.named_parameters(), options);
    options.shard_gradients = true;
    with_shares =
        std::make_unique<DistributedOptimizer>(*of_shares, shares.named_parameters(), options);
  }
  bool same_parameters() const {
    for (std::size_t i = 0; i < plain.parameters().size(); ++i)
      if (!same(plain.parameters()[i].detach(), shares.parameters()[i].detach())) return false;
    return true;
  }
  void step(int number, int passes = 1) {
    step_together(shares, *with_shares, number, passes);
    step_together(plain, *with_plain, number, passes);
  }
  BranchNet shares, plain;
  std::unique_ptr<Optimizer> of_shares, of_plain;
  std::unique_ptr<DistributedOptimizer> with_shares, with_plain;
};

TEST_CASE("shard_gradients steps as the plain optimizer does, bit for bit") {
  for (const auto& kind : torch_optimizers()) {
    CAPTURE(kind.name);
    Pair pair(kind);
    CHECK(pair.with_shares->is_sharded());
    CHECK(pair.with_shares->shards_gradients() == (hvd::size() > 1));
    for (int step = 0; step < 4; ++step) {
      pair.step(step);
      CHECK(pair.same_parameters());
      CHECK(equal_on_all_ranks(pair.shares));
    }
    CHECK(pair.shares.conv->weight.is_contiguous(at::MemoryFormat::ChannelsLast));
  }
}

/// What one step of gradients sends to other hosts, of this rank.
std::uint64_t sent_by_reduction(BranchNet& net, DistributedOptimizer& optimizer, int step) {
  const auto before = hvd::stats().bytes_to_other_hosts;
  net.loss(hvd::rank(), step).backward();
  optimizer.synchronize();
  hvd::barrier();  // what is sent for others has been sent
  const auto sent = hvd::stats().bytes_to_other_hosts - before;
  optimizer.step();
  optimizer.zero_grad();
  return sent;
}

TEST_CASE("shard_gradients sends half: each rank gets its part alone, the same of every bucket") {
  for (const bool in_groups : {false, true}) {
    DistributedOptimizerOptions options;
    if (in_groups) options.groups = 3;
    Pair pair(torch_optimizers()[0], options);
    std::uint64_t of_shares = 0, of_plain = 0;
    for (int step = 0; step < 3; ++step) {
      of_shares += sent_by_reduction(pair.shares, *pair.with_shares, step);
      of_plain += sent_by_reduction(pair.plain, *pair.with_plain, step);
    }
    CHECK(pair.same_parameters());
    if (hvd::size() == 1) continue;
    const double ratio = static_cast<double>(pair.with_shares->bytes_sent()) /
                         static_cast<double>(pair.with_plain->bytes_sent());
    CHECK(ratio == doctest::Approx(0.5).epsilon(0.01));
    const at::Tensor sent = hvd::allreduce(
        torch::tensor({static_cast<double>(of_shares), static_cast<double>(of_plain)}, kDouble),
        {.op = hvd::ReduceOp::Sum});
    CHECK(sent[0].item<double>() <= 0.6 * sent[1].item<double>());  // none at all on one host
  }
}

TEST_CASE(
    "shard_gradients with accumulation, sums, predivision, fp16, groups and gradients of their "
    "own") {
  const auto& kind = torch_optimizers()[1];
  const std::vector<DistributedOptimizerOptions> all{
      {.backward_passes_per_step = 3},
      {.op = hvd::ReduceOp::Sum},
      {.gradient_predivide_factor = 2},
      {.compression = hvd::Compression::fp16()},
      {.compression = hvd::Compression::bf16(),
       .op = hvd::ReduceOp::Sum,
       .backward_passes_per_step = 2},
      {.groups = 3},
      {.gradients_are_views = false},
  };
  for (std::size_t i = 0; i < all.size(); ++i) {
    CAPTURE(i);
    Pair pair(kind, all[i]);
    for (int step = 0; step < 3; ++step) {
      pair.step(step, all[i].backward_passes_per_step);
      CHECK(pair.same_parameters());
    }
  }
  const auto own = [](Parameters parameters) {
    return std::make_unique<wrapped::SignSgd>(std::move(parameters), wrapped::SignOptions(0.01));
  };
  Pair pair(own, {});
  for (int step = 0; step < 3; ++step) pair.step(step);
  CHECK(pair.same_parameters());
}

TEST_CASE(
    "shard_gradients: tied weights, a process set, parameters that come later, and unshard()") {
  TiedNet net, alone;
  const auto& kind = torch_optimizers()[2];
  const auto wrapped = kind.make(net.parameters()), plain = kind.make(alone.parameters());
  DistributedOptimizer optimizer(*wrapped, net.named_parameters(), {.shard_gradients = true});
  for (int step = 0; step < 3; ++step) {
    step_together(net, optimizer, step);
    step_alone(alone, *plain, step);
    CHECK(furthest(net, alone) <= 1e-12);
  }
  const hvd::ProcessSet set =
      hvd::add_process_set(hvd::size() > 2 ? std::vector<int>{0, 2} : everyone());
  {
    Pair pair(kind, {.process_set = set});
    for (int step = 0; step < 2; ++step) pair.step(step);
    CHECK(pair.same_parameters());
  }
  hvd::barrier();
  hvd::remove_process_set(set);
  Pair pair(kind);
  pair.step(0);
  at::Tensor more[2];
  for (const bool shares : {true, false}) {
    more[shares] = data({130}, kFloat, 0).requires_grad_();
    (shares ? pair.with_shares : pair.with_plain)
        ->param_groups()[0]
        .params()
        .push_back(more[shares]);
  }
  for (int step = 1; step < 4; ++step) {
    for (const bool shares : {true, false}) {
      auto& optimizer_of = shares ? *pair.with_shares : *pair.with_plain;
      optimizer_of.zero_grad();
      ((shares ? pair.shares : pair.plain).loss(hvd::rank(), step) +
       more[shares].square().sum() * hvd::rank())
          .backward();
      optimizer_of.step();
    }
    CHECK(pair.same_parameters());
    CHECK(same(more[0].detach(), more[1].detach()));
    if (step == 2) {
      pair.with_shares->unshard();
      CHECK(!pair.with_shares->shards_gradients());
    }
  }
  CHECK(pair.shares.out->weight.grad().defined());  // in shares no longer
}

TEST_CASE("shard_gradients: each rank has its share alone, until the step") {
  Pair pair(torch_optimizers()[0]);
  auto& optimizer = *pair.with_shares;
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    pair.shares.loss(hvd::rank(), step).backward();
    optimizer.synchronize();
    optimizer.synchronize();
    pair.with_plain->zero_grad();
    pair.plain.loss(hvd::rank(), step).backward();
    pair.with_plain->synchronize();
    std::int64_t mine = 0, all = 0, without = 0;
    for (const auto& [name, share] : optimizer.gradient_shares()) mine += share.numel();
    for (const auto& parameter : pair.plain.parameters())
      all += parameter.grad().defined() ? parameter.grad().numel() : 0;
    for (const auto& parameter : pair.shares.parameters())
      without += parameter.grad().defined() ? 0 : 1;
    if (hvd::size() == 1) continue;
    CHECK(without == static_cast<std::int64_t>(pair.shares.parameters().size()));
    CHECK(mine < all / hvd::size() + 200);
    const at::Tensor sum =
        hvd::allreduce(torch::tensor({mine}, at::kLong), {.op = hvd::ReduceOp::Sum});
    CHECK(sum.item<std::int64_t>() == all);
    optimizer.step();
    pair.with_plain->step();
    CHECK(optimizer.gradient_shares().empty());
    CHECK(pair.same_parameters());
  }
}

TEST_CASE("shard_gradients: clip_grad_norm_ and GradScaler work on the shares") {
  for (const double norm_type : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
    Pair pair(torch_optimizers()[1]);
    hvd::GradScaler of_shares({.init_scale = 512, .growth_interval = 2}),
        of_plain({.init_scale = 512, .growth_interval = 2});
    for (int step = 0; step < 5; ++step) {
      double norms[2];
      for (const bool shares : {true, false}) {
        auto& optimizer = shares ? *pair.with_shares : *pair.with_plain;
        auto& scaler = shares ? of_shares : of_plain;
        optimizer.zero_grad();
        at::Tensor loss = scaler.scale((shares ? pair.shares : pair.plain).loss(hvd::rank(), step));
        if (step == 2 && last()) loss = loss * INFINITY;
        loss.backward();
        scaler.unscale_(optimizer);
        norms[shares] = hvd::clip_grad_norm_(optimizer, 0.01, norm_type);
        scaler.step(optimizer);
        scaler.update();
      }
      CHECK(of_shares.get_scale() == of_plain.get_scale());
      if (step != 2) CHECK(norms[0] == doctest::Approx(norms[1]).epsilon(1e-5));
      for (std::size_t i = 0; i < pair.plain.parameters().size(); ++i)
        CHECK(difference(pair.plain.parameters()[i].detach(),
                         pair.shares.parameters()[i].detach()) < 1e-6);
      CHECK(equal_on_all_ranks(pair.shares));
    }
  }
}

TEST_CASE("shard_gradients: where one rank's gradients are refused, clipping tells all ranks") {
  if (hvd::size() == 1) return;
  Pair pair(torch_optimizers()[0]);
  pair.with_shares->zero_grad();
  pair.shares.loss(hvd::rank(), 0).backward();
  at::Tensor& gradient = pair.shares.wide->bias.mutable_grad();
  if (last()) gradient = torch::ones({67});
  const std::string text =
      error_of<hvd::Mismatch>([&] { hvd::clip_grad_norm_(*pair.with_shares, 1); });
  CAPTURE(text);
  CHECK(contains(text, "rank " + std::to_string(hvd::size() - 1) + ": "));
  CHECK(contains(text, "wide.bias"));
  CHECK_FALSE(hvd::any(false));
  pair.step(1);
  CHECK(equal_on_all_ranks(pair.shares));
}

TEST_CASE("shard_gradients: gradients that are thrown away count no more") {
  Pair pair(torch_optimizers()[0]);
  for (int step = 0; step < 6; ++step) {
    for (const bool shares : {true, false}) {
      auto& optimizer = shares ? *pair.with_shares : *pair.with_plain;
      auto& net = shares ? pair.shares : pair.plain;
      optimizer.zero_grad();
      if (step == 1 || step == 2) {
        (net.loss(hvd::rank(), 30) * 100).backward();
        step == 1 ? optimizer.zero_grad() : net.zero_grad();
      } else if (step == 3) {
        (net.loss(hvd::rank(), 30) * 100).backward();
        optimizer.synchronize();
        optimizer.zero_grad();
      }
      net.loss(hvd::rank(), step).backward();
      optimizer.step();
    }
    CHECK(pair.same_parameters());
  }
}

TEST_CASE("shard_gradients: a bucket that was in shares before the rest was thrown away is, too") {
  for (const bool by_module : {true, false}) {
    std::vector<at::Tensor> weights;
    std::vector<std::vector<at::Tensor>> groups;
    for (int i = 0; i < 3; ++i) {
      weights.push_back(torch::zeros({200}, torch::requires_grad()));
      groups.push_back({weights.back()});
    }
    SGD sgd(weights, SGDOptions(1));
    DistributedOptimizer optimizer(sgd, {}, {.groups = groups, .shard_gradients = true});
    const auto backward = [&](double value) {
      for (auto& weight : weights) (weight * (value + hvd::rank())).sum().backward();
    };
    (weights[0] * 50).sum().backward();
    hvd::barrier();
    (weights[1] * 50).sum().backward();  // what is reduced meanwhile goes into shares
    if (by_module) {
      for (auto& weight : weights) weight.mutable_grad().reset();
    } else {
      optimizer.zero_grad();
    }
    backward(1);
    optimizer.step();
    for (const auto& weight : weights)
      CHECK(torch::equal(weight.detach(), torch::full({200}, -(hvd::size() + 1) / 2.0F)));
  }
}

TEST_CASE("shard_gradients: what comes late on some ranks is added to what the others gave") {
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 3; ++i) weights.push_back(torch::zeros({200}, torch::requires_grad()));
  SGD sgd(weights, SGDOptions(1));
  DistributedOptimizer optimizer(sgd, {}, {.shard_gradients = true});
  at::Tensor late = weights[static_cast<std::size_t>(hvd::rank() % 2)];
  const double value = hvd::rank() + 1;
  late.set_requires_grad(false);
  ((weights[0] + weights[1] + weights[2]) * value).sum().backward();
  late.set_requires_grad(true);
  (late * value).sum().backward();
  optimizer.step();
  for (const auto& weight : weights)
    CHECK(torch::allclose(weight.detach(), torch::full({200}, -(hvd::size() + 1) / 2.0F)));
}

TEST_CASE("shard_gradients in a checkpoint: whole, and read by any wrapper") {
  const auto& kind = torch_optimizers()[1];
  Pair first(kind), second(kind);
  first.step(0);
  std::stringstream of_shares, of_plain;
  torch::save(*first.with_shares, of_shares);
  torch::save(*first.with_plain, of_plain);
  torch::load(*second.with_plain, of_shares);
  torch::load(*second.with_shares, of_plain);
  const torch::NoGradGuard no_gradient;
  for (std::size_t i = 0; i < first.plain.parameters().size(); ++i) {
    second.plain.parameters()[i].copy_(first.plain.parameters()[i]);
    second.shares.parameters()[i].copy_(first.plain.parameters()[i]);
  }
  const torch::AutoGradMode with_gradients(true);
  for (int step = 1; step < 3; ++step) {
    first.step(step);
    second.step(step);
    CHECK(first.same_parameters());
    CHECK(second.same_parameters());
    CHECK(same(first.plain.wide->weight.detach(), second.plain.wide->weight.detach()));
  }
}

TEST_CASE("shard_gradients refuses what it cannot do") {
  BranchNet net;
  SGD sgd(net.parameters(), SGDOptions(0.1));
  const auto refusal = [&](const DistributedOptimizerOptions& options) {
    return error_of<hvd::InvalidArgument>(
        [&] { DistributedOptimizer optimizer(sgd, net.named_parameters(), options); });
  };
  CHECK(contains(refusal({.op = hvd::ReduceOp::Adasum, .shard_gradients = true}),
                 "does not go with ReduceOp::Adasum"));
  CHECK(contains(refusal({.shard_gradients = true, .share_parameters = true}),
                 "does not go with share_parameters"));
  CHECK(contains(refusal({.compression = hvd::Compression::powersgd(2), .shard_gradients = true}),
                 "does not go with int8, topk or powersgd"));
  DistributedOptimizer optimizer(sgd, net.named_parameters(), {.shard_gradients = true});
  if (hvd::size() == 1) return;
  net.loss(hvd::rank(), 0).backward();
  optimizer.synchronize();
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { optimizer.unshard(); }),
                 "the gradients are in shares"));
  hvd::GradScaler scaler({.agree = false});
  scaler.scale(torch::ones({}));
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { scaler.unscale_(optimizer); }),
                 "ranks have to agree"));
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { net.loss(hvd::rank(), 1).backward(); }),
                 "are reduced and in shares already"));
  optimizer.zero_grad();
  net.loss(hvd::rank(), 1).backward();
  optimizer.synchronize();
  net.odd.mutable_grad() = torch::ones_like(net.odd);
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { optimizer.synchronize(); }),
                 "change gradient_shares() instead"));
  const at::Tensor before = net.odd.detach().clone();
  {
    const auto skip = optimizer.skip_synchronize();  // the user's own gradient counts
    optimizer.step();
  }
  CHECK(same(net.odd.detach(), before - 0.1 * torch::ones_like(before)));
  CHECK(equal_on_all_ranks(net));

  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true));
  hvd::broadcast_parameters(embedding, 0);
  for (const bool dense : {false, true}) {
    SGD of_rows(embedding->parameters(), SGDOptions(0.1));
    DistributedOptimizer sparse(of_rows, embedding->named_parameters(),
                                {.sparse_as_dense = dense, .shard_gradients = true});
    const auto backward = [&] { embedding(torch::tensor({1, hvd::rank()})).sum().backward(); };
    if (dense) {
      backward();
      sparse.step();
      CHECK(same_on_all_ranks(embedding->weight));
    } else {
      CHECK(contains(error_of<hvd::InvalidArgument>(backward), "it is sparse"));
      sparse.zero_grad();
    }
  }
}

TEST_CASE(
    "shard_gradients and zero_grad(false): what a step does not use is stepped with zeros, as by "
    "the plain optimizer") {
  for (const auto& kind : torch_optimizers()) {
    CAPTURE(kind.name);
    Pair pair(kind);
    for (int step = 0; step < 6; ++step) {
      for (const bool shares : {true, false}) {
        BranchNet& net = shares ? pair.shares : pair.plain;
        DistributedOptimizer& optimizer = shares ? *pair.with_shares : *pair.with_plain;
        // the branch of odd ranks in the first and the fourth step alone
        net.loss(step % 3 == 0 ? hvd::rank() : 0, step).backward();
        if (step == 2) {
          optimizer.zero_grad(false);  // before the step
          net.loss(0, step).backward();
        }
        optimizer.step();
        optimizer.zero_grad(step == 4);
      }
      CHECK(pair.same_parameters());
    }
    pair.with_shares->zero_grad(false);
    pair.with_plain->zero_grad(false);
    pair.with_shares->unshard();
    for (const bool shares : {true, false}) {
      (shares ? pair.shares : pair.plain).loss(0, 7).backward();
      (shares ? *pair.with_shares : *pair.with_plain).step();
    }
    CHECK(pair.same_parameters());
  }
}

TEST_CASE(
    "shard_gradients: unshard() between synchronize() and step() is refused on all ranks, also "
    "where there is no share") {
  const at::Tensor weight = torch::full({1}, 2.0, kDouble).requires_grad_();
  SGD sgd(Parameters{weight}, SGDOptions(0.5));
  DistributedOptimizer optimizer(sgd, {{"weight", weight}}, {.shard_gradients = true});
  (weight * (hvd::rank() + 1)).sum().backward();
  optimizer.synchronize();
  if (hvd::size() > 1)
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { optimizer.unshard(); }),
                   "the gradients are in shares"));
  optimizer.step();
  optimizer.unshard();
  CHECK_FALSE(optimizer.is_sharded());
  CHECK(weight.item<double>() == doctest::Approx(2 - 0.25 * (hvd::size() + 1)));
}

TEST_CASE(
    "shard_gradients: unshard() between backward() and step() is refused on all ranks, also where "
    "gradients are only on their way, or on some ranks alone") {
  for (const bool on_all : {true, false}) {
    CAPTURE(on_all);
    const at::Tensor weight = torch::full({70}, 2.0, kDouble).requires_grad_(),
                     unused = torch::ones({70}, kDouble).requires_grad_();
    SGD sgd(Parameters{weight, unused}, SGDOptions(0.5));
    DistributedOptimizer optimizer(sgd, {}, {.shard_gradients = true});
    const bool here = on_all || !last();
    if (here) (weight * (hvd::rank() + 1)).sum().backward();
    if (hvd::size() > 1)
      CHECK(contains(error_of<hvd::InvalidArgument>([&] { optimizer.unshard(); }),
                     "or on their way"));
    optimizer.step();
    const int ranks = hvd::size(), those = on_all ? ranks : ranks - 1;
    const double stepped = 2 - 0.5 * those * (those + 1) / 2 / ranks;
    CHECK(difference(weight.detach(), torch::full({70}, stepped, kDouble)) < 1e-12);
    CHECK(same(unused.detach(), torch::ones({70}, kDouble)));
    optimizer.unshard();
    CHECK_FALSE(optimizer.is_sharded());
    optimizer.zero_grad();
    (weight * (hvd::rank() + 1)).sum().backward();
    optimizer.step();
    CHECK(difference(weight.detach(), torch::full({70}, stepped - 0.25 * (ranks + 1), kDouble)) <
          1e-12);
  }
}

TEST_CASE(
    "shard_gradients: a group that is taken out again counts no more, in norms and for a "
    "GradScaler") {
  for (const bool when_reduced : {true, false}) {
    for (const bool shares : {true, false}) {
      CAPTURE(when_reduced);
      CAPTURE(shares);
      const at::Tensor weight = torch::zeros({130}, torch::requires_grad()),
                       removed = torch::zeros({150}, torch::requires_grad());
      std::vector<torch::optim::OptimizerParamGroup> groups{Parameters{weight},
                                                            Parameters{removed}};
      SGD sgd(groups, SGDOptions(1));
      DistributedOptimizer optimizer(sgd, {}, {.shard_gradients = shares});
      hvd::GradScaler scaler({.init_scale = 4});
      float before = 0;
      for (int step = 0; step < 2; ++step) {
        if (step == 0 && !when_reduced) sgd.param_groups().pop_back();
        optimizer.zero_grad();
        scaler.scale((weight * (hvd::rank() + 1)).sum() + (removed * INFINITY).sum()).backward();
        if (step == 0 && when_reduced) {
          optimizer.synchronize();
          sgd.param_groups().pop_back();
        }
        scaler.unscale_(optimizer);
        const double norm = std::sqrt(130.0) * (hvd::size() + 1) / 2;
        CHECK(hvd::clip_grad_norm_(optimizer, 1) == doctest::Approx(norm).epsilon(1e-5));
        scaler.step(optimizer);
        scaler.update();
        CHECK(scaler.get_scale() == 4);
        before -= static_cast<float>(1 / std::sqrt(130.0));
        CHECK(difference(weight.detach(), torch::full({130}, before)) < 1e-5);
        CHECK(same(removed.detach(), torch::zeros({150})));
      }
    }
  }
}

}  // namespace
