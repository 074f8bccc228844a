// DistributedOptimizer: against a reference made by hand, its options, schedulers, files, process
// sets.
#include <memory>
#include <sstream>

#include "tests/torch_bindings/wrapped_optimizers.h"

namespace optimizer_test {
namespace {

using namespace hvd::test;
using namespace hvd::test::wrapped;
using at::kHalf;
using hvd::DistributedOptimizer;
using hvd::DistributedOptimizerOptions;

TEST_CASE("every optimizer steps as on the averages of the ranks' gradients") {
  for (const auto& kind : kinds()) {
    CAPTURE(kind.name);
    Sequential net = small_model();
    const auto wrapped = kind.make(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters());
    Reference reference;
    reference.optimizer = kind.make(reference.net->parameters());
    for (int step = 0; step < 4; ++step) {
      if (kind.closure) {
        at::Tensor first;
        const at::Tensor returned = optimizer.step([&] {
          optimizer.zero_grad();
          const at::Tensor value = small_loss(net, hvd::rank(), step);
          value.backward();
          if (!first.defined()) first = value.detach().clone();
          return value;
        });
        CHECK(same(returned.detach(), first));  // this rank's own
        reference.optimizer->step([&] { return reference.backward(step); });
      } else {
        optimizer.zero_grad();
        small_loss(net, hvd::rank(), step).backward();
        CHECK(!optimizer.step().defined());
        reference.step(step);
      }
      CHECK(same_parameters(net, reference.net));
      CHECK(same_everywhere(net));
    }
  }
}

TEST_CASE("options: op, accumulation, predivide factor, groups, compression") {
  struct Case {
    std::string name;
    DistributedOptimizerOptions options;
    double tolerance = 0;
  };
  std::vector<Case> cases;
  cases.push_back({"defaults", {}});
  cases.push_back({"sum", {.op = hvd::ReduceOp::Sum}});
  cases.push_back({"two passes", {.backward_passes_per_step = 2}});
  cases.push_back({"three passes, compressed",
                   {.compression = hvd::Compression::bf16(), .backward_passes_per_step = 3}});
  cases.push_back({"predivide", {.gradient_predivide_factor = 3}, 1e-13});
  cases.push_back({"predivide by the size",
                   {.gradient_predivide_factor = static_cast<double>(hvd::size())},
                   1e-13});
  cases.push_back({"one group", {.groups = 1}});
  cases.push_back({"three groups", {.groups = 3}});
  cases.push_back({"more groups than parameters", {.groups = 100}});
  cases.push_back({"fp16", {.compression = hvd::Compression::fp16()}});
  cases.push_back({"bf16", {.compression = hvd::Compression::bf16(), .groups = 2}});
  for (auto& [name, options, tolerance] : cases) {
    CAPTURE(name);
    Sequential net = small_model();
    const auto wrapped = sgd(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters(), options);
    Reference reference;
    reference.passes = options.backward_passes_per_step;
    reference.op = options.op;
    if (options.compression == hvd::Compression::fp16()) reference.wire = kHalf;
    if (options.compression == hvd::Compression::bf16()) reference.wire = at::kBFloat16;
    reference.optimizer = sgd(reference.net->parameters());
    check_steps(net, optimizer, reference, 3, tolerance);
  }
  {  // groups as lists of parameters; one is in none
    Sequential net = small_model();
    const auto p = net->parameters();
    const auto wrapped = sgd(p);
    DistributedOptimizer optimizer(*wrapped, net->named_parameters(),
                                   {.groups = {{p[3], p[0]}, {p[1]}}});
    Reference reference;
    reference.optimizer = sgd(reference.net->parameters());
    check_steps(net, optimizer, reference);
  }
  {  // a number of passes that is changed
    Sequential net = small_model();
    const auto wrapped = sgd(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters());
    Reference reference;
    reference.optimizer = sgd(reference.net->parameters());
    for (const int passes : {1, 3, 2}) {
      optimizer.set_backward_passes_per_step(passes);
      reference.passes = passes;
      check_steps(net, optimizer, reference, 2);
    }
    CHECK_THROWS_AS(optimizer.set_backward_passes_per_step(0), hvd::InvalidArgument);
  }
}

TEST_CASE("wrong options and names are refused") {
  Sequential net = small_model();
  const auto p = net->parameters();
  const auto wrapped = sgd(p);
  const auto names = net->named_parameters().pairs();
  const auto refused = [&](DistributedOptimizerOptions options,
                           std::vector<std::pair<std::string, at::Tensor>> named) {
    return error_of<hvd::InvalidArgument>(
        [&] { DistributedOptimizer(*wrapped, std::move(named), std::move(options)); });
  };
  auto twice = names;
  twice[1].first = twice[0].first;
  CHECK(contains(refused({}, twice), names[0].first));
  CHECK(contains(refused({}, {names[0], names[1], names[2]}), "no name"));
  CHECK(contains(refused({.backward_passes_per_step = 0}, names), "backward_passes_per_step"));
  CHECK(contains(refused({.backward_passes_per_step = -1}, names), "backward_passes_per_step"));
  CHECK(contains(refused({.op = hvd::ReduceOp::Sum, .gradient_predivide_factor = 2}, names),
                 "gradient_predivide_factor"));
  CHECK(contains(refused({.gradient_predivide_factor = 0}, names), "gradient_predivide_factor"));
  CHECK(contains(refused({.groups = std::vector<Parameters>{{p[0], p[1]}, {p[1]}}}, names),
                 names[1].first));
  CHECK(
      contains(refused({.groups = std::vector<Parameters>{{torch::ones({2})}}}, names), "groups"));
  CHECK(contains(refused({.groups = 0}, names), "groups"));
  CHECK(contains(refused({.op = hvd::ReduceOp::Min}, names), "min"));
  // What one rank alone has refused does not put the ranks out of step, and the failed ones have
  // left nothing on the parameters.
  if (last()) refused({.groups = -1}, names);
  DistributedOptimizer optimizer(*wrapped);  // without names
  Reference reference;
  reference.optimizer = sgd(reference.net->parameters());
  check_steps(net, optimizer, reference);
}

TEST_CASE("more backward passes than agreed are an error, and zero_grad() puts it right") {
  Sequential net = small_model();
  const auto wrapped = sgd(net->parameters());
  DistributedOptimizer optimizer(*wrapped, net->named_parameters(),
                                 {.backward_passes_per_step = 2});
  small_loss(net, hvd::rank(), 0).backward();
  small_loss(net, hvd::rank(), 1).backward();
  const std::string text =
      error_of<hvd::InvalidArgument>([&] { small_loss(net, hvd::rank(), 2).backward(); });
  INFO(text);
  CHECK(contains(text, "backward_passes_per_step"));
  Reference reference;
  reference.passes = 2;
  reference.optimizer = sgd(reference.net->parameters());
  check_steps(net, optimizer, reference);
}

TEST_CASE("synchronize, clip, step: reduced once") {
  Sequential net = small_model();
  const auto wrapped = sgd(net->parameters());
  DistributedOptimizer optimizer(*wrapped, net->named_parameters());
  Reference reference;
  reference.optimizer = sgd(reference.net->parameters());
  for (int step = 0; step < 4; ++step) {
    const auto before = hvd::stats().tensors_submitted;
    optimizer.zero_grad();
    small_loss(net, hvd::rank(), step).backward();
    optimizer.synchronize();
    CHECK(hvd::stats().tensors_submitted - before == 4);
    torch::nn::utils::clip_grad_norm_(net->parameters(), 0.05);
    if (step < 2) {
      optimizer.step();
    } else {
      const auto guard = optimizer.skip_synchronize();
      optimizer.step();
    }
    CHECK(hvd::stats().tensors_submitted - before == 4);
    reference.backward(step);
    torch::nn::utils::clip_grad_norm_(reference.net->parameters(), 0.05);
    reference.optimizer->step();
    CHECK(same_parameters(net, reference.net));
    CHECK(same_everywhere(net));
  }
  // Without synchronize() the next step reduces again; another backward makes a finished
  // synchronize() count no more.
  const auto before = hvd::stats().tensors_submitted;
  optimizer.zero_grad();
  small_loss(net, hvd::rank(), 9).backward();
  optimizer.step();
  CHECK(hvd::stats().tensors_submitted - before == 4);
  optimizer.synchronize();
  small_loss(net, hvd::rank(), 10).backward();
  optimizer.step();
  CHECK(hvd::stats().tensors_submitted - before == 12);
  CHECK(same_everywhere(net));
}

TEST_CASE("zero_grad, both ways, also with reductions in flight and after a skipped step") {
  for (const bool to_none : {true, false}) {
    CAPTURE(to_none);
    Sequential net = small_model();
    const auto wrapped = sgd(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters(), {.groups = 2});
    Reference reference;
    reference.optimizer = sgd(reference.net->parameters());
    optimizer.zero_grad(to_none);
    for (int step = 0; step < 4; ++step) {
      small_loss(net, hvd::rank(), 50 + step).backward();  // thrown away
      optimizer.zero_grad(to_none);
      for (const auto& parameter : net->parameters()) {
        CHECK(parameter.grad().defined() == !to_none);
        if (!to_none) CHECK(same(parameter.grad(), torch::zeros_like(parameter)));
      }
      small_loss(net, hvd::rank(), step).backward();
      optimizer.step();
      reference.step(step);
      CHECK(same_parameters(net, reference.net));
      if (step % 2 == 0) {
        optimizer.zero_grad(to_none);
      } else {
        net->zero_grad(to_none);  // the module's own, and the base class's
        static_cast<Optimizer&>(optimizer).zero_grad(to_none);
      }
    }
  }
}

TEST_CASE("learning-rate schedulers on the wrapper and on the wrapped; param_groups()") {
  for (const bool on_wrapper : {true, false}) {
    for (const auto& kind : kinds()) {
      if (kind.closure) continue;
      CAPTURE(kind.name);
      CAPTURE(on_wrapper);
      Sequential net = small_model();
      const auto wrapped = kind.make(net->parameters());
      DistributedOptimizer optimizer(*wrapped, net->named_parameters());
      Optimizer& scheduled = on_wrapper ? static_cast<Optimizer&>(optimizer) : *wrapped;
      torch::optim::StepLR scheduler(scheduled, 2, 0.1);
      Reference reference;
      reference.optimizer = kind.make(reference.net->parameters());
      torch::optim::StepLR reference_scheduler(*reference.optimizer, 2, 0.1);
      for (int step = 0; step < 5; ++step) {
        optimizer.zero_grad();
        small_loss(net, hvd::rank(), step).backward();
        optimizer.step();
        scheduler.step();
        reference.step(step);
        reference_scheduler.step();
        CHECK(same_parameters(net, reference.net));
        const double rate = reference.optimizer->param_groups()[0].options().get_lr();
        CHECK(optimizer.param_groups()[0].options().get_lr() == rate);
        CHECK(wrapped->param_groups()[0].options().get_lr() == rate);
      }
    }
  }
  Sequential net = small_model();
  const auto p = net->parameters();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Parameters{p[0], p[1]}, std::make_unique<torch::optim::SGDOptions>(0.1));
  groups.emplace_back(Parameters{p[2], p[3]}, std::make_unique<torch::optim::SGDOptions>(0.2));
  torch::optim::SGD wrapped(groups, torch::optim::SGDOptions(0.3));
  DistributedOptimizer optimizer(wrapped, net->named_parameters());
  REQUIRE(optimizer.param_groups().size() == 2);
  static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[1].options()).lr(0).momentum(0.5);
  const at::Tensor frozen = p[2].detach().clone();
  const at::Tensor other = p[0].detach().clone();
  small_loss(net, hvd::rank(), 0).backward();
  optimizer.step();
  CHECK(same(p[2].detach(), frozen));
  CHECK(!torch::equal(p[0], other));
  CHECK(static_cast<torch::optim::SGDOptions&>(wrapped.param_groups()[1].options()).momentum() ==
        0.5);
}

TEST_CASE("torch::save and torch::load on the wrapper") {
  for (const auto& kind : kinds()) {
    if (kind.name == "the user's own" || kind.name == "LBFGS with line search") continue;
    CAPTURE(kind.name);
    const auto steps = [](Sequential& net, DistributedOptimizer& optimizer, int from, int to) {
      for (int step = from; step < to; ++step)
        optimizer.step([&] {
          optimizer.zero_grad();
          const at::Tensor value = small_loss(net, hvd::rank(), step);
          value.backward();
          return value;
        });
    };
    Sequential net = small_model();
    const auto wrapped = kind.make(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters());
    steps(net, optimizer, 0, 2);
    optimizer.param_groups()[0].options().set_lr(0.02);
    std::stringstream weights;
    std::stringstream state;
    torch::save(net, weights);
    torch::save(optimizer, state);
    steps(net, optimizer, 2, 4);

    Sequential resumed = small_model();
    torch::load(resumed, weights);
    const auto fresh = kind.make(resumed->parameters());
    DistributedOptimizer loaded(*fresh, resumed->named_parameters());
    torch::load(loaded, state);
    CHECK(loaded.param_groups()[0].options().get_lr() == 0.02);
    steps(resumed, loaded, 2, 4);
    CHECK(same_parameters(net, resumed));
  }
}

TEST_CASE("wrapped again: the last wrapper reduces, the first one's end does not disturb it") {
  Sequential net = small_model();
  const auto wrapped = sgd(net->parameters());
  auto first = std::make_unique<DistributedOptimizer>(*wrapped, net->named_parameters());
  auto second = std::make_unique<DistributedOptimizer>(*wrapped, net->named_parameters());
  first.reset();
  const auto before = hvd::stats().tensors_submitted;
  small_loss(net, hvd::rank(), 7).backward();
  CHECK(hvd::stats().tensors_submitted - before == 4);
  second->zero_grad();
  Reference reference;
  reference.optimizer = sgd(reference.net->parameters());
  check_steps(net, *second, reference);
  // Without a wrapper the parameters are ordinary again.
  second.reset();
  const auto after = hvd::stats().tensors_submitted;
  net->zero_grad();
  small_loss(net, 0, 7).backward();
  wrapped->step();
  CHECK(hvd::stats().tensors_submitted == after);
}

TEST_CASE("an optimizer in a process set, and one that outlives shutdown and init") {
  const int size = hvd::size();
  hvd::Config config;
  std::vector<int> low;
  for (int r = 0; r < (size + 1) / 2; ++r) low.push_back(r);
  config.process_sets = {low};
  Sequential survivor = small_model();
  const auto survivor_wrapped = sgd(survivor->parameters());
  DistributedOptimizer survivor_optimizer(*survivor_wrapped, survivor->named_parameters());
  Reference survivor_reference;
  survivor_reference.optimizer = sgd(survivor_reference.net->parameters());
  check_steps(survivor, survivor_optimizer, survivor_reference);
  {
    const Restarted world(config);
    const hvd::ProcessSet set = hvd::process_set(1);
    if (set.included()) {
      Sequential net = small_model();
      const auto wrapped = sgd(net->parameters());
      DistributedOptimizer optimizer(*wrapped, net->named_parameters(),
                                     {.gradient_predivide_factor = 2, .process_set = set});
      Reference reference;
      reference.ranks = low;
      reference.optimizer = sgd(reference.net->parameters());
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        small_loss(net, hvd::rank(), step).backward();
        optimizer.step();
        reference.step(step);
        CHECK(same_parameters(net, reference.net, 1e-13));
      }
    }
    hvd::barrier();
  }
  check_steps(survivor, survivor_optimizer, survivor_reference);
}

}  // namespace
}  // namespace optimizer_test
