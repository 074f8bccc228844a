// What happens if I ... : shard_optimizer_state, and what users do to the wrapped optimizer then.
#include <sstream>

#include "tests/torch_bindings/tied_net.h"

namespace {

using namespace hvd::test;
using at::kDouble;
using hvd::DistributedOptimizer;
using torch::optim::Optimizer, torch::optim::SGD, torch::optim::SGDOptions;

/// A sharded run and what one process makes of the same steps.
struct TiedRun {
  explicit TiedRun(const NamedOptimizer& kind, bool shard = true)
      : wrapped(kind.make(net.parameters())), plain(kind.make(alone.parameters())) {
    wrap(shard);
  }
  void wrap(bool shard) {
    optimizer =
        std::make_unique<DistributedOptimizer>(*wrapped, net.named_parameters(), how(shard));
  }
  static hvd::DistributedOptimizerOptions how(bool shard) {
    return {.shard_optimizer_state = shard, .share_parameters = shard && one_copy};
  }
  void step() {
    optimizer->zero_grad();
    net.loss(hvd::rank(), number).backward();
    optimizer->step();
    step_alone(alone, *plain, number++);
    CHECK(furthest(net, alone) <= 1e-12);
    CHECK(equal_on_all_ranks(net));
  }
  TiedNet net, alone;
  std::unique_ptr<Optimizer> wrapped, plain;
  std::unique_ptr<DistributedOptimizer> optimizer;
  int number = 0;
};

TEST_CASE(
    "what happens if I call the wrapped optimizer's zero_grad() instead of the wrapper's: the "
    "same") {
  with_and_without_one_copy();
  for (const auto& kind : torch_optimizers()) {
    for (const bool to_none : {true, false}) {
      CAPTURE(kind.name);
      CAPTURE(to_none);
      TiedRun run(kind);
      for (int step = 0; step < 4; ++step) {
        run.wrapped->zero_grad(to_none);
        for (const auto& parameter : run.net.parameters())
          CHECK((!parameter.grad().defined() || parameter.grad().abs().sum().item<double>() == 0));
        run.net.loss(hvd::rank(), step).backward();
        run.optimizer->step();
        step_alone(run.alone, *run.plain, step);
        CHECK(furthest(run.net, run.alone) <= 1e-12);
      }
      CHECK(run.wrapped->param_groups()[0].params().size() == run.net.parameters().size());
    }
  }
}

TEST_CASE(
    "what happens if I unshard and go on, wrap again, shard again, or step without a wrapper: as "
    "if it had never been sharded") {
  with_and_without_one_copy();
  for (const auto& kind : torch_optimizers()) {
    CAPTURE(kind.name);
    TiedRun run(kind);
    run.step();
    run.step();
    run.optimizer->unshard();
    CHECK(!run.optimizer->is_sharded());
    CHECK(run.wrapped->state().size() == run.plain->state().size());
    run.step();
    run.optimizer->unshard();  // does nothing
    for (const bool shard : {true, false, true}) {
      if (run.optimizer->is_sharded()) run.optimizer->unshard();
      run.optimizer.reset();
      run.wrap(shard);
      run.step();
      run.step();
    }
    run.optimizer->unshard();
    run.optimizer.reset();
    for (auto* each : {&run.net, &run.alone}) {
      each->zero_grad();
      each->loss(0, 9).backward();
    }
    run.wrapped->step();
    run.plain->step();
    CHECK(furthest(run.net, run.alone) <= 1e-12);
  }
}

TEST_CASE(
    "what happens if a sharded wrapper ends without unshard(): wrapping or stepping its optimizer "
    "is an error, not a wrong result") {
  with_and_without_one_copy();
  for (const auto& kind : torch_optimizers()) {
    CAPTURE(kind.name);
    TiedRun run(kind);
    run.step();
    const std::string while_alive = error_of<hvd::InvalidArgument>(
        [&] { DistributedOptimizer(*run.wrapped, run.net.named_parameters()); });
    INFO(while_alive);
    CHECK(contains(while_alive, "unshard()"));
    std::stringstream whole;
    torch::save(*run.optimizer, whole);
    run.step();
    run.optimizer.reset();
    for (const bool shard : {false, true}) {
      const std::string text = error_of<hvd::InvalidArgument>([&] { run.wrap(shard); });
      INFO(text);
      CHECK(contains(text, "unshard()"));
    }
    const at::Tensor before = run.net.hidden->weight.detach().clone();
    run.net.loss(0, 0).backward();
    CHECK_THROWS_AS(run.wrapped->step(), c10::Error);
    CHECK(same(run.net.hidden->weight.detach(), before));
    // Who has a whole state elsewhere, or wants none, goes on.
    run.wrapped->state().clear();
    if (kind.name != "Adagrad") run.wrap(true);
    if (kind.name != "Adagrad") torch::load(*run.optimizer, whole);
  }
  TiedRun stateless(
      {"SGD", [](Parameters p) { return std::make_unique<SGD>(std::move(p), SGDOptions(0.1)); }});
  stateless.step();
  stateless.optimizer.reset();
  stateless.wrap(false);
  stateless.step();
}

TEST_CASE(
    "what happens if I step the wrapped optimizer itself while it is sharded: the wrapper's next "
    "call says so, on all ranks") {
  with_and_without_one_copy();
  for (const auto& kind : torch_optimizers()) {
    CAPTURE(kind.name);
    TiedRun run(kind);
    run.step();
    run.net.loss(hvd::rank(), 5).backward();
    if (kind.name == "Adagrad") {
      CHECK_THROWS_AS(run.wrapped->step(), c10::Error);  // it finds no state
      continue;
    }
    run.wrapped->step();
    const std::string text = error_of<hvd::InvalidArgument>([&] { run.optimizer->zero_grad(); });
    INFO(text);
    CHECK(contains(text, "unshard()"));
    CHECK(contains(text, "decoder.weight = embedding.weight"));
  }
}

/// User code that keeps a state of a type of its own.
struct CountState : torch::optim::OptimizerCloneableParamState<CountState> {
  int steps = 0;
};
struct CountingSgd : Optimizer {
  explicit CountingSgd(Parameters parameters)
      : Optimizer(std::move(parameters), std::make_unique<SGDOptions>(0.1)) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const torch::NoGradGuard no_gradient;
    for (auto& group : param_groups())
      for (auto& parameter : group.params()) {
        auto& state = state_[parameter.unsafeGetTensorImpl()];
        if (!state) state = std::make_unique<CountState>();
        parameter.sub_(parameter.grad() * 0.1 / ++static_cast<CountState&>(*state).steps);
      }
    return {};
  }
};

TEST_CASE(
    "what happens if I unshard an optimizer of my own that has a state: an error on all ranks, and "
    "it stays sharded") {
  with_and_without_one_copy();
  TiedRun run(
      {"the user's own", [](Parameters p) { return std::make_unique<CountingSgd>(std::move(p)); }});
  run.step();
  const std::string text = error_of<hvd::InvalidArgument>([&] { run.optimizer->unshard(); });
  CHECK(contains(text, "LibTorch does not know"));
  CHECK(run.optimizer->is_sharded());
  run.step();
  run.optimizer.reset();  // whole parameters have the same owners again
  run.wrap(true);
  run.step();
  at::Tensor more = torch::ones({5}, kDouble).requires_grad_(),
             more_alone = torch::ones({5}, kDouble).requires_grad_();
  run.optimizer->add_param_group(torch::optim::OptimizerParamGroup({more}));
  run.plain->add_param_group(torch::optim::OptimizerParamGroup({more_alone}));
  for (int step = 0; step < 2; ++step) {
    run.optimizer->zero_grad();
    more.mutable_grad() = data({5}, kDouble, hvd::rank(), step);
    more_alone.mutable_grad() =
        reduced(all_data({5}, kDouble, everyone(), step), hvd::ReduceOp::Average);
    run.net.loss(hvd::rank(), run.number).backward();
    run.optimizer->step();
    step_alone(run.alone, *run.plain, run.number++);
    CHECK(same(more.detach(), more_alone.detach()));
    CHECK(furthest(run.net, run.alone) <= 1e-12);
  }
}

TEST_CASE(
    "what happens if I move the parameters or the learning rate while it is sharded: followed") {
  with_and_without_one_copy();
  for (const auto& kind : torch_optimizers()) {
    TiedRun run(kind);
    run.step();
    {
      const auto writing = run.optimizer->write_parameters();
      for (auto* net : {&run.net, &run.alone}) {
        const torch::NoGradGuard no_gradient;
        net->hidden->weight.set_data(net->hidden->weight.detach().clone());
        if (net == &run.alone || writing.is_writer()) net->embedding->weight.mul_(0.5);
      }
    }
    run.wrapped->param_groups()[0].options().set_lr(0.03);
    run.plain->param_groups()[0].options().set_lr(0.03);
    run.step();
    run.step();
  }
}

TEST_CASE(
    "what happens if I load a model while it is sharded, and one rank refuses the next step: all "
    "ranks go on with the same parameters") {
  if (hvd::size() == 1) return;
  TiedNet net;
  SGD wrapped(net.parameters(), SGDOptions(0.1));
  DistributedOptimizer optimizer(wrapped, net.named_parameters(), {.shard_optimizer_state = true});
  step_together(net, optimizer, 0);
  {
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : once(net.parameters()))  // as torch::load does
      parameter.set_data(parameter.detach() * 0.5);
  }
  optimizer.zero_grad();
  net.loss(hvd::rank(), 1).backward();
  if (last()) net.hidden->weight.mutable_grad().mul_(2);
  const auto step = [&] { optimizer.step(); };
  if (last()) {
    CHECK(contains(error_of<hvd::InvalidArgument>(step), "hidden.weight"));
  } else {
    CHECK(contains(error_of<hvd::Mismatch>(step), last_rank() + " has made no step"));
  }
  CHECK(equal_on_all_ranks(net));
  step_together(net, optimizer, 2);
  CHECK(equal_on_all_ranks(net));
}

}  // namespace
