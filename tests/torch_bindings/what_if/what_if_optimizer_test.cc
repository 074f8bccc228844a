// What happens if I ... : the wrapped optimizer, its groups, options and process set. (Tied
// weights, sharded, Adasum: files of their own.)
#include <sstream>

#include "tests/torch_bindings/tied_net.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;
using hvd::DistributedOptimizer;
using hvd::DistributedOptimizerOptions;
using torch::optim::Adam, torch::optim::AdamOptions, torch::optim::SGD, torch::optim::SGDOptions;
using torch::optim::Optimizer, torch::optim::OptimizerParamGroup;

constexpr double kEqual = 1e-12;

/// Two layers, of which the optimizer has the first alone to begin with.
struct Grown : torch::nn::Module {
  Grown() {
    first = register_module("first", torch::nn::Linear(6, 9));
    second = register_module("second", torch::nn::Linear(9, 50));
    to(kDouble);
    const torch::NoGradGuard no_gradient;
    int variant = 0;
    for (auto& parameter : parameters())
      parameter.copy_(data(parameter.sizes(), kDouble, 0, variant++) * 0.3);
  }
  at::Tensor loss(int rank, int step) {
    return second->forward(torch::tanh(first->forward(data({4, 6}, kDouble, rank, step))))
        .sub(data({4, 50}, kDouble, rank, step + 1))
        .square()
        .mean();
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

TEST_CASE(
    "what happens if I add parameters after wrapping, to the wrapper or to the wrapped optimizer: "
    "they train as in one process") {
  with_and_without_one_copy();
  enum class To { Wrapper, Wrapped, Both, Group, InTwoGoes };
  for (const auto& kind : torch_optimizers()) {
    if (kind.name == "Adagrad") continue;  // below
    for (const bool shard : {false, true}) {
      for (const auto to : {To::Wrapper, To::Wrapped, To::Both, To::Group, To::InTwoGoes}) {
        CAPTURE(kind.name);
        CAPTURE(shard);
        CAPTURE(static_cast<int>(to));
        const int passes = to == To::Both ? 2 : 1;
        Grown net, alone;
        const auto wrapped = kind.make(net.first->parameters()),
                   plain = kind.make(alone.first->parameters());
        DistributedOptimizer optimizer(*wrapped, net.named_parameters(),
                                       {.backward_passes_per_step = passes,
                                        .groups = 1,
                                        .shard_optimizer_state = shard,
                                        .share_parameters = shard && one_copy});
        for (int step = 0; step < 2; ++step) {
          step_together(net, optimizer, step, passes);
          net.second->zero_grad();
          step_alone(alone, *plain, step, everyone(), passes);
        }
        const Parameters more = net.second->parameters(), more_alone = alone.second->parameters();
        if (to == To::Group) {
          for (const auto& parameter : more)
            optimizer.param_groups()[0].params().push_back(parameter);
          for (const auto& parameter : more_alone)
            plain->param_groups()[0].params().push_back(parameter);
        } else if (to == To::InTwoGoes) {
          for (std::size_t i = 0; i < 2; ++i) {
            wrapped->add_param_group(OptimizerParamGroup({more[i]}));
            optimizer.zero_grad();
            plain->add_param_group(OptimizerParamGroup({more_alone[i]}));
          }
        } else {
          if (to != To::Wrapped) optimizer.add_param_group(OptimizerParamGroup(more));
          if (to != To::Wrapper) wrapped->add_param_group(OptimizerParamGroup(more));
          plain->add_param_group(OptimizerParamGroup(more_alone));
        }
        for (int step = 2; step < 5; ++step) {
          step_together(net, optimizer, step, passes);
          step_alone(alone, *plain, step, everyone(), passes);
          CHECK(furthest(net, alone) <= kEqual);
          CHECK(equal_on_all_ranks(net));
        }
        CHECK(wrapped->param_groups().size() == plain->param_groups().size());
        CHECK(optimizer.param_groups().back().params().back().is_same(more.back()));
      }
    }
  }
}

TEST_CASE(
    "what happens if I add parameters between backward() and step(): that step has them already") {
  with_and_without_one_copy();
  for (const bool synchronized : {false, true}) {
    for (const bool shard : {false, true}) {
      Grown net, alone;
      SGD wrapped(net.first->parameters(), SGDOptions(0.1).momentum(0.5)),
          plain(alone.parameters(), SGDOptions(0.1).momentum(0.5));
      DistributedOptimizer optimizer(wrapped, {},
                                     {.op = hvd::ReduceOp::Average,
                                      .shard_optimizer_state = shard,
                                      .share_parameters = shard && one_copy});
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        net.loss(hvd::rank(), step).backward();
        if (synchronized) optimizer.synchronize();
        if (step == 0) optimizer.add_param_group(OptimizerParamGroup(net.second->parameters()));
        optimizer.step();
        step_alone(alone, plain, step);
        CHECK(furthest(net, alone) <= kEqual);
        CHECK(equal_on_all_ranks(net));
      }
    }
  }
}

TEST_CASE(
    "what happens if I add parameters and compress, or take a group out again: the rest trains as "
    "in one process") {
  with_and_without_one_copy();
  for (const auto& compression : {hvd::Compression::none(), hvd::Compression::topk(1)}) {
    for (const bool shard : {false, true}) {
      CAPTURE(shard);
      Grown net, alone;
      Adam wrapped(net.first->parameters(), AdamOptions(0.01)),
          plain(alone.first->parameters(), AdamOptions(0.01));
      DistributedOptimizer optimizer(wrapped, net.named_parameters(),
                                     {.compression = compression,
                                      .shard_optimizer_state = shard,
                                      .share_parameters = shard && one_copy});
      const auto both = [&](int from, int to) {
        for (int step = from; step < to; ++step) {
          net.zero_grad();
          step_together(net, optimizer, step);
          step_alone(alone, plain, step);
          CHECK(furthest(net, alone) <= 1e-9);
          CHECK(equal_on_all_ranks(net));
        }
      };
      optimizer.add_param_group(OptimizerParamGroup(net.second->parameters()));
      plain.add_param_group(OptimizerParamGroup(alone.second->parameters()));
      both(0, 3);
      wrapped.param_groups().pop_back();
      plain.param_groups().pop_back();
      both(3, 5);
      CHECK(optimizer.param_groups().size() == 1);
      optimizer.add_param_group(OptimizerParamGroup(net.second->parameters()));
      // LibTorch refuses parameters that have a state
      plain.state().erase(alone.second->weight.unsafeGetTensorImpl());
      plain.state().erase(alone.second->bias.unsafeGetTensorImpl());
      if (shard || compression != hvd::Compression::none()) continue;
      for (const auto& parameter : net.second->parameters())
        wrapped.state().erase(parameter.unsafeGetTensorImpl());
      plain.add_param_group(OptimizerParamGroup(alone.second->parameters()));
      both(5, 7);
    }
  }
}

TEST_CASE(
    "what happens if I add parameters on one rank alone, and when: Mismatch on all, and it goes on "
    "when all have added them") {
  if (hvd::size() == 1) return;
  enum class When { BeforeZeroGrad, BeforeTheFirstStep, BeforeStep, BetweenSynchronizeAndStep };
  using hvd::Compression;
  for (const auto& compression :
       {Compression::none(), Compression::int8(), Compression::topk(1), Compression::powersgd(1)}) {
    for (const auto when : {When::BeforeZeroGrad, When::BeforeTheFirstStep, When::BeforeStep,
                            When::BetweenSynchronizeAndStep}) {
      CAPTURE(static_cast<int>(when));
      Grown net, alone;
      SGD wrapped(net.first->parameters(), SGDOptions(0.1)),
          plain(alone.parameters(), SGDOptions(0.1));
      DistributedOptimizer optimizer(wrapped, net.named_parameters(), {.compression = compression});
      const auto add = [&](bool here) {
        if (here) optimizer.add_param_group(OptimizerParamGroup(net.second->parameters()));
      };
      if (when != When::BeforeTheFirstStep) step_together(net, optimizer, 0);
      const at::Tensor before = net.first->weight.detach().clone();
      const std::string text = error_of<hvd::Mismatch>([&] {
        if (when == When::BeforeZeroGrad || when == When::BeforeTheFirstStep) add(last());
        if (when != When::BeforeTheFirstStep) optimizer.zero_grad();
        net.loss(hvd::rank(), 1).backward();
        if (when == When::BetweenSynchronizeAndStep) optimizer.synchronize();
        if (when == When::BeforeStep || when == When::BetweenSynchronizeAndStep) add(last());
        optimizer.step();
        if (!last()) step_together(net, optimizer, 2);
      });
      INFO(text);
      CHECK(contains(text, "rank " + std::to_string(hvd::size() - 1)));
      CHECK((contains(text, "do so on all ranks") == last()));
      if (compression == Compression::none())
        CHECK(contains(text, last_rank() + " has changed the parameters or groups of optimizer."));
      if (last() || when == When::BeforeZeroGrad) CHECK(same(net.first->weight.detach(), before));
      const std::string told = error_of<hvd::Mismatch>([&] { optimizer.check_replicas(); });
      CHECK(contains(told, "parameters in each group is [2],"));
      CHECK(contains(told, last_rank() + ": parameters in each group is [2, 2], parameter '"));
      add(!last());
      hvd::broadcast_parameters(net, 0);
      {
        const torch::NoGradGuard no_gradient;
        for (std::size_t i = 0; i < net.parameters().size(); ++i)
          alone.parameters()[i].copy_(net.parameters()[i]);
      }
      for (int step = 3; step < 6; ++step) {
        step_together(net, optimizer, step);
        step_alone(alone, plain, step);
        CHECK(equal_on_all_ranks(net));
        if (compression == Compression::none()) CHECK(furthest(net, alone) <= kEqual);
      }
    }
  }
}

TEST_CASE(
    "what happens if one rank throws its gradients away and does not step: Mismatch on all at the "
    "next reduction, that says so") {
  if (hvd::size() == 1) return;
  for (const bool in_flight : {true, false}) {
    Grown net;
    SGD wrapped(net.parameters(), SGDOptions(0.1));
    DistributedOptimizer optimizer(wrapped, net.named_parameters());
    step_together(net, optimizer, 0);
    optimizer.zero_grad();
    net.loss(hvd::rank(), 1).backward();
    if (!in_flight) optimizer.synchronize();
    last() ? optimizer.zero_grad() : static_cast<void>(optimizer.step());
    const std::string text = error_of<hvd::Mismatch>([&] { step_together(net, optimizer, 2); });
    INFO(text);
    CHECK(contains(text, last_rank() + " has thrown its last gradients away without a step()"));
    hvd::broadcast_parameters(net, 0);
    step_together(net, optimizer, 3);
    CHECK(equal_on_all_ranks(net));
    // All alike: nothing to say.
    for (int step = 4; step < 7; ++step) {
      net.loss(hvd::rank(), step).backward();
      optimizer.zero_grad();
      step_together(net, optimizer, step);
    }
    CHECK(equal_on_all_ranks(net));
  }
}

TEST_CASE(
    "what happens if I add parameters on all ranks, and one alone looks at them or saves before "
    "the step: nothing comes of it") {
  for (const auto& compression : {hvd::Compression::none(), hvd::Compression::topk(1)}) {
    for (const bool unused : {false, true}) {
      Grown net, alone;
      SGD wrapped(net.first->parameters(), SGDOptions(0.1)),
          plain(alone.first->parameters(), SGDOptions(0.1));
      DistributedOptimizer optimizer(wrapped, net.named_parameters(), {.compression = compression});
      step_together(net, optimizer, 0);
      step_alone(alone, plain, 0);
      optimizer.zero_grad();
      net.zero_grad();
      optimizer.add_param_group(OptimizerParamGroup(net.second->parameters()));
      plain.add_param_group(OptimizerParamGroup(alone.second->parameters()));
      if (last()) optimizer.param_groups()[0].options().get_lr();
      // so that the first bucket leaves in backward on the other ranks alone
      if (unused && last()) {
        net.first->bias.sum().backward();
      } else {
        net.loss(hvd::rank(), 1).backward();
      }
      std::stringstream state;
      if (last()) torch::save(optimizer, state);
      optimizer.step();
      CHECK(equal_on_all_ranks(net));
      if (unused) continue;
      step_alone(alone, plain, 1);
      for (int step = 2; step < 5; ++step) {
        step_together(net, optimizer, step);
        step_alone(alone, plain, step);
        CHECK(furthest(net, alone) <= 1e-9);
      }
    }
  }
}

TEST_CASE(
    "what happens if I change a gradient on one rank alone when others have been added: an error "
    "there, nobody is left waiting") {
  Grown net, alone;
  SGD wrapped(net.first->parameters(), SGDOptions(0.1)), plain(alone.parameters(), SGDOptions(0.1));
  DistributedOptimizer optimizer(wrapped, net.named_parameters());
  optimizer.add_param_group(OptimizerParamGroup(net.second->parameters()));
  net.loss(hvd::rank(), 0).backward();
  if (last()) net.first->weight.mutable_grad().mul_(2);
  const bool refused =
      contains(error_of<hvd::InvalidArgument>([&] { optimizer.synchronize(); }), "first.weight");
  CHECK(refused == (last() && hvd::size() > 1));
  CHECK(same_on_all_ranks(net.second->weight.grad()));
  for (int step = 1; step < 3; ++step) {
    step_together(net, optimizer, step);
    step_alone(alone, plain, step);
    CHECK(furthest(net, alone) <= kEqual);
  }
}

TEST_CASE("what happens if I add what cannot be added: an error that names it, on all ranks") {
  Grown net;
  torch::optim::Adagrad adagrad(net.first->parameters(), torch::optim::AdagradOptions(0.1));
  DistributedOptimizer of_adagrad(adagrad, net.named_parameters());
  of_adagrad.add_param_group(OptimizerParamGroup(net.second->parameters()));
  net.loss(hvd::rank(), 0).backward();
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { of_adagrad.step(); }), "second.weight"));
  Grown other;
  SGD sgd(other.first->parameters(), SGDOptions(0.1));
  DistributedOptimizer optimizer(sgd, other.named_parameters());
  optimizer.add_param_group(OptimizerParamGroup({other.first->bias}));
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { optimizer.step(); }), "first.bias"));
  optimizer.Optimizer::param_groups().pop_back();
  optimizer.add_param_group(OptimizerParamGroup({other.second->bias}));
  sgd.add_param_group(OptimizerParamGroup({other.second->weight}));
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { optimizer.step(); }), "different ways"));
  sgd.param_groups().pop_back();
  step_together(other, optimizer, 0);
  CHECK(equal_on_all_ranks(other));
}

TEST_CASE(
    "what happens if I go on after such an error: the same error again, and no step, until the "
    "cause has gone") {
  with_and_without_one_copy();
  for (const auto& options : {DistributedOptimizerOptions{},
                              {.shard_optimizer_state = true, .share_parameters = one_copy},
                              {.op = hvd::ReduceOp::Adasum}}) {
    Grown net;
    SGD wrapped(net.first->parameters(), SGDOptions(0.1));
    DistributedOptimizer optimizer(wrapped, net.named_parameters(), options);
    step_together(net, optimizer, 0);
    const at::Tensor before = net.first->weight.detach().clone();
    const at::Tensor of_no_use =
        torch::empty({3}, torch::dtype(at::kFloat8_e5m2).requires_grad(true));
    wrapped.add_param_group(OptimizerParamGroup({net.second->bias, of_no_use}));
    net.loss(hvd::rank(), 1).backward();
    for (int again = 0; again < 3; ++again) CHECK_THROWS_AS(optimizer.step(), hvd::InvalidArgument);
    CHECK(same(net.first->weight.detach(), before));
    wrapped.param_groups()[1].params().pop_back();
    for (int step = 2; step < 4; ++step) step_together(net, optimizer, step);
    CHECK(equal_on_all_ranks(net));
    CHECK(optimizer.param_groups()[1].params().size() == 1);
  }
  Grown net, alone;
  SGD wrapped(net.first->parameters(), SGDOptions(0.1)), plain(alone.parameters(), SGDOptions(0.1));
  DistributedOptimizer optimizer(wrapped, net.named_parameters());
  {
    hvd::DistributedDataParallel<torch::nn::LinearImpl> parallel(net.second.ptr());
    optimizer.add_param_group(OptimizerParamGroup(net.second->parameters()));
    for (int again = 0; again < 2; ++again)
      CHECK(contains(error_of<hvd::InvalidArgument>([&] { optimizer.zero_grad(); }),
                     "second.weight"));
  }
  for (int step = 0; step < 3; ++step) {
    step_together(net, optimizer, step);
    step_alone(alone, plain, step);
    CHECK(furthest(net, alone) <= kEqual);
  }
}

/// User code: options with more than a learning rate, which can be written, or not.
template <bool serializable>
struct PushOptions : torch::optim::OptimizerCloneableOptions<PushOptions<serializable>> {
  double rate = 0.1, push = 0;
  double get_lr() const override { return rate; }
  void set_lr(const double lr) override { rate = lr; }
  void serialize(torch::serialize::InputArchive& archive) override {
    if (!serializable) return torch::optim::OptimizerOptions::serialize(archive);
    c10::IValue value;
    archive.read("rate", value);
    rate = value.toDouble();
    archive.read("push", value);
    push = value.toDouble();
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    if (!serializable) return torch::optim::OptimizerOptions::serialize(archive);
    archive.write("rate", c10::IValue(rate));
    archive.write("push", c10::IValue(push));
  }
};
template <bool serializable>
struct Pusher : Optimizer {
  explicit Pusher(Parameters parameters)
      : Optimizer(std::move(parameters), std::make_unique<PushOptions<serializable>>()) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const torch::NoGradGuard no_gradient;
    for (auto& group : param_groups()) {
      const auto& options = static_cast<const PushOptions<serializable>&>(group.options());
      for (auto& parameter : group.params())
        parameter.sub_(parameter.grad() * options.rate + options.push);
    }
    return {};
  }
};

template <class Options, class Wrapped, class Change>
void check_options_travel(Wrapped make, Change change) {
  Grown net, alone;
  const auto wrapped = make(net.parameters()), plain = make(alone.parameters());
  DistributedOptimizer optimizer(*wrapped, net.named_parameters());
  const auto options = [](Optimizer& of) -> Options& {
    return static_cast<Options&>(of.param_groups()[0].options());
  };
  Options& held = options(*wrapped);
  for (int step = 0; step < 6; ++step) {
    if (step % 3 == 1) change(options(optimizer), step);
    if (step % 3 == 2) change(step == 2 ? held : options(*wrapped), step);
    if (step % 3 > 0) change(options(*plain), step);
    step_together(net, optimizer, step);
    step_alone(alone, *plain, step);
    CHECK(furthest(net, alone) <= kEqual);
  }
}

TEST_CASE(
    "what happens if I change any option through the wrapper or the wrapped optimizer: it holds "
    "for both, of my own types too") {
  check_options_travel<SGDOptions>(
      [](const Parameters& p) { return std::make_unique<SGD>(p, SGDOptions(0.1).momentum(0.5)); },
      [](SGDOptions& options, int step) { options.weight_decay(0.1 * step); });
  check_options_travel<AdamOptions>(
      [](const Parameters& p) { return std::make_unique<Adam>(p, AdamOptions(0.01)); },
      [](AdamOptions& options, int step) {
        options.betas({0.5 + 0.05 * step, 0.9});
      });
  check_options_travel<PushOptions<true>>(
      [](const Parameters& p) { return std::make_unique<Pusher<true>>(p); },
      [](PushOptions<true>& options, int step) { options.push = 0.01 * step; });
  // Without serialize() a copy takes the place of the other's options when more than the learning
  // rate has changed.
  check_options_travel<PushOptions<false>>(
      [](const Parameters& p) { return std::make_unique<Pusher<false>>(p); },
      [](PushOptions<false>& options, int step) { options.rate = 0.02 * step; });
  Grown net;
  Pusher<false> wrapped(net.parameters());
  DistributedOptimizer optimizer(wrapped, net.named_parameters());
  const auto push = [](Optimizer& of) -> double& {
    return static_cast<PushOptions<false>&>(of.param_groups()[0].options()).push;
  };
  push(optimizer) = 0.5;
  optimizer.param_groups();
  CHECK(push(wrapped) == 0.5);
  push(wrapped) = 0.25;
  optimizer.param_groups();
  CHECK(push(optimizer) == 0.25);
  optimizer.param_groups()[0].options().set_lr(0.5);
  optimizer.param_groups();
  CHECK(static_cast<PushOptions<false>&>(wrapped.param_groups()[0].options()).rate == 0.5);
  CHECK(push(wrapped) == 0.25);
}

TEST_CASE(
    "what happens if a rank is outside the optimizer's process set: it trains by itself, as with "
    "the plain optimizer") {
  with_and_without_one_copy();
  const auto some = hvd::add_process_set({0});
  for (const bool shard : {false, true}) {
    for (const auto op : {hvd::ReduceOp::Average, hvd::ReduceOp::Adasum}) {
      if (shard && op == hvd::ReduceOp::Adasum) continue;
      Grown net, alone;
      Adam wrapped(net.first->parameters(), AdamOptions(0.01)),
          plain(alone.first->parameters(), AdamOptions(0.01));
      DistributedOptimizer optimizer(wrapped, net.named_parameters(),
                                     {.op = op,
                                      .process_set = some,
                                      .shard_optimizer_state = shard,
                                      .share_parameters = shard && one_copy});
      for (int step = 0; step < 4; ++step) {
        if (step == 2) optimizer.add_param_group(OptimizerParamGroup(net.second->parameters()));
        if (step == 2) plain.add_param_group(OptimizerParamGroup(alone.second->parameters()));
        if (step == 3) optimizer.param_groups()[0].options().set_lr(0.02);
        if (step == 3) plain.param_groups()[0].options().set_lr(0.02);
        optimizer.zero_grad();
        net.loss(hvd::rank(), step).backward();
        optimizer.synchronize();
        torch::nn::utils::clip_grad_norm_(once(net.parameters()), 10);
        optimizer.step();
        net.second->zero_grad();
        alone.zero_grad();
        alone.loss(hvd::rank(), step).backward();
        torch::nn::utils::clip_grad_norm_(once(alone.parameters()), 10);
        plain.step();
        alone.second->zero_grad();
        CHECK(furthest(net, alone) == 0);
      }
      std::stringstream state;
      if (!some.included()) torch::save(optimizer, state);
      if (!some.included()) torch::load(optimizer, state);
      if (!some.included()) {
        auto guard = optimizer.join();
        guard.end();
      }
      CHECK(optimizer.is_sharded() == (shard && some.included()));
      optimizer.unshard();
      optimizer.step([&] { return net.loss(hvd::rank(), 7); });
    }
  }
  hvd::remove_process_set(some);
}

/// Options of the user's that add something to LibTorch's, and write it or not.
template <bool kWrites>
struct LarsOptions : SGDOptions {
  using SGDOptions::SGDOptions;
  [[nodiscard]] std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<LarsOptions>(*this);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    SGDOptions::serialize(archive);
    if (kWrites) archive.write("trust", c10::IValue(trust));
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    SGDOptions::serialize(archive);
    c10::IValue value;
    if (kWrites && archive.try_read("trust", value)) trust = value.toDouble();
  }
  double trust = 1;
};

TEST_CASE_TEMPLATE(
    "what happens if my options derive from LibTorch's: what they add goes to both optimizers",
    Options, LarsOptions<false>, LarsOptions<true>) {
  Grown net;
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(net.parameters(), std::make_unique<Options>(0.1));
  SGD wrapped(groups, SGDOptions(0.1));
  DistributedOptimizer optimizer(wrapped, net.named_parameters());
  const auto of = [](Optimizer& of_group) -> Options& {
    return dynamic_cast<Options&>(of_group.param_groups()[0].options());
  };
  const auto check = [&](double trust, double rate) {
    step_together(net, optimizer, 0);
    for (auto* const one :
         {static_cast<Optimizer*>(&optimizer), static_cast<Optimizer*>(&wrapped)}) {
      CHECK(of(*one).trust == trust);
      CHECK(of(*one).get_lr() == rate);
    }
  };
  of(optimizer).trust = 0.5;
  check(0.5, 0.1);
  of(wrapped).trust = 0.25;
  check(0.25, 0.1);
  of(optimizer).set_lr(0.2);
  check(0.25, 0.2);
  of(optimizer).trust = 0.125;
  of(optimizer).set_lr(0.3);
  check(0.125, 0.3);
  hvd::broadcast_optimizer_state(optimizer, 0);
  check(0.125, 0.3);
}

}  // namespace
