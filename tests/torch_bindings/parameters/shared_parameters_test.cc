// share_parameters: one copy of the parameters per host. That it computes what
// shard_optimizer_state does, bit for bit: the cases of optimizer_shards_test.cc,
// what_if_sharded_test.cc and others, which run with and without. Here: whose memory it is, and who
// may write.
#include <algorithm>
#include <set>
#include <sstream>

#include "tests/torch_bindings/tied_net.h"
#include "torch_bindings/parameters/shared_parameters.h"

namespace {

using namespace hvd::test;
using at::kDouble;
using hvd::DistributedOptimizer, hvd::Mismatch, hvd::InvalidArgument;
using torch::optim::SGD, torch::optim::SGDOptions;

struct SharedRun {
  SharedRun()
      : wrapped(net.parameters(), SGDOptions(0.1).momentum(0.9)),
        plain(alone.parameters(), SGDOptions(0.1).momentum(0.9)) {
    wrap();
  }
  void wrap() {
    optimizer = std::make_unique<DistributedOptimizer>(
        wrapped, net.named_parameters(),
        hvd::DistributedOptimizerOptions{.share_parameters = true});
  }
  void step() {
    step_together(net, *optimizer, number);
    step_alone(alone, plain, number++);
    CHECK(furthest(net, alone) <= 1e-12);
    CHECK(equal_on_all_ranks(net));
  }
  /// What the next step says; nothing if it is made.
  std::string refused_step() {
    try {
      step_together(net, *optimizer, number);
    } catch (const Mismatch& error) {
      return error.what();
    }
    return "";
  }
  at::Tensor& weight() { return net.embedding->weight; }
  TiedNet net, alone;
  SGD wrapped, plain;
  std::unique_ptr<DistributedOptimizer> optimizer;
  int number = 0;
};

void write(const at::Tensor& parameter, double value) {
  const at::NoGradGuard no_gradient;
  parameter.fill_(value);
}

const bool& together() {
  static const bool more_than_one = hvd::size() > 1;
  return more_than_one;
}

TEST_CASE(
    "share_parameters: a host has one copy, which one of its ranks may write while the others "
    "wait") {
  SharedRun run;
  CHECK(run.optimizer->shares_parameters() == together());
  CHECK(run.optimizer->is_sharded());
  run.step();
  for (int round = 0; round < 20; ++round) {
    {
      const auto writing = run.optimizer->write_parameters();
      CHECK(writing.is_writer() == (hvd::local_rank() == 0));
      if (writing.is_writer()) write(run.weight(), round + 1);
    }
    CHECK(run.weight().eq(round + 1).all().item<bool>());
    write(run.alone.embedding->weight, round + 1);
    run.step();
  }
}

TEST_CASE(
    "share_parameters: the guard's scope does not change what a plain or a sharded optimizer's "
    "users write: every rank") {
  for (const bool shard : {false, true}) {
    TiedNet net;
    SGD sgd(net.parameters(), SGDOptions(0.1));
    DistributedOptimizer optimizer(sgd, net.named_parameters(), {.shard_optimizer_state = shard});
    CHECK(!optimizer.shares_parameters());
    for (int step = 0; step < 3; ++step) {
      step_together(net, optimizer, step);
      const auto writing = optimizer.write_parameters();
      CHECK(writing.is_writer());
      if (writing.is_writer()) write(net.hidden->weight, 0.25);
    }
    CHECK(equal_on_all_ranks(net));
  }
}

TEST_CASE(
    "share_parameters: what if I write parameters on one rank, or on all, without the guard: all "
    "ranks hear of it, and can go on") {
  for (const bool all : {false, true}) {
    SharedRun run;
    run.step();
    if (all || hvd::rank() == hvd::size() - 1) write(run.weight(), 0.5);
    const std::string text = run.refused_step();
    // the replica guard finds it first where hosts differ, which is for the user to mend
    const bool hosts_differ = !all && hvd::cross_size() > 1;
    const bool is_found_here = together() && !hosts_differ;
    CHECK(contains(text, is_found_here ? "write_parameters()" : ""));
    CHECK(contains(text, together() ? "embedding.weight" : ""));
    CHECK(contains(text, is_found_here ? "rank " + std::to_string(hvd::size() - 1) : ""));
    if (hosts_differ) hvd::broadcast_parameters(run.net, 0);
    run.optimizer->zero_grad();
    CHECK(run.refused_step().empty());
    CHECK(equal_on_all_ranks(run.net));
  }
}

TEST_CASE(
    "share_parameters: ranks that begin with different parameters are told so, and to broadcast "
    "them") {
  SharedRun run;
  write(run.net.hidden->bias, hvd::rank());
  const std::string text = run.refused_step();
  CHECK(contains(text, together() ? "hidden.bias" : ""));
  CHECK(contains(text, together() ? "broadcast_parameters" : ""));
  CHECK(!contains(text, "hidden.weight"));
  hvd::broadcast_parameters(run.net, 0);
  write(run.alone.hidden->bias, 0);
  run.optimizer->zero_grad();
  if (together()) run.step();
  CHECK(equal_on_all_ranks(run.net));
}

TEST_CASE(
    "share_parameters: what a broadcast has written stays accepted when one rank refuses the step "
    "that follows") {
  if (!together()) return;  // nobody has to refuse what is made alone
  SharedRun run;
  run.step();
  write(run.weight(), 0.25);
  hvd::broadcast_parameters(run.net, 0);
  write(run.alone.embedding->weight, 0.25);
  run.optimizer->zero_grad();
  run.net.loss(hvd::rank(), run.number).backward();
  if (hvd::rank() == 0) run.net.hidden->weight.mutable_grad().mul_(2);
  const std::string text = error_of<hvd::Error>([&] { run.optimizer->step(); });
  CHECK_MESSAGE(contains(text, "hidden.weight"), text);
  run.optimizer->zero_grad();
  run.step();
}

TEST_CASE("share_parameters: ranks that begin apart are told so without the replica guard, too") {
  hvd::Config unguarded = hvd::Config::from_environment();
  unguarded.replica_guard = hvd::ReplicaGuard::Off;
  const Restarted restarted(unguarded);
  SharedRun run;
  write(run.net.hidden->bias, hvd::rank());
  CHECK(contains(run.refused_step(), together() ? "hidden.bias" : ""));
}

TEST_CASE(
    "share_parameters: what broadcasts and torch::load write is taken over, also when parameters "
    "got other memory by it") {
  SharedRun run;
  run.step();
  std::stringstream file;
  torch::save(run.net.hidden, file);
  const at::Tensor before = run.weight().detach().clone();
  run.step();
  hvd::broadcast_parameters(run.net, hvd::size() - 1);
  run.step();
  torch::load(run.net.hidden, file);
  std::stringstream again(file.str());
  torch::load(run.alone.hidden, again);
  run.step();
  run.step();
  // Loaded on one rank only.
  if (together()) {
    if (hvd::rank() == 0) run.net.hidden->weight.set_data(torch::ones({7, 7}, kDouble));
    CHECK(contains(run.refused_step(), "hidden.weight"));
    run.net.hidden->weight.set_data(run.alone.hidden->weight.detach().clone());
    run.optimizer->zero_grad();
    run.step();
  }
}

TEST_CASE(
    "share_parameters: averaged parameters during evaluation are each rank's own, and the training "
    "goes on as if nothing had been") {
  SharedRun run;
  hvd::ExponentialMovingAverage average(run.net, {.decay = 0.5}),
      average_alone(run.alone, {.decay = 0.5});
  for (int step = 0; step < 4; ++step) {
    run.step();
    average.update();
    average_alone.update();
    for (int round = 0; round < 2; ++round) {
      const auto averaged = average.averaged();
      const auto averaged_alone = average_alone.averaged();
      hvd::barrier();
      CHECK(furthest(run.net, run.alone) <= 1e-12);
      CHECK(run.net.embedding->weight.is_same(run.net.decoder->weight));
    }
    CHECK(furthest(run.net, run.alone) <= 1e-12);
  }
  average.copy_to_parameters();
  average_alone.copy_to_parameters();
  run.step();
}

TEST_CASE(
    "share_parameters: after the wrapper's end, or unshard(), each rank has parameters of its "
    "own") {
  for (const bool unshard : {false, true}) {
    SharedRun run;
    run.step();
    if (unshard) run.optimizer->unshard();
    if (!unshard) run.optimizer.reset();
    CHECK(furthest(run.net, run.alone) <= 1e-12);
    hvd::barrier();
    write(run.weight(), hvd::rank());
    hvd::barrier();
    CHECK(run.weight().eq(hvd::rank()).all().item<bool>());
    hvd::broadcast_parameters(run.net, 0);
    write(run.alone.embedding->weight, 0);
    if (unshard) run.step();
  }
}

TEST_CASE("share_parameters: wrappers that come and go give their memory back") {
  std::set<const void*> places;
  for (int round = 0; round < 40; ++round) {
    SharedRun run;
    run.step();
    places.insert(run.weight().const_data_ptr());
    hvd::barrier();
  }
  CHECK((!together() || places.size() <= 4));
}

/// One that fails in its third step on the last rank, when all gradients are there.
struct Failing : SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    if (++steps != 3 || hvd::rank() != hvd::size() - 1) return SGD::step(std::move(closure));
    if (closure) closure();
    throw std::runtime_error("out of luck");
  }
  int steps = 0;
};

TEST_CASE(
    "share_parameters: an optimizer that throws on one rank while it updates its share is a "
    "Mismatch on the others") {
  for (const bool with_closure : {false, true}) {
    CAPTURE(with_closure);
    TiedNet net;
    Failing failing(net.parameters(), SGDOptions(0.1));
    DistributedOptimizer optimizer(failing, net.named_parameters(), {.share_parameters = true});
    const auto step = [&](int number) {
      const auto closure = [&] {
        optimizer.zero_grad();
        const at::Tensor loss = net.loss(hvd::rank(), number);
        loss.backward();
        return loss;
      };
      if (!with_closure) closure();
      optimizer.step(with_closure ? DistributedOptimizer::LossClosure(closure) : nullptr);
    };
    step(0);
    step(1);
    if (hvd::rank() == hvd::size() - 1) {
      CHECK_THROWS_WITH_AS(step(2), "out of luck", std::runtime_error);
    } else {
      CHECK_THROWS_WITH_AS(step(2), doctest::Contains("out of luck"), Mismatch);
    }
    step(3);
    CHECK(equal_on_all_ranks(net));
  }
}

/// Takes this rank's shared memory but for less than 64 KiB in one piece.
std::vector<std::shared_ptr<void>> filled_memory() {
  std::vector<std::shared_ptr<void>> all;
  for (std::size_t bytes = std::size_t{16} << 20; bytes >= std::size_t{64} << 10;) {
    all.push_back(hvd::allocate_shared(bytes));
    if (all.back()) continue;
    all.pop_back();
    bytes /= 2;
  }
  return all;
}

TEST_CASE(
    "share_parameters: where one host's memory is full, all ranks are told so, as often as they "
    "try; a smaller model, and the same with room, find the memory that there was") {
  hvd::Config config = hvd::Config::from_environment();
  config.arena_bytes = std::uint64_t{16} << 20;
  const Restarted restarted(config);
  const bool needs_room = hvd::local_size() > 1;  // who is alone keeps its parameters
  constexpr int kWidth = 20'000;                  // 20 of them do not fit into the memory
  const bool makes = hvd::cross_rank() == hvd::cross_size() - 1 && hvd::local_rank() == 0;
  const auto makers = hvd::allgather_object(makes);
  const auto maker = std::find(makers.begin(), makers.end(), true) - makers.begin();
  TiedNet net(kWidth), alone(kWidth);
  SGD wrapped(net.parameters(), SGDOptions(0.1)), plain(alone.parameters(), SGDOptions(0.1));
  DistributedOptimizer optimizer(wrapped, net.named_parameters(), {.share_parameters = true});
  const auto is_shared = [&] { return hvd::SharedParameters::contains(net.embedding->weight); };
  auto full = makes ? filled_memory() : std::vector<std::shared_ptr<void>>();
  for (int round = 0; round < 20 && needs_room; ++round) {
    const std::string text =
        error_of<InvalidArgument>([&] { step_together(net, optimizer, round); });
    CHECK_MESSAGE(contains(text, "rank " + std::to_string(maker) + " has no room"), text);
    CHECK(!is_shared());
    CHECK(furthest(net, alone) == 0);
  }
  full.resize(full.size() - std::min<std::size_t>(full.size(), 2));  // 64 KiB each at least
  {
    SharedRun smaller;  // of a few KiB
    smaller.step();
  }
  full.clear();
  hvd::barrier();
  for (int step = 0; step < 2; ++step) {
    step_together(net, optimizer, step);
    step_alone(alone, plain, step);
    CHECK(furthest(net, alone) <= 1e-12);
  }
  CHECK(is_shared() == needs_room);
  optimizer.unshard();
  CHECK(!is_shared());
}

TEST_CASE("share_parameters: refused at once, on all ranks, where it cannot work") {
  torch::nn::Linear layer(3, 2);
  const at::Tensor flat = torch::zeros({6});
  layer->weight.set_data(flat.view({2, 3}).slice(1, 0, 3));
  const auto wrap = [&](torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                        hvd::DistributedOptimizerOptions options = {}) {
    options.share_parameters = true;
    try {
      DistributedOptimizer refused(optimizer, module.named_parameters(), options);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const at::Tensor larger = torch::zeros({4, 3});
  layer->weight.set_data(larger.narrow(0, 0, 2));
  SGD sgd(layer->parameters(), SGDOptions(0.1));
  CHECK(contains(wrap(*layer, sgd), together() ? "'weight' is a view of a larger tensor" : ""));
  layer->weight.set_data(torch::zeros({2, 3}));
  layer->bias.set_data(layer->weight.detach().view({6}));
  CHECK(contains(wrap(*layer, sgd), together() ? "different tensors with the same memory" : ""));
  layer->bias.set_data(torch::zeros({2}));
  CHECK(contains(wrap(*layer, sgd, {.op = hvd::ReduceOp::Adasum}), "share_parameters"));
  torch::optim::LBFGS lbfgs(layer->parameters());
  CHECK(contains(wrap(*layer, lbfgs), "LBFGS"));
  CHECK(wrap(*layer, sgd).empty());
}

TEST_CASE("share_parameters: parameters of which one is refused can be added when it fits") {
  hvd::SharedParameters shared(hvd::global_process_set(), "refused", [] { return ""; });
  at::Tensor bias = torch::zeros({4}).narrow(0, 0, 2 + hvd::rank() % 2);
  const std::vector<hvd::SharedParameters::Named> both{{"weight", torch::zeros({2, 3})},
                                                       {"bias", bias}};
  CHECK(contains(error_of<InvalidArgument>([&] { shared.add(both); }),
                 "'bias' is a view of a larger tensor"));
  bias.set_data(torch::zeros({2}));
  shared.add(both);
}

}  // namespace
