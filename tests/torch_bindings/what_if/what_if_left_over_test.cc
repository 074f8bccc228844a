// What happens if I ... : gradients that are left over when ranks meet again, or do not.
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/torch_bindings/norm_net.h"

namespace what_if_left_over {
namespace {

using namespace hvd::test;
using namespace hvd::test::norm_net;
using torch::optim::SGD;

/// What a rank does last before it joins.
enum class Act {
  Nothing,
  ForwardThrows,
  BackwardThrows,
  Forward,
  Backward,
  Drops,
  Synchronizes,
  Refused
};

/// A model of which one layer throws when told to.
struct Training {
  explicit Training(bool norm) : net(model(norm)) {
    net->push_back(torch::nn::Functional([throws = throws](const at::Tensor& x) {
      if (*throws) throw std::runtime_error("out of memory");
      return x;
    }));
  }
  /// Runs a backward pass that throws after some of its gradients.
  template <class Net>
  void throw_in_backward(Net& through, int step) {
    at::Tensor first = net->ptr(0)->as<Linear>()->weight;
    const auto hook = first.register_hook([](const at::Tensor& gradient) -> at::Tensor {
      if (gradient.defined()) throw std::runtime_error("out of memory");
      return gradient;
    });
    CHECK_THROWS_AS(loss(through, hvd::rank(), step).backward(), std::runtime_error);
    first.remove_hook(hook);
  }
  template <class Net>
  void act(Act last, Net& through) {
    *throws = last == Act::ForwardThrows;
    if (*throws) CHECK_THROWS_AS(loss(through, hvd::rank(), 9), std::runtime_error);
    *throws = false;
    if (last == Act::BackwardThrows) throw_in_backward(through, 9);
    if (last == Act::Forward) loss(through, hvd::rank(), 9);
    if (last >= Act::Backward) loss(through, hvd::rank(), 9).backward();
  }
  const std::shared_ptr<bool> throws = std::make_shared<bool>(false);
  Sequential net;
};

void act(Act last, Training& training, hvd::DistributedOptimizer& optimizer) {
  training.act(last, *training.net);
  if (last == Act::Synchronizes) optimizer.synchronize();
  if (last == Act::Refused) {
    training.net->parameters()[0].mutable_grad().mul_(2);
    const std::string text = error_of<hvd::InvalidArgument>([&] { optimizer.step(); });
    CHECK(contains(text, hvd::size() == 1 ? "(no error)" : "was changed"));
  }
  if (last >= Act::Drops) optimizer.zero_grad();
}

/// Makes steps on all ranks and in one process, which must be the same.
void train_on(Training& training, const std::function<void(int)>& step) {
  hvd::broadcast_parameters(*training.net, 0);
  Sequential alone = model(training.net->size() > 3);
  {
    const torch::NoGradGuard no_gradient;
    for (std::size_t i = 0; i < alone->parameters().size(); ++i)
      alone->parameters()[i].copy_(training.net->parameters()[i]);
  }
  SGD reference(alone->parameters(), 0.01);
  for (int i = 0; i < 4; ++i) {
    CHECK(error_of<hvd::Error>([&] { step(i); }) == "(no error)");
    reference.zero_grad();
    at::Tensor sum = torch::zeros({}, kDouble);
    for (const int rank : everyone()) sum = sum + loss(*alone, rank, i);
    (sum / hvd::size()).backward();
    reference.step();
    CHECK(is_same_on_all_ranks(*training.net));
    CHECK(difference(flat(training.net), flat(alone)) < 1e-11);
  }
}

TEST_CASE(
    "what happens if gradients are left over when a rank joins, of a backward pass that has thrown "
    "or that nobody has stepped by: they count nowhere, and all go on together") {
  const auto everything = {Act::Nothing, Act::BackwardThrows, Act::Backward,
                           Act::Drops,   Act::Synchronizes,   Act::Refused};
  for (const bool in_guard : {false, true}) {
    for (const Act last : everything) {
      for (const bool by_module : {false, true}) {
        CAPTURE(in_guard);
        CAPTURE(static_cast<int>(last));
        CAPTURE(by_module);
        Training training(false);
        SGD sgd(training.net->parameters(), 0.01);
        hvd::DistributedOptimizer optimizer(sgd, training.net->named_parameters());
        {
          std::optional<hvd::JoinGuard> guard;
          if (in_guard) guard.emplace(optimizer.join());
          if (hvd::rank() == 0) act(last, training, optimizer);
          if (!in_guard) hvd::join();
          if (in_guard) guard->end();
        }
        train_on(training, [&](int step) {
          by_module ? training.net->zero_grad() : optimizer.zero_grad();
          loss(*training.net, hvd::rank(), step).backward();
          optimizer.step();
        });
      }
    }
  }
}

TEST_CASE(
    "what happens if the first backward pass after a join is refused on one rank: it takes part in "
    "the others' step, and all hear of it in the next") {
  Training training(false);
  SGD sgd(training.net->parameters(), 0.01);
  hvd::DistributedOptimizer optimizer(sgd, training.net->named_parameters());
  const auto backward = [&](int step, bool differentiable) {
    loss(*training.net, hvd::rank(), step).backward({}, {}, differentiable);
  };
  hvd::join();
  std::string text;
  for (int step = 0; step < 2; ++step) {
    text = error_of<hvd::Error>([&] {
      backward(step, step == 0 && last());
      optimizer.step();
    });
    if (hvd::size() > 1 && (last() || step == 1))
      CHECK(contains(text, step == 0 ? "create_graph" : "without a step()"));
    error_of<hvd::Error>([&] { optimizer.zero_grad(); });
  }
  train_on(training, [&](int step) {
    optimizer.zero_grad();
    backward(step, false);
    optimizer.step();
  });
}

TEST_CASE(
    "what happens if a DistributedDataParallel's last pass before a rank joins has thrown, or has "
    "had no backward pass: all go on together") {
  for (const bool in_guard : {true, false}) {
    for (const Act last :
         {Act::Nothing, Act::ForwardThrows, Act::BackwardThrows, Act::Forward, Act::Backward}) {
      CAPTURE(in_guard);
      CAPTURE(static_cast<int>(last));
      Training training(in_guard);  // without a guard the first rank's buffers need all ranks
      Ddp ddp(training.net);
      SGD sgd(training.net->parameters(), 0.01);
      {
        std::optional<hvd::JoinGuard> guard;
        if (in_guard) guard.emplace(ddp.join({.optimizer = &sgd}));
        if (hvd::rank() == 0) training.act(last, ddp);
        if (!in_guard) hvd::join();
        if (in_guard) guard->end();
      }
      train_on(training, [&](int step) {
        sgd.zero_grad();
        loss(ddp, hvd::rank(), step).backward();
        sgd.step();
      });
    }
  }
}

TEST_CASE(
    "what happens if one rank throws its gradients away in optimizer.join(): the others step, and "
    "all hear of it in the next step") {
  for (const bool by_module : {false, true}) {
    Training training(false);
    SGD sgd(training.net->parameters(), 0.01);
    hvd::DistributedOptimizer optimizer(sgd, training.net->named_parameters());
    std::string text;
    {
      const auto guard = optimizer.join();
      for (int step = 0; step < 2; ++step) {
        by_module ? training.net->zero_grad() : optimizer.zero_grad();
        loss(*training.net, hvd::rank(), step).backward();
        if (step == 0 && last()) {
          by_module ? training.net->zero_grad() : optimizer.zero_grad();
          continue;
        }
        text = error_of<hvd::Error>([&] { optimizer.step(); });
      }
    }
    CAPTURE(text);
    const std::string who = by_module ? " has reduced gradients since its last step()"
                                      : " has thrown its last gradients away without a step()";
    CHECK(contains(text, hvd::size() == 1 ? "(no error)" : last_rank() + who));
    train_on(training, [&](int step) {
      optimizer.zero_grad();
      loss(*training.net, hvd::rank(), step).backward();
      optimizer.step();
    });
  }
}

TEST_CASE(
    "what happens if one rank throws gradients away once there are several groups, and others "
    "step: all hear of it, for each group, and go on") {
  if (hvd::size() == 1) return;
  at::Tensor first = torch::zeros({4}, torch::requires_grad()),
             later = torch::zeros({4}, torch::requires_grad());
  SGD sgd({first}, 1.0);
  hvd::DistributedOptimizer optimizer(sgd);
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({later}));
  const auto backward = [&] { ((first + later) * (1.0 + hvd::rank())).sum().backward(); };
  const auto step = [&] {
    optimizer.zero_grad();
    backward();
    optimizer.step();
  };
  step();
  backward();
  if (last()) {
    optimizer.zero_grad();  // counts, once
    backward();
    CHECK(contains(error_of<hvd::Mismatch>([&] { optimizer.zero_grad(); }), "thrown its last"));
  } else {
    optimizer.step();
    CHECK(contains(error_of<hvd::Mismatch>(step), "thrown its last"));
  }
  hvd::broadcast_parameters({{"first", first}, {"later", later}}, 0);
  step();
  CHECK(torch::equal(first, later));
  CHECK(same_on_all_ranks(first));
}

}  // namespace
}  // namespace what_if_left_over
