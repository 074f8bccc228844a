// What happens if I ... : do to one rank, or by the other of two names, what makes ranks drift
// apart: as one process, or told on all.
#include <unistd.h>

#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/torch_bindings/support.h"
#include "tests/torch_bindings/wrapped_optimizers.h"

namespace what_if_drift {
namespace {

using namespace hvd::test;
using namespace hvd::test::wrapped;
using hvd::DistributedOptimizer, hvd::DistributedOptimizerOptions, hvd::InvalidArgument,
    hvd::Mismatch;
using torch::optim::Adam, torch::optim::AdamOptions, torch::optim::SGD, torch::optim::SGDOptions;
using Ddp = hvd::DistributedDataParallel<torch::nn::SequentialImpl>;

/// A model in a DistributedOptimizer or in a DistributedDataParallel, and its optimizer.
struct Either {
  explicit Either(bool with_ddp, const DistributedOptimizerOptions& options = {},
                  Sequential model = small_model())
      : net(std::move(model)) {
    plain = sgd(net->parameters());
    if (with_ddp) ddp.emplace(net);
    if (!with_ddp) optimizer.emplace(*plain, net->named_parameters(), options);
  }
  void backward(int step, double factor = 1) {
    optimizer ? optimizer->zero_grad() : plain->zero_grad();
    const at::Tensor x =
        data({5, 6}, at::kDouble, hvd::rank(), step).to(net->parameters()[0].scalar_type());
    const at::Tensor y = data({5, 3}, at::kDouble, hvd::rank(), step + 1).to(x.scalar_type());
    (torch::mse_loss(ddp ? ddp->forward(x) : net->forward(x), y) * factor).backward();
  }
  void update() { optimizer ? optimizer->step() : plain->step(); }
  void step(int number) {
    backward(number);
    update();
  }
  [[nodiscard]] Optimizer& wrapper() {
    return optimizer ? static_cast<Optimizer&>(*optimizer) : *plain;
  }
  [[nodiscard]] bool equal() { return same_on_all_ranks(flat(net)); }

  Sequential net;
  std::unique_ptr<Optimizer> plain;
  std::optional<DistributedOptimizer> optimizer;
  std::optional<Ddp> ddp;
};
/// The Mismatch that ranks are told within some steps.
std::string told(Either& either, int from, int most = 3) {
  return error_of<Mismatch>([&] {
    for (int number = from; number < from + most; ++number) either.step(number);
  });
}
void mend(Either& either) {
  either.wrapper().zero_grad();
  hvd::broadcast_parameters(*either.net, 0);
  hvd::broadcast_optimizer_state(either.wrapper(), 0);
  for (int number = 20; number < 23; ++number) either.step(number);
  CHECK(either.equal());
}
bool names_culprit(const std::string& text) {
  return contains(text, hvd::size() == 2 ? "rank 0 and rank 1 differ"
                                         : last_rank() + " differs from the others");
}

// ------------------------------------------------------------ the table, by the other of two names

TEST_CASE(
    "what happens if one rank writes gradients through a pointer while they are under way, or "
    "under DDP: told at the next step") {
  if (hvd::size() == 1) return;
  for (const bool ddp : {false, true}) {
    CAPTURE(ddp);
    Either either(ddp);
    either.step(0);
    either.backward(1);
    if (either.optimizer) either.optimizer->synchronize();
    if (last()) either.net->parameters()[1].grad().data_ptr<double>()[0] += 1;
    either.update();
    const std::string text = told(either, 2, 1);
    CAPTURE(text);
    CHECK(contains(text, "parameter '0.bias'"));
    CHECK(names_culprit(text));
    mend(either);
  }
  // Every rank its own factor, past all counters, on what is under way: whatever arrives, ranks
  // that step by different ones are told.
  Either either(false);
  either.step(0);
  either.backward(1);
  for (auto& parameter : either.net->parameters())
    for (std::int64_t i = 0; i < parameter.numel(); ++i)
      parameter.grad().data_ptr<double>()[i] *= 1 + hvd::rank();
  const std::string text = error_of<Mismatch>([&] {
    either.update();
    either.step(2);
  });
  if (text == "(no error)") CHECK(either.equal());
  mend(either);
}

TEST_CASE(
    "what happens if a rank's rate goes by its own metric, through wrapper, wrapped or under DDP: "
    "told at the next step") {
  if (hvd::size() == 1) return;
  for (const std::string name : {"wrapper", "wrapped", "ddp"}) {
    CAPTURE(name);
    Either either(name == "ddp");
    Optimizer& given = name == "wrapper" ? either.wrapper() : *either.plain;
    torch::optim::ReduceLROnPlateauScheduler scheduler(
        given, torch::optim::ReduceLROnPlateauScheduler::min, 0.1F, 0);
    const std::string text = error_of<Mismatch>([&] {
      for (int step = 0; step < 4; ++step) {
        either.step(step);
        scheduler.step(last() ? static_cast<float>(step) : -static_cast<float>(step));
      }
    });
    CAPTURE(text);
    CHECK(contains(text, name == "ddp" ? "parameter '" : "option lr of group 0"));
    CHECK(names_culprit(text));
    for (auto& group : given.param_groups()) group.options().set_lr(0.1);
    mend(either);
  }
}

TEST_CASE(
    "what happens if an Embedding with max_norm scales the rows that a rank has read: told on all, "
    "under DDP, too") {
  if (hvd::size() == 1) return;
  for (const bool sparse : {false, true}) {
    for (const bool with_ddp : {false, true}) {
      CAPTURE(sparse);
      CAPTURE(with_ddp);
      torch::manual_seed(3);
      torch::nn::Embedding table(torch::nn::EmbeddingOptions(10, 4).max_norm(0.1).sparse(sparse));
      SGD plain(table->parameters(), 0.1);
      std::optional<DistributedOptimizer> optimizer;
      std::optional<hvd::DistributedDataParallel<torch::nn::EmbeddingImpl>> ddp;
      if (with_ddp) ddp.emplace(table);
      if (!with_ddp) optimizer.emplace(plain, table->named_parameters());
      const std::string text = error_of<Mismatch>([&] {
        for (int step = 0; step < 3; ++step) {
          optimizer ? optimizer->zero_grad() : plain.zero_grad();
          const at::Tensor rows = torch::full({1}, hvd::rank(), at::kLong);
          (ddp ? ddp->forward(rows) : table->forward(rows)).sum().backward();
          optimizer ? optimizer->step() : plain.step();
        }
      });
      CAPTURE(text);
      CHECK(contains(text, "parameter 'weight'"));
    }
  }
}

TEST_CASE(
    "what happens if the last group of backward passes is not complete, and I step a "
    "DistributedOptimizer: by what all have added up") {
  for (const bool sharded : {false, true}) {
    Either either(false, {.backward_passes_per_step = 3, .shard_optimizer_state = sharded});
    Reference reference;
    reference.optimizer = sgd(reference.net->parameters());
    for (const int passes : {3, 2, 3, 1}) {
      reference.passes = passes;
      either.optimizer->zero_grad();
      for (int pass = 0; pass < passes; ++pass)
        small_loss(either.net, hvd::rank(), 5 * passes + pass).backward();
      either.optimizer->step();
      reference.step(5);
      CHECK(same_parameters(either.net, reference.net, 1e-12));
    }
    CHECK(either.equal());
  }
}

TEST_CASE(
    "what happens if I make a schedule on the wrapped optimizer and resume by it: the same rates, "
    "whichever name I gave") {
  for (const bool by_wrapped : {false, true}) {
    for (const bool saves_wrapped : {false, true}) {
      for (const bool sharded : {false, true}) {
        CAPTURE(by_wrapped);
        CAPTURE(saves_wrapped);
        CAPTURE(sharded);
        struct Run {
          explicit Run(bool by_wrapped, bool sharded)
              : adam(net->parameters(), AdamOptions(0.05)),
                optimizer(adam, net->named_parameters(), {.shard_optimizer_state = sharded}),
                schedule(by_wrapped ? static_cast<Optimizer&>(adam) : optimizer, 2, 0.5) {}
          void steps(int begin, int end) {
            for (int step = begin; step < end; ++step) {
              optimizer.zero_grad();
              small_loss(net, hvd::rank(), step).backward();
              optimizer.step();
              schedule.step();
            }
          }
          Sequential net = small_model();
          Adam adam;
          DistributedOptimizer optimizer;
          hvd::StepSchedule schedule;
        };
        const std::string path = (std::filesystem::temp_directory_path() /
                                  ("drift_" + std::to_string(hvd::broadcast_object(::getpid(), 0))))
                                     .string();
        const hvd::Checkpoint checkpoint(path);
        Run first(by_wrapped, sharded), second(!by_wrapped, sharded);
        const auto given = [&](Run& run) -> Optimizer& {
          return saves_wrapped ? static_cast<Optimizer&>(run.adam) : run.optimizer;
        };
        first.steps(0, 3);
        checkpoint.save(first.net, given(first), 3, {first.schedule});
        CHECK(checkpoint.load(second.net, given(second), {second.schedule}) == 3);
        first.steps(3, 6);
        second.steps(3, 6);
        CHECK(same(flat(first.net), flat(second.net)));
        CHECK(second.optimizer.param_groups()[0].options().get_lr() ==
              doctest::Approx(0.05 / 8).epsilon(1e-12));
        // from that call on
        CHECK(second.adam.param_groups()[0].options().get_lr() ==
              doctest::Approx(0.05 / 8).epsilon(1e-12));
        hvd::barrier();
        if (hvd::rank() == 0) std::filesystem::remove(path);
      }
    }
  }
}

TEST_CASE(
    "what happens if a GradScaler is given the optimizer in an Adasum wrapper on a process set: "
    "its ranks agree among themselves") {
  const int members = hvd::size() > 2 ? hvd::size() - 1 : hvd::size();
  std::vector<int> ranks;
  for (int rank = 0; rank < members; ++rank) ranks.push_back(rank);
  const hvd::ProcessSet set = hvd::add_process_set(ranks);
  if (set.included()) {
    hvd::GradScaler scaler({.init_scale = 64});
    Sequential net = small_model();
    SGD plain(net->parameters(), 0.1);
    DistributedOptimizer optimizer(plain, net->named_parameters(),
                                   {.op = hvd::ReduceOp::Adasum, .process_set = set});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      at::Tensor loss = small_loss(net, hvd::rank(), step);
      if (step == 1 && hvd::rank() == 0) loss = loss * std::numeric_limits<double>::infinity();
      scaler.scale(loss).backward();
      scaler.step(plain);
      scaler.update();
    }
    CHECK(scaler.get_scale() == 32);
    CHECK(torch::isfinite(flat(net)).all().item<bool>());
    if (set.size() > 1) {
      const at::Tensor all = hvd::allgather(flat(net).reshape({1, -1}), {.process_set = set});
      for (std::int64_t i = 1; i < all.size(0); ++i) CHECK(torch::equal(all[0], all[i]));
    }
  }
  hvd::remove_process_set(set);
}

TEST_CASE(
    "what happens if a rank under DDP catches a bad batch and goes on to the epoch's end: all are "
    "told who waits for what") {
  if (hvd::size() == 1) return;
  Either either(true);
  for (int i = 0; i < 2; ++i) either.step(i);
  const std::string text =
      error_of<Mismatch>([&] { hvd::rank() == 0 ? hvd::barrier() : either.step(2); });
  CAPTURE(text);
  CHECK(contains(text, "the ranks wait for one another: rank 0 waits for barrier '"));
  CHECK(contains(text, "ddp."));
  either.plain->zero_grad();
  CHECK_FALSE(hvd::any(false));
}

// -------------------------------------------------------------------------- what nobody wrote down

TEST_CASE(
    "what happens if one rank loads weights between backward and step: told at that step, or the "
    "next, on all ranks") {
  if (hvd::size() == 1) return;
  for (const bool ddp : {false, true}) {
    for (const bool sharded : {false, true}) {
      if (ddp && sharded) continue;
      CAPTURE(ddp);
      CAPTURE(sharded);
      Either either(ddp, {.shard_optimizer_state = sharded});
      std::stringstream file;
      torch::save(either.net, file);
      for (int step = 0; step < 2; ++step) either.step(step);
      either.backward(2);
      if (last()) torch::load(either.net, file);
      const std::string text = error_of<Mismatch>([&] {
        either.update();
        either.step(3);
      });
      CAPTURE(text);
      CHECK(contains(text, "parameter '0.weight'"));
      CHECK(names_culprit(text));
      CHECK(contains(text, ddp ? "step 4" : "step 3"));
      mend(either);
    }
  }
}

TEST_CASE(
    "what happens if one rank changes its rate between backward and step, through either name: "
    "told at that step, which none makes") {
  if (hvd::size() == 1) return;
  for (const bool by_wrapped : {false, true}) {
    for (const DistributedOptimizerOptions& options : {DistributedOptimizerOptions{},
                                                       {.shard_optimizer_state = true},
                                                       {.share_parameters = true},
                                                       {.op = hvd::ReduceOp::Adasum}}) {
      CAPTURE(by_wrapped);
      Either either(false, options);
      either.step(0);
      const at::Tensor before = flat(either.net).clone();
      either.backward(1);
      Optimizer& given = by_wrapped ? *either.plain : either.wrapper();
      if (last()) given.param_groups()[0].options().set_lr(0.3);
      const std::string text = error_of<Mismatch>([&] { either.update(); });
      CAPTURE(text);
      CHECK(contains(text, "option lr of group 0"));
      CHECK(names_culprit(text));
      CHECK(same(flat(either.net), before));
      given.param_groups()[0].options().set_lr(0.1);
      mend(either);
    }
  }
}

TEST_CASE(
    "what happens if one rank alone loads the optimizer's state: momentum differs, and all are "
    "told of what comes of it") {
  if (hvd::size() == 1) return;
  for (const bool ddp : {false, true}) {
    CAPTURE(ddp);
    Either either(ddp);
    for (int step = 0; step < 2; ++step) either.step(step);
    std::stringstream file;
    torch::save(*either.plain, file);
    for (int step = 2; step < 4; ++step) either.step(step);
    if (last()) torch::load(*either.plain, file);
    const std::string text = told(either, 4, 2);
    CAPTURE(text);
    CHECK(contains(text, "parameter '0.weight'"));
    CHECK(names_culprit(text));
    mend(either);
  }
}

TEST_CASE(
    "what happens if I torch::load into the wrapped optimizer after wrapping: it counts, or is "
    "refused by name") {
  for (const bool masters : {false, true}) {
    CAPTURE(masters);
    Sequential net = small_model(masters ? at::kBFloat16 : at::kDouble),
               other = small_model(masters ? at::kBFloat16 : at::kDouble);
    Adam one(net->parameters(), AdamOptions(0.01)), two(other->parameters(), AdamOptions(0.01));
    std::optional<hvd::MasterWeights> of_one, of_two;
    if (masters) {
      of_one.emplace(one);
      of_two.emplace(two);
    }
    DistributedOptimizer first(one, net->named_parameters()),
        second(two, other->named_parameters());
    const auto step = [](Sequential& of, DistributedOptimizer& by, int number) {
      by.zero_grad();
      small_loss(of, hvd::rank(), number).backward();
      by.step();
    };
    for (int number = 0; number < 3; ++number) step(net, first, number);
    std::stringstream file;
    torch::save(first, file);
    {
      const torch::NoGradGuard no_gradient;
      for (std::size_t i = 0; i < net->parameters().size(); ++i)
        other->parameters()[i].copy_(net->parameters()[i]);
    }
    Optimizer& wrapped = second.wrapped();
    torch::load(wrapped, file);
    for (int number = 3; number < 6; ++number) {
      step(net, first, number);
      step(other, second, number);
    }
    CHECK(difference(flat(net).to(at::kDouble), flat(other).to(at::kDouble)) <
          (masters ? 1e-2 : 1e-14));
    CHECK(same_everywhere(other));
  }
}

TEST_CASE(
    "what happens if there is one schedule on the wrapped optimizer and one on the wrapper: "
    "refused by name, as one would be lost") {
  for (const bool sharded : {false, true}) {
    Sequential net = small_model();
    const auto plain = sgd(net->parameters());
    DistributedOptimizer optimizer(*plain, net->named_parameters(),
                                   {.shard_optimizer_state = sharded});
    torch::optim::StepLR of_wrapped(*plain, 1, 0.5), of_wrapper(optimizer, 2, 0.25);
    const auto step = [&](int number) {
      optimizer.zero_grad();
      small_loss(net, hvd::rank(), number).backward();
      optimizer.step();
    };
    const std::string text = error_of<InvalidArgument>([&] {
      for (int number = 0; number < 5; ++number) {
        step(number);
        of_wrapped.step();
        of_wrapper.step();
      }
    });
    CAPTURE(text);
    CHECK(contains(
        text,
        "option lr of group 0 is 0.025 in the optimizer and 0.0125 in the one that is around it"));
    // until it is mended
    CHECK(contains(error_of<InvalidArgument>([&] { step(6); }), "schedulers, on one of the two"));
    plain->param_groups()[0].options().set_lr(0.0125);
    step(7);
    CHECK(optimizer.param_groups()[0].options().get_lr() == 0.0125);
    of_wrapped.step();  // one of them alone
    step(8);
    CHECK(optimizer.param_groups()[0].options().get_lr() ==
          doctest::Approx(0.00625).epsilon(1e-12));
    CHECK(same_everywhere(net));
  }
}

TEST_CASE(
    "what happens if one rank trains while its parameters are the averages: told on all, and when "
    "all do, it is theirs") {
  for (const bool ddp : {false, true}) {
    CAPTURE(ddp);
    Either either(ddp);
    hvd::ExponentialMovingAverage average(*either.net, {.decay = 0.5});
    for (int step = 0; step < 3; ++step) {
      either.step(step);
      average.update();
    }
    if (hvd::size() > 1) {
      std::optional<hvd::ExponentialMovingAverage::Averaged> guard;
      if (last()) guard.emplace(average);
      const std::string text = told(either, 3, 1);
      CAPTURE(text);
      CHECK(contains(text, "parameter '0.weight'"));
      CHECK(names_culprit(text));
    }
    mend(either);
    const auto guard = average.averaged();
    either.step(5);
    CHECK(either.equal());
  }
}

TEST_CASE(
    "what happens if one rank freezes a layer of a DistributedOptimizer: it counts as zeros, and "
    "the replicas stay equal") {
  Either either(false);
  either.step(0);
  if (last() && hvd::size() > 1)
    for (auto& parameter : either.net[0]->parameters()) parameter.set_requires_grad(false);
  for (int step = 1; step < 4; ++step) either.step(step);
  CHECK(either.equal());
  either.optimizer->check_replicas();
}

TEST_CASE(
    "what happens if two wrappers are around one optimizer, and I step the first: as one process, "
    "or told on all ranks") {
  if (hvd::size() == 1) return;
  Sequential net = small_model();
  const auto plain = sgd(net->parameters());
  DistributedOptimizer first(*plain, net->named_parameters()),
      second(*plain, net->named_parameters());
  Reference reference;
  reference.optimizer = sgd(reference.net->parameters());
  const std::string text = error_of<InvalidArgument>([&] {
    for (int step = 0; step < 3; ++step) {
      first.zero_grad();
      small_loss(net, hvd::rank(), step).backward();
      first.step();
      reference.step(step);
    }
  });
  CAPTURE(text);
  if (text == "(no error)") CHECK(same_parameters(net, reference.net, 1e-12));
  if (text != "(no error)")
    CHECK((contains(text, "two DistributedOptimizers") || contains(text, "is around was called")));
}

TEST_CASE(
    "what happens if parts of a model train in different process sets: each set's replicas are its "
    "own, and none is alarmed") {
  std::vector<int> ranks{0};
  if (hvd::size() > 2) ranks.push_back(hvd::size() - 1);
  const hvd::ProcessSet set = hvd::add_process_set(ranks);
  torch::nn::Linear body(6, 6), head(6, 3);
  hvd::broadcast_parameters(*body, 0);
  {
    const torch::NoGradGuard no_gradient;  // each rank outside has a head of its own
    for (auto& parameter : head->parameters())
      parameter.fill_(set.included() ? 0.5 : 0.25 * hvd::rank());
  }
  DistributedOptimizer of_body(std::make_unique<SGD>(body->parameters(), SGDOptions(0.01)),
                               body->named_parameters());
  DistributedOptimizer of_head(
      std::make_unique<SGD>(head->parameters(), SGDOptions(set.included() ? 0.01 : 0.05)),
      head->named_parameters(), {.process_set = set});
  for (int step = 0; step < 5; ++step) {
    of_body.zero_grad();
    of_head.zero_grad();
    head(torch::tanh(body(data({5, 6}, at::kFloat, hvd::rank(), step)))).square().mean().backward();
    of_body.step();
    of_head.step();
  }
  of_body.check_replicas();
  if (set.included()) of_head.check_replicas();
  CHECK(same_on_all_ranks(body->weight));
  hvd::remove_process_set(set);
}

TEST_CASE(
    "what happens if I move a DistributedOptimizer in a hook, while backward runs: it trains on "
    "where it is") {
  Sequential net = small_model();
  Reference reference;
  reference.optimizer = sgd(reference.net->parameters());
  std::optional<DistributedOptimizer> from, to;
  from.emplace(sgd(net->parameters()), net->named_parameters());
  for (int step = 0; step < 4; ++step) {
    (from ? from : to)->zero_grad();
    at::Tensor loss = small_loss(net, hvd::rank(), step);
    const auto hook = net->parameters()[2].register_hook([&](const at::Tensor&) {
      auto& now = from ? from : to;
      auto& next = from ? to : from;
      next.emplace(std::move(*now));
      now.reset();
    });
    loss.backward();
    net->parameters()[2].remove_hook(hook);
    (from ? from : to)->step();
    reference.step(step);
    CHECK(same_parameters(net, reference.net, 1e-12));
  }
}

}  // namespace
}  // namespace what_if_drift
