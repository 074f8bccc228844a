// What happens if I ... : use the optimizer that a DistributedOptimizer is around instead of that,
// or move the DistributedOptimizer.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/torch_bindings/support.h"
#include "tests/torch_bindings/wrapped_optimizers.h"

namespace {

using namespace hvd::test;
using namespace hvd::test::wrapped;
using hvd::DistributedOptimizer;
using hvd::DistributedOptimizerOptions;
using hvd::InvalidArgument;
using hvd::Mismatch;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

static_assert(!std::is_copy_constructible_v<DistributedOptimizer> &&
              !std::is_copy_assignable_v<DistributedOptimizer>);

/// A factory, as users write them.
DistributedOptimizer made(Sequential& net, const DistributedOptimizerOptions& options = {},
                          double rate = 0.1) {
  DistributedOptimizer optimizer(
      std::make_unique<SGD>(net->parameters(), SGDOptions(rate).momentum(0.9)),
      net->named_parameters(), options);
  optimizer.zero_grad();
  return optimizer;
}

/// One step of the reference, and of the net with what `optimizer()` is then; `before_step` is
/// called when gradients are under way.
void check_step(
    Sequential& net, Reference& reference, int number,
    const std::function<DistributedOptimizer&()>& optimizer,
    const std::function<void()>& before_step = [] {}) {
  optimizer().zero_grad();
  small_loss(net, hvd::rank(), number).backward();
  before_step();
  optimizer().step();
  reference.step(number);
  CHECK(same_parameters(net, reference.net, 1e-12));
  CHECK(same_everywhere(net));
}

TEST_CASE(
    "what happens if I give a DistributedOptimizer away: it owns its optimizer and trains on, "
    "wherever it is, hooks and all") {
  const std::vector<DistributedOptimizerOptions> ways{
      {}, {.shard_optimizer_state = true}, {.shard_gradients = true}, {.share_parameters = true}};
  for (const auto& options : ways) {
    Sequential net = small_model(), other = small_model();
    Reference reference;
    reference.optimizer = sgd(reference.net->parameters());
    std::vector<DistributedOptimizer> all;
    all.push_back(made(net, options));
    check_step(net, reference, 0, [&]() -> DistributedOptimizer& { return all[0]; });
    check_step(
        net, reference, 1, [&]() -> DistributedOptimizer& { return all[0]; },
        [&] { all.push_back(made(other)); });
    all.erase(all.begin() + 1);
    std::optional<DistributedOptimizer> maybe;
    maybe = std::move(all[0]);
    all.clear();
    check_step(net, reference, 2, [&]() -> DistributedOptimizer& { return *maybe; });
    DistributedOptimizer last = made(other);
    check_step(
        net, reference, 3, [&]() -> DistributedOptimizer& { return maybe ? *maybe : last; },
        [&] {
          last = std::move(*maybe);
          maybe.reset();
        });
    check_step(net, reference, 4, [&]() -> DistributedOptimizer& { return last; });
    DistributedOptimizer& itself = last;
    last = std::move(itself);
    check_step(net, reference, 5, [&]() -> DistributedOptimizer& { return last; });
    std::stringstream file;
    torch::save(last, file);
    torch::load(last, file);
    check_step(net, reference, 6, [&]() -> DistributedOptimizer& { return last; });
  }
}

TEST_CASE(
    "what happens if I use a DistributedOptimizer that was moved away: InvalidArgument from every "
    "call, schedulers' too") {
  Sequential net = small_model();
  DistributedOptimizer from = made(net);
  torch::optim::StepLR of_wrapper(from, 1, 0.5), of_wrapped(from.wrapped(), 1, 0.5);
  torch::optim::Optimizer* const wrapped = &from.wrapped();
  DistributedOptimizer to = std::move(from);
  CHECK(&to.wrapped() == wrapped);
  const std::vector<std::function<void()>> calls{
      [&] { from.step(); },
      [&] { from.zero_grad(); },
      [&] { from.synchronize(); },
      [&] { static_cast<void>(from.param_groups()); },
      [&] { static_cast<void>(from.state()); },
      [&] { static_cast<void>(from.wrapped()); },
      [&] { from.set_weight(1); },
      [&] { from.set_backward_passes_per_step(2); },
      [&] { const auto guard = from.skip_synchronize(); },
      [&] { const auto guard = from.write_parameters(); },
      [&] { const auto guard = from.join(); },
      [&] { hvd::clip_grad_norm_(from, 1); },
      [&] { from.unshard(); },
      [&] {
        std::stringstream file;
        torch::save(from, file);
      },
      [&] { of_wrapper.step(); },
  };
  for (const auto& call : calls) CHECK(contains(error_of<InvalidArgument>(call), "was moved"));
  of_wrapped.step();
  // its first step leaves the rate
  CHECK(to.param_groups()[0].options().get_lr() == doctest::Approx(0.1).epsilon(1e-9));
  of_wrapped.step();
  CHECK(to.param_groups()[0].options().get_lr() == doctest::Approx(0.05).epsilon(1e-9));
  from = made(net);  // it can be used again
  from.step();
}

TEST_CASE(
    "what happens if I move a DistributedOptimizer while guards of it live, or between unscale_() "
    "and step(): they follow") {
  Sequential net = small_model();
  Reference reference;
  reference.optimizer = sgd(reference.net->parameters());
  DistributedOptimizer first = made(net);
  std::optional<DistributedOptimizer> second;
  {
    auto guard = first.join();
    check_step(
        net, reference, 0, [&]() -> DistributedOptimizer& { return second ? *second : first; },
        [&] { second.emplace(std::move(first)); });
  }
  second->zero_grad();
  small_loss(net, hvd::rank(), 1).backward();
  second->synchronize();
  {
    const auto skip = second->skip_synchronize();
    first = std::move(*second);
    first.step();
  }
  reference.step(1);
  {
    const auto writing = first.write_parameters();
    second.emplace(std::move(first));
    CHECK(writing.is_writer());
  }
  check_step(net, reference, 2, [&]() -> DistributedOptimizer& { return *second; });
  hvd::GradScaler scaler({.init_scale = 8});
  second->zero_grad();
  scaler.scale(small_loss(net, hvd::rank(), 3)).backward();
  scaler.unscale_(*second);
  first = std::move(*second);
  scaler.step(first);
  scaler.update();
  reference.step(3);
  CHECK(same_parameters(net, reference.net, 1e-12));
}

TEST_CASE(
    "what happens if I give away an optimizer that is null, wrapped already or wrongly named: "
    "InvalidArgument, nothing leaks") {
  Sequential net = small_model();
  CHECK(contains(error_of<InvalidArgument>([&] {
                   DistributedOptimizer refused(std::unique_ptr<torch::optim::Optimizer>{});
                 }),
                 "null"));
  CHECK(contains(error_of<InvalidArgument>([&] {
                   hvd::MasterWeights refused(std::unique_ptr<torch::optim::Optimizer>{});
                 }),
                 "null"));
  CHECK(contains(error_of<InvalidArgument>([&] {
                   DistributedOptimizer refused(sgd(net->parameters()),
                                                std::vector<std::pair<std::string, at::Tensor>>{
                                                    {"only one", net->parameters()[0]}});
                 }),
                 "has no name"));
  DistributedOptimizer once = made(net);
  CHECK(contains(
      error_of<InvalidArgument>([&] { DistributedOptimizer twice(once, net->named_parameters()); }),
      "make one"));
  CHECK(contains(error_of<InvalidArgument>([&] {
                   DistributedOptimizer twice(std::make_unique<DistributedOptimizer>(made(net)),
                                              net->named_parameters());
                 }),
                 "make one"));
}

TEST_CASE(
    "what happens if I give away a MasterWeights with its optimizer: it trains as the one that I "
    "keep") {
  for (const bool sharded : {false, true}) {
    Sequential given = small_model(at::kBFloat16), kept = small_model(at::kBFloat16);
    auto masters = std::make_unique<hvd::MasterWeights>(
        std::make_unique<Adam>(given->parameters(), AdamOptions(0.01)));
    DistributedOptimizer owner(std::move(masters), given->named_parameters(),
                               {.shard_optimizer_state = sharded});
    DistributedOptimizer optimizer = std::move(owner);
    Adam adam(kept->parameters(), AdamOptions(0.01));
    hvd::MasterWeights around(adam);
    DistributedOptimizer borrowing(around, kept->named_parameters(),
                                   {.shard_optimizer_state = sharded});
    for (int step = 0; step < 4; ++step) {
      for (auto* const each : {&optimizer, &borrowing}) each->zero_grad();
      small_loss(given, hvd::rank(), step).backward();
      small_loss(kept, hvd::rank(), step).backward();
      for (auto* const each : {&optimizer, &borrowing}) each->step();
    }
    CHECK(same(flat(given), flat(kept)));
  }
}

TEST_CASE(
    "what happens if I step the MasterWeights in a DistributedOptimizer: InvalidArgument at that "
    "call") {
  Sequential net = small_model(at::kBFloat16);
  SGD plain(net->parameters(), SGDOptions(0.1));
  hvd::MasterWeights masters(plain);
  DistributedOptimizer optimizer(plain, net->named_parameters());
  small_loss(net, hvd::rank(), 0).backward();
  const std::string text = error_of<InvalidArgument>([&] { masters.step(); });
  CHECK(contains(text, "a DistributedOptimizer is around it") == (hvd::size() > 1));
  optimizer.step();
  CHECK(same_on_all_ranks(flat(net)));
}

TEST_CASE(
    "what happens if I give a GradScaler the wrapped optimizer: it does what it would with the "
    "wrapper") {
  const auto run = [](bool by_wrapped, bool unscales, bool sharded) {
    Sequential net = small_model(at::kFloat);
    SGD plain(net->parameters(), SGDOptions(0.1).momentum(0.9));
    DistributedOptimizer optimizer(plain, net->named_parameters(),
                                   {.shard_optimizer_state = sharded});
    torch::optim::Optimizer& named =
        by_wrapped ? static_cast<torch::optim::Optimizer&>(plain) : optimizer;
    hvd::GradScaler scaler({.init_scale = 1024});
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      scaler.scale(small_loss(net, hvd::rank(), step)).backward();
      if (unscales) scaler.unscale_(named);
      scaler.step(step % 2 == 0 ? named : optimizer);
      scaler.update();
    }
    CHECK(same_on_all_ranks(flat(net)));
    return flat(net);
  };
  for (const bool sharded : {false, true})
    for (const bool unscales : {false, true})
      CHECK(same(run(true, unscales, sharded), run(false, unscales, sharded)));
  Sequential net = small_model();
  SGD plain(net->parameters(), SGDOptions(0.1));
  DistributedOptimizer one(plain, net->named_parameters()), two(plain, net->named_parameters());
  hvd::GradScaler off({.enabled = false});
  CHECK(contains(error_of<InvalidArgument>([&] { off.step(plain); }), "2 DistributedOptimizers"));
}

struct Stepped {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(Parameters)> make;
};
const std::vector<Stepped>& libtorchs() {
  using namespace torch::optim;
  static const std::vector<Stepped> all{
      {"SGD", [](Parameters p) { return std::make_unique<SGD>(p, SGDOptions(0.1)); }},
      {"SGD with decay",
       [](Parameters p) { return std::make_unique<SGD>(p, SGDOptions(0.1).weight_decay(0.01)); }},
      {"SGD with momentum",
       [](Parameters p) { return std::make_unique<SGD>(p, SGDOptions(0.1).momentum(0.9)); }},
      {"Adam", [](Parameters p) { return std::make_unique<Adam>(p, AdamOptions(0.01)); }},
      {"AdamW", [](Parameters p) { return std::make_unique<AdamW>(p, AdamWOptions(0.01)); }},
      {"RMSprop", [](Parameters p) { return std::make_unique<RMSprop>(p, RMSpropOptions(0.01)); }},
      {"Adagrad", [](Parameters p) { return std::make_unique<Adagrad>(p, AdagradOptions(0.05)); }},
  };
  return all;
}

TEST_CASE(
    "what happens if I step the wrapped optimizer: the wrapper's next call, or the next backward "
    "pass, refuses it on all ranks") {
  for (const auto& kind : libtorchs()) {
    for (const int before : {0, 2}) {
      for (int call = 0; call < 5; ++call) {
        CAPTURE(kind.name);
        CAPTURE(before);
        CAPTURE(call);
        Sequential net = small_model();
        const auto plain = kind.make(net->parameters());
        DistributedOptimizerOptions options;
        if (call == 4) options.op = hvd::ReduceOp::Adasum;
        DistributedOptimizer optimizer(*plain, net->named_parameters(), options);
        const auto give = [&](int step) {
          optimizer.zero_grad();
          small_loss(net, hvd::rank(), step).backward();
        };
        for (int step = 0; step < before; ++step) {
          give(step);
          optimizer.step();
        }
        give(5);
        plain->step();
        const std::string text = error_of<InvalidArgument>([&] {
          if (call == 0 || call == 4) optimizer.step();
          if (call == 1) optimizer.synchronize();
          if (call == 2) optimizer.zero_grad();
          if (call == 3) {  // the wrapper is not called at all
            for (int pass = 0; pass < 5; ++pass) {
              plain->zero_grad();
              small_loss(net, hvd::rank(), 6 + pass).backward();
              plain->step();
            }
          }
        });
        INFO(text);
        if (hvd::size() == 1) {
          CHECK(text == "(no error)");
          continue;
        }
        CHECK(
            (contains(text,
                      "step() of the optimizer that a DistributedOptimizer is around was called") ||
             (call == 3 && contains(text, "parameters are not equal"))));
        if (call == 3) continue;
        hvd::broadcast_parameters(*net, 0);  // it was said once; the ranks can go on
        hvd::broadcast_optimizer_state(optimizer, 0);
        give(6);
        optimizer.step();
        if (call != 4) CHECK(same_on_all_ranks(flat(net)));
      }
    }
  }
}

TEST_CASE(
    "what happens if I step the optimizer that an Adasum wrapper is around, and never the wrapper: "
    "a backward pass refuses it") {
  if (hvd::size() == 1) return;
  for (const auto& kind : libtorchs()) {
    CAPTURE(kind.name);
    Sequential net = small_model();
    const auto plain = kind.make(net->parameters());
    DistributedOptimizer optimizer(*plain, net->named_parameters(), {.op = hvd::ReduceOp::Adasum});
    const std::string text = error_of<InvalidArgument>([&] {
      for (int pass = 0; pass < 5; ++pass) {
        plain->zero_grad();
        small_loss(net, hvd::rank(), pass).backward();
        plain->step();
      }
    });
    CHECK(
        contains(text, "step() of the optimizer that a DistributedOptimizer is around was called"));
  }
}

TEST_CASE(
    "what happens if I step the wrapped optimizer of a sharded wrapper, with a state or without: "
    "refused on all ranks") {
  with_and_without_one_copy();
  for (const auto& kind : libtorchs()) {
    if (kind.name == "Adagrad") continue;  // its own step() throws: it finds no state
    CAPTURE(kind.name);
    Sequential net = small_model();
    const auto plain = kind.make(net->parameters());
    DistributedOptimizer optimizer(*plain, net->named_parameters(),
                                   {.shard_optimizer_state = true, .share_parameters = one_copy});
    small_loss(net, hvd::rank(), 0).backward();
    optimizer.step();
    optimizer.zero_grad();
    small_loss(net, hvd::rank(), 1).backward();
    hvd::barrier();
    plain->step();
    // or a Mismatch with the words of another rank
    const std::string text = error_of<InvalidArgument>([&] { optimizer.step(); });
    INFO(text);
    // as in one process
    if (hvd::size() == 1 && kind.name.starts_with("SGD") && !contains(kind.name, "momentum"))
      continue;
    CHECK((contains(text, "was stepped by itself") || contains(text, "is around was called") ||
           contains(text, "was written since")));
  }
}

TEST_CASE(
    "what happens if I write parameters myself, before, between and after backward() and step(): "
    "it counts, as in one process") {
  for (const auto& kind : libtorchs()) {
    CAPTURE(kind.name);
    Sequential net = small_model();
    Reference reference;
    const auto plain = kind.make(net->parameters());
    reference.optimizer = kind.make(reference.net->parameters());
    DistributedOptimizer optimizer(*plain, net->named_parameters());
    const auto write = [&](auto&& change) {
      const torch::NoGradGuard no_gradient;
      for (auto* const each : {&net, &reference.net})
        for (auto& parameter : (*each)->parameters()) change(parameter);
    };
    for (int step = 0; step < 6; ++step) {
      optimizer.zero_grad();
      write([](at::Tensor& p) { p.clamp_(-0.3, 0.3); });
      small_loss(net, hvd::rank(), step).backward();
      reference.backward(step);
      if (step % 3 == 0) write([](at::Tensor& p) { p.data().mul_(0.99); });  // decay by hand
      if (step % 3 == 1) write([](at::Tensor& p) { p.mul_(0.99); });
      if (step % 3 == 2) write([](at::Tensor& p) { p.data().clamp_(-0.2, 0.2); });
      if (step == 4) hvd::broadcast_parameters(*net, 0);
      optimizer.step();
      reference.optimizer->step();
      write([](at::Tensor& p) { p.data().clamp_(-0.29, 0.29); });
      CHECK(same_parameters(net, reference.net, 1e-12));
    }
  }
}

TEST_CASE(
    "what happens if a GAN's generator gives the discriminator gradients that I throw away, and I "
    "clip its weights: nothing") {
  Sequential generator = small_model(), discriminator = small_model();
  SGD of_g(generator->parameters(), SGDOptions(0.1)),
      of_d(discriminator->parameters(), SGDOptions(0.1));
  DistributedOptimizer g(of_g, generator->named_parameters()),
      d(of_d, discriminator->named_parameters());
  for (int step = 0; step < 8; ++step) {
    for (int pass = 0; pass < 2; ++pass) {
      g.zero_grad();
      small_loss(generator, hvd::rank(), step).backward();
      small_loss(discriminator, hvd::rank(), step).backward();
      g.step();
      discriminator->zero_grad();
      const torch::NoGradGuard no_gradient;
      for (auto& parameter : discriminator->parameters()) parameter.clamp_(-0.3, 0.3);
    }
    d.zero_grad();
    small_loss(discriminator, hvd::rank(), step).backward();
    d.step();
  }
  CHECK(same_everywhere(generator));
  CHECK(same_everywhere(discriminator));
}

TEST_CASE(
    "what happens if I save the optimizer in a sharded wrapper: torch::save refuses it, a "
    "Checkpoint saves what is meant") {
  with_and_without_one_copy();
  for (const auto& kind : libtorchs()) {
    CAPTURE(kind.name);
    Sequential net = small_model();
    const auto plain = kind.make(net->parameters());
    auto optimizer = std::make_unique<DistributedOptimizer>(
        *plain, net->named_parameters(),
        DistributedOptimizerOptions{.shard_optimizer_state = true, .share_parameters = one_copy});
    const auto step = [&](Sequential& of, DistributedOptimizer& by, int number) {
      by.zero_grad();
      small_loss(of, hvd::rank(), number).backward();
      by.step();
    };
    const auto save = [&] {
      std::stringstream file;
      torch::save(*plain, file);
    };
    CHECK(contains(error_of<InvalidArgument>(save), "save the DistributedOptimizer"));
    step(net, *optimizer, 0);
    step(net, *optimizer, 1);
    CHECK(contains(error_of<InvalidArgument>(save), "save the DistributedOptimizer"));
    const std::string path = (std::filesystem::temp_directory_path() /
                              ("one_name_" + std::to_string(hvd::broadcast_object(::getpid(), 0))))
                                 .string();
    const hvd::Checkpoint checkpoint(path, {.random_state = false});
    checkpoint.save(*net, *plain, 2);
    Sequential other = small_model();
    const auto others = kind.make(other->parameters());
    DistributedOptimizer goes_on(*others, other->named_parameters());
    CHECK(checkpoint.load(*other, *others) == 2);
    step(net, *optimizer, 2);
    step(other, goes_on, 2);
    CHECK(difference(flat(net), flat(other)) <= 1e-12);
    std::stringstream file;
    torch::save(*optimizer, file);
    torch::load(*optimizer, file);
    CHECK(contains(error_of<InvalidArgument>(save), "save the DistributedOptimizer"));
    if (kind.name == "Adam" || kind.name == "SGD with momentum") {
      optimizer.reset();
      CHECK(contains(error_of<InvalidArgument>(save), "unshard()"));
    } else {
      optimizer->unshard();
      save();
    }
    hvd::barrier();
    if (hvd::rank() == 0) std::filesystem::remove(path);
  }
}

/// User code: LARS (You et al., 2017), which looks at all of a parameter.
class Lars : public SGD {
 public:
  using SGD::SGD;
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const torch::NoGradGuard no_gradient;
    for (auto& group : param_groups())
      for (auto& parameter : group.params())
        if (parameter.grad().defined())
          parameter.sub_(parameter.grad() * (group.options().get_lr() * parameter.norm() /
                                             (parameter.grad().norm() + 1e-9)));
    return {};
  }
};
/// And LAMB (You et al., 2019): Adam, whose change of a parameter gets that parameter's norm. Keeps
/// Adam's state.
class Lamb : public Adam {
 public:
  using Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override {
    const torch::NoGradGuard no_gradient;
    std::vector<at::Tensor> before;
    for (auto& group : param_groups())
      for (auto& parameter : group.params()) before.push_back(parameter.clone());
    at::Tensor loss = Adam::step(std::move(closure));
    std::size_t place = 0;
    for (auto& group : param_groups())
      for (auto& parameter : group.params()) {
        const at::Tensor change = parameter - before[place];
        const at::Tensor factor = before[place].norm() / (change.norm() + 1e-9);
        parameter.copy_(before[place++] + change * factor * 0.01);
      }
    return loss;
  }
};

TEST_CASE(
    "what happens if I shard LARS or LAMB, derived from LibTorch's SGD and Adam: they see whole "
    "parameters, and their state is whole") {
  const std::vector<DistributedOptimizerOptions> ways{
      {.shard_optimizer_state = true}, {.shard_gradients = true}, {.share_parameters = true}};
  for (const bool adam : {false, true}) {
    for (const auto& options : ways) {
      CAPTURE(adam);
      const auto make = [&](const Sequential& net) -> std::unique_ptr<torch::optim::Optimizer> {
        if (adam) return std::make_unique<Lamb>(net->parameters(), AdamOptions(0.01));
        return std::make_unique<Lars>(net->parameters(), SGDOptions(0.05));
      };
      Sequential net = small_model(at::kDouble, 96);
      Reference reference;
      reference.net = small_model(at::kDouble, 96);
      reference.optimizer = make(reference.net);
      const auto plain = make(net);
      DistributedOptimizer optimizer(*plain, net->named_parameters(), options);
      check_steps(net, optimizer, reference, 3, 1e-12);
      std::stringstream file;
      torch::save(optimizer, file);
      optimizer.unshard();
      check_steps(net, optimizer, reference, 2, 1e-12);
    }
  }
}

TEST_CASE(
    "what happens if I write through .data(): masters follow; one copy of the parameters is "
    "written by one rank, or all are told") {
  for (const bool sharded : {false, true}) {
    Sequential net = small_model(at::kBFloat16);
    SGD plain(net->parameters(), SGDOptions(0.0));
    hvd::MasterWeights masters(plain);
    DistributedOptimizer optimizer(masters, net->named_parameters(),
                                   {.shard_optimizer_state = sharded});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      small_loss(net, hvd::rank(), step).backward();
      optimizer.step();
      for (auto& parameter : net->parameters())
        parameter.data().clamp_(-0.2 + 0.05 * step, 0.2 - 0.05 * step);
    }
    const at::Tensor clamped = flat(net);
    optimizer.zero_grad();
    small_loss(net, hvd::rank(), 3).backward();
    optimizer.step();
    CHECK(same(flat(net), clamped));
    CHECK(clamped.abs().max().item<double>() <= 0.11);
  }
  if (hvd::size() == 1) return;
  Sequential net = small_model();
  DistributedOptimizer optimizer(std::make_unique<SGD>(net->parameters(), SGDOptions(0.1)),
                                 net->named_parameters(), {.share_parameters = true});
  const auto step = [&](int number) {
    optimizer.zero_grad();
    small_loss(net, hvd::rank(), number).backward();
    optimizer.step();
  };
  step(0);
  hvd::barrier();
  for (auto& parameter : net->parameters()) parameter.data().mul_(0.9);
  hvd::barrier();
  const std::string text = error_of<Mismatch>([&] { step(1); });
  INFO(text);
  CHECK(contains(text, "was written since the last step"));
  CHECK(contains(text, "write_parameters()"));
  step(2);
  if (const auto writing = optimizer.write_parameters(); writing.is_writer())
    for (auto& parameter : net->parameters()) parameter.data().mul_(0.9);
  step(3);
  CHECK(same_on_all_ranks(flat(net)));
}

TEST_CASE(
    "what happens if I want the gradients' norm for a log: grad_norm() has that of all ranks, and "
    "step() goes on as if not asked") {
  const std::vector<DistributedOptimizerOptions> ways{{}, {.shard_gradients = true}};
  for (const auto& options : ways) {
    Sequential net = small_model();
    DistributedOptimizer optimizer = made(net, options);
    Reference reference;
    reference.optimizer = sgd(reference.net->parameters());
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      small_loss(net, hvd::rank(), step).backward();
      const double norm = hvd::grad_norm(optimizer);
      const double largest = hvd::grad_norm(optimizer, std::numeric_limits<double>::infinity());
      optimizer.step();
      reference.backward(step);
      std::vector<at::Tensor> all;
      for (const auto& parameter : reference.net->parameters())
        all.push_back(parameter.grad().flatten());
      CHECK(norm == doctest::Approx(torch::cat(all).norm().item<double>()).epsilon(1e-9));
      CHECK(largest == doctest::Approx(torch::cat(all).abs().max().item<double>()).epsilon(1e-9));
      reference.optimizer->step();
      CHECK(same_parameters(net, reference.net, 1e-12));
    }
    CHECK(contains(error_of<InvalidArgument>([&] { hvd::grad_norm(optimizer, 0); }), "norm_type"));
  }
}

TEST_CASE(
    "what happens if an encoder is in two DistributedOptimizers and one pass gives both gradients: "
    "the error names it") {
  torch::nn::Linear encoder(6, 6), one(6, 3), two(6, 3);
  hvd::broadcast_parameters(*encoder, 0);
  hvd::broadcast_parameters(*one, 0);
  hvd::broadcast_parameters(*two, 0);
  const auto wrap = [&](torch::nn::Linear& head) {
    std::vector<std::pair<std::string, at::Tensor>> named;
    for (const auto& item : encoder->named_parameters())
      named.emplace_back("encoder." + item.key(), item.value());
    for (const auto& item : head->named_parameters())
      named.emplace_back("head." + item.key(), item.value());
    std::vector<at::Tensor> parameters;
    for (const auto& [name, parameter] : named) parameters.push_back(parameter);
    return DistributedOptimizer(std::make_unique<SGD>(parameters, SGDOptions(0.1)), named);
  };
  DistributedOptimizer first = wrap(one), second = wrap(two);
  const at::Tensor x = data({5, 6}, at::kFloat, hvd::rank());
  const at::Tensor code = torch::tanh(encoder(x));
  (one(code).square().mean() + two(code).square().mean()).backward();
  const std::string text = error_of<InvalidArgument>([&] {
    first.step();
    second.step();
  });
  INFO(text);
  if (hvd::size() > 1) {
    CHECK(contains(text, "gradient of 'encoder."));
    CHECK(contains(text, "is in two DistributedOptimizers"));
    CHECK(!contains(text, "clipping"));
  }
}

TEST_CASE(
    "what happens if ranks have registered parameters in another order: the optimizer's state is "
    "broadcast by name") {
  for (const bool adam : {true, false}) {
    Sequential net = small_model();
    auto named = net->named_parameters().pairs();
    if (last()) std::reverse(named.begin(), named.end());
    std::vector<at::Tensor> parameters;
    for (const auto& [name, parameter] : named) parameters.push_back(parameter);
    std::unique_ptr<torch::optim::Optimizer> plain;
    if (adam) plain = std::make_unique<Adam>(parameters, AdamOptions(0.01));
    if (!adam) plain = sgd(parameters);
    for (int step = 0; step < 2; ++step) {  // each rank alone
      plain->zero_grad();
      small_loss(net, hvd::rank(), step).backward();
      plain->step();
    }
    DistributedOptimizer optimizer(*plain, named);
    hvd::broadcast_parameters(*net, 0);
    hvd::broadcast_optimizer_state(*plain, 0);  // the wrapper's, which has names
    std::vector<at::Tensor> states;
    for (const auto& parameter : net->parameters()) {
      const auto& state = *plain->state().at(parameter.unsafeGetTensorImpl());
      states.push_back(
          adam
              ? static_cast<const torch::optim::AdamParamState&>(state).exp_avg().flatten()
              : static_cast<const torch::optim::SGDParamState&>(state).momentum_buffer().flatten());
    }
    CHECK(same_on_all_ranks(torch::cat(states)));
    CHECK(plain->param_groups()[0].params()[0].is_same(parameters[0]));
    CHECK(plain->param_groups()[0].params().size() == parameters.size());
  }
}

}  // namespace
