// No kind of training gives a false alarm of the replica guard: those that replica_guard_test.cc
// does not have. HVD_TEST_STEPS is how many steps each makes, by hand 10,000.
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/torch_bindings/norm_net.h"
#include "tests/torch_bindings/wrapped_optimizers.h"

namespace replica_kinds {
namespace {

using namespace hvd::test;
using hvd::Config, hvd::DistributedOptimizer, hvd::DistributedOptimizerOptions, hvd::ReplicaGuard;
using torch::nn::Linear, torch::nn::Sequential;
using torch::optim::SGD, torch::optim::SGDOptions;

int steps() {
  const char* const said = std::getenv("HVD_TEST_STEPS");
  return said == nullptr ? 30 : std::atoi(said);
}
at::Tensor batch(int step) { return data({4, 6}, at::kFloat, hvd::rank(), step); }
Sequential net_of(bool normed) {
  torch::manual_seed(5);
  Sequential net(Linear(6, 8));
  if (normed) net->push_back(torch::nn::BatchNorm1d(8));
  net->push_back(torch::nn::Tanh());
  net->push_back(Linear(8, 3));
  return net;
}
void end(DistributedOptimizer& optimizer, const torch::nn::Module& net) {
  optimizer.check_replicas();
  for (const auto& parameter : net.parameters()) CHECK(same_on_all_ranks(parameter));
}

void on_a_process_set() {
  std::vector<int> ranks;
  for (int rank = hvd::size() > 2 ? 1 : 0; rank < hvd::size(); ++rank) ranks.push_back(rank);
  const hvd::ProcessSet set = hvd::add_process_set(ranks);
  Sequential net = net_of(false);
  const torch::NoGradGuard at_first;
  if (!set.included()) net->parameters()[0].add_(1);
  {
    const torch::AutoGradMode trains(true);
    DistributedOptimizer optimizer(std::make_unique<SGD>(net->parameters(), SGDOptions(1e-3)),
                                   net->named_parameters(), {.process_set = set});
    for (int step = 0; step < steps(); ++step) {
      optimizer.zero_grad();
      net->forward(batch(step)).square().mean().backward();
      optimizer.step();
    }
    if (set.included()) optimizer.check_replicas();
  }
  hvd::remove_process_set(set);
}

void with_join() {
  Sequential net = net_of(false);
  DistributedOptimizer optimizer(
      std::make_unique<SGD>(net->parameters(), SGDOptions(1e-3).momentum(0.5)),
      net->named_parameters());
  for (int epoch = 0; epoch < 5; ++epoch) {
    const auto guard = optimizer.join();
    for (int step = 0; step < steps() / 5 + (hvd::rank() + epoch) % hvd::size(); ++step) {
      optimizer.zero_grad();
      net->forward(batch(step)).square().mean().backward();
      optimizer.step();
    }
  }
  end(optimizer, *net);
}

void with_scaler(bool sharded) {
  Sequential net = net_of(false);
  DistributedOptimizer optimizer(std::make_unique<torch::optim::Adam>(net->parameters(), 1e-3),
                                 net->named_parameters(), {.shard_optimizer_state = sharded});
  hvd::GradScaler scaler({.init_scale = 1024, .growth_interval = 5});
  for (int step = 0; step < steps(); ++step) {
    optimizer.zero_grad();
    at::Tensor loss = net->forward(batch(step)).square().mean();
    // left out by all
    if (step % 7 == 3 && hvd::rank() == step % hvd::size())
      loss = loss * std::numeric_limits<float>::infinity();
    scaler.scale(loss).backward();
    if (step % 3 == 0) {
      scaler.unscale_(optimizer);
      hvd::clip_grad_norm_(optimizer, 1);
    }
    scaler.step(optimizer);
    scaler.update();
  }
  end(optimizer, *net);
}

void with_lbfgs(bool search) {
  Sequential net = net_of(false);
  torch::optim::LBFGSOptions options(search ? 1 : 0.01);
  options.max_iter(2).history_size(4);
  if (search) options.line_search_fn("strong_wolfe");
  DistributedOptimizer optimizer(std::make_unique<torch::optim::LBFGS>(net->parameters(), options),
                                 net->named_parameters());
  for (int step = 0; step < steps(); ++step) {
    optimizer.step([&] {
      optimizer.zero_grad();
      const at::Tensor loss = (net->forward(batch(step)) - 1).square().mean();
      loss.backward();
      return loss;
    });
  }
  end(optimizer, *net);
}

void with_sparse_embeddings() {
  torch::manual_seed(3);
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(50, 4).sparse(true));
  DistributedOptimizer optimizer(std::make_unique<SGD>(table->parameters(), SGDOptions(1e-3)),
                                 table->named_parameters());
  for (int step = 0; step < steps(); ++step) {
    optimizer.zero_grad();
    table->forward((torch::arange(5) * (step + 1) + hvd::rank()).remainder(50))
        .square()
        .mean()
        .backward();
    optimizer.step();
  }
  end(optimizer, *table);
}

/// Weights, branches that differ by rank, parameters that come and layers that freeze.
void with_changes() {
  Sequential net = net_of(false), head = net_of(false);
  DistributedOptimizer optimizer(std::make_unique<SGD>(net->parameters(), SGDOptions(1e-3)), [&] {
    auto names = net->named_parameters().pairs();
    for (const auto& item : head->named_parameters())
      names.emplace_back("head." + item.key(), item.value());
    return names;
  }());
  for (int step = 0; step < steps(); ++step) {
    if (step == steps() / 2)
      optimizer.add_param_group(torch::optim::OptimizerParamGroup(head->parameters()));
    if (step % 10 == 4) net[0]->parameters()[0].set_requires_grad(step % 20 == 4);
    if (step % 4 == 0 && step < steps() / 2) optimizer.set_weight(1 + hvd::rank());
    optimizer.zero_grad();
    head->zero_grad();
    at::Tensor loss = net->forward(batch(step)).square().mean();
    if (step >= steps() / 2 && (step + hvd::rank()) % 3 != 0)
      loss = loss + head->forward(batch(step)).square().mean();
    loss.backward();
    optimizer.step();
    if (step % 5 == 2) {
      const torch::NoGradGuard no_gradient;
      for (auto& parameter : net->parameters()) parameter.clamp_(-0.5, 0.5);
    }
  }
  end(optimizer, *net);
}

/// Two layers, of which a pass uses one or both, by rank.
struct Branches : torch::nn::Module {
  Branches() {
    torch::manual_seed(5);
    one = register_module("one", Linear(6, 3));
    two = register_module("two", Linear(6, 3));
    mask = register_buffer("mask", torch::ones({20'000}));
  }
  at::Tensor forward(const at::Tensor& x, int which) {
    return (which != 1 ? one(x) : 0 * x.sum()) + (which != 0 ? two(x) : 0 * x.sum()) * mask[0];
  }
  Linear one{nullptr}, two{nullptr};
  at::Tensor mask;
};
void with_ddp_and_unused_parameters() {
  const auto net = std::make_shared<Branches>();
  hvd::DistributedDataParallel<Branches> ddp(net, {.find_unused_parameters = true});
  SGD sgd(net->parameters(), SGDOptions(1e-3).momentum(0.5));
  for (int step = 0; step < steps(); ++step) {
    sgd.zero_grad();
    ddp.forward(batch(step), (hvd::rank() + step) % 3).square().mean().backward();
    sgd.step();
  }
  for (const auto& parameter : net->parameters()) CHECK(same_on_all_ranks(parameter));
}
/// Accumulation, evaluation by one rank, averages, compression.
void with_ddp(const hvd::Compression& compression) {
  Sequential net = net_of(true);
  hvd::DistributedDataParallel ddp(net, {.compression = compression});
  SGD sgd(net->parameters(), SGDOptions(1e-3));
  hvd::ExponentialMovingAverage average(*net, {.decay = 0.9});
  for (int step = 0; step < steps(); ++step) {
    if (step % 3 == 0) {
      const auto local = ddp.no_sync();
      ddp.forward(batch(step + 1)).square().mean().backward();
    }
    ddp.forward(batch(step)).square().mean().backward();
    sgd.step();
    sgd.zero_grad();
    average.update();
    if (step % 10 == 5) {
      const auto averaged = average.averaged();
      const torch::NoGradGuard no_gradient;
      ddp.eval();
      if (hvd::rank() == 0) ddp.forward(batch(step));
      ddp.train();
    }
  }
  for (const auto& parameter : net->parameters()) CHECK(same_on_all_ranks(parameter));
}

TEST_CASE(
    "replicas: sets, join, skipped steps, LBFGS, sparse gradients, changes and DDP give no false "
    "alarm, by slices and in full" *
    doctest::timeout(steps() > 1000 ? 3600 : 120)) {
  const std::vector<std::pair<std::string, std::function<void()>>> kinds{
      {"a process set", on_a_process_set},
      {"join", with_join},
      {"GradScaler", [] { with_scaler(false); }},
      {"GradScaler, sharded", [] { with_scaler(true); }},
      {"LBFGS", [] { with_lbfgs(false); }},
      {"LBFGS with a line search", [] { with_lbfgs(true); }},
      {"sparse embeddings", with_sparse_embeddings},
      {"changes", with_changes},
      {"DDP with unused parameters", with_ddp_and_unused_parameters},
      {"DDP", [] { with_ddp({}); }},
      {"DDP in 16 bits", [] { with_ddp(hvd::Compression::fp16()); }},
      {"DDP with top-k", [] { with_ddp(hvd::Compression::topk(0.2)); }},
  };
  for (const auto mode : {ReplicaGuard::Slice, ReplicaGuard::Full}) {
    Config config = Config::from_environment();
    config.replica_guard = mode;
    const Restarted restarted(config);
    for (const auto& [name, train] : kinds) {
      CAPTURE(name);
      train();
    }
  }
}

}  // namespace
}  // namespace replica_kinds
