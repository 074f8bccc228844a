// What happens if I ... : gradients, hooks, passes. Clipping is in what_if_clipping_test.cc.
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/torch_bindings/support.h"
#include "torch_bindings/reducer/reducer.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;
using hvd::DistributedOptimizer;
using hvd::DistributedOptimizerOptions;
using hvd::ReduceOp;
using torch::nn::Linear;
using torch::nn::Sequential;
using torch::optim::SGD;
using torch::optim::SGDOptions;

/// The gradients that `give(rank)` leaves in a model of this kind, of every rank, one after the
/// other.
using Give = std::function<void(Sequential&, int)>;
std::vector<at::Tensor> gradients_of_all(const Give& give, at::ScalarType type = kDouble) {
  std::vector<at::Tensor> all;
  for (const int rank : everyone()) {
    Sequential net = small_model(type);
    give(net, rank);
    std::vector<at::Tensor> parts;
    for (const auto& parameter : net->parameters())
      parts.push_back((parameter.grad().defined() ? parameter.grad() : torch::zeros_like(parameter))
                          .reshape({-1}));
    all.push_back(torch::cat(parts));
  }
  return all;
}
at::Tensor gradients(const Sequential& net) {
  std::vector<at::Tensor> parts;
  for (const auto& parameter : net->parameters())
    parts.push_back(parameter.grad().detach().reshape({-1}));
  return torch::cat(parts);
}
void backward(Sequential& net, int rank, int step) { small_loss(net, rank, step).backward(); }

/// A model with its wrapped optimizer.
struct Wrapped {
  Sequential net;
  SGD plain;
  DistributedOptimizer optimizer;
  explicit Wrapped(const DistributedOptimizerOptions& options = {}, Sequential of = small_model())
      : net(of),
        plain(net->parameters(), SGDOptions(0.1)),
        optimizer(plain, net->named_parameters(), options) {}
};

// ------------------------------------------------------------------------------ passes that change

TEST_CASE(
    "what happens if I raise the passes of a step when its gradients have left: the next pass is "
    "refused, the next step has them") {
  for (const bool views : {true, false}) {
    CAPTURE(views);
    Wrapped it({.gradients_are_views = views});
    backward(it.net, hvd::rank(), 0);
    it.optimizer.set_backward_passes_per_step(2);
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { backward(it.net, hvd::rank(), 1); }),
                   "more than 1 backward passes without step()"));
    it.optimizer.zero_grad();
    for (int pass = 0; pass < 2; ++pass) backward(it.net, hvd::rank(), pass);
    it.optimizer.synchronize();
    const auto all = gradients_of_all([](Sequential& net, int rank) {
      for (int pass = 0; pass < 2; ++pass) backward(net, rank, pass);
    });
    CHECK(difference(gradients(it.net), reduced(all, ReduceOp::Average)) < 1e-12);
    it.optimizer.step();
    CHECK(same_on_all_ranks(flat(it.net)));
  }
}

TEST_CASE(
    "what happens if I make a backward pass too many: it is refused; the passes before it count, "
    "and zero_grad() throws them away") {
  const std::vector<DistributedOptimizerOptions> kinds{
      {},
      {.op = ReduceOp::Sum},
      {.backward_passes_per_step = 2},
      {.gradients_are_views = false},
      {.compression = hvd::Compression::topk(0.5)},
      {.shard_optimizer_state = true},
      {.shard_gradients = true},
      {.backward_passes_per_step = 2, .shard_gradients = true},
      {.share_parameters = true},
      {.op = ReduceOp::Adasum}};
  for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
    CAPTURE(kind);
    const int passes = kinds[kind].backward_passes_per_step;
    Wrapped it(kinds[kind]), plain(kinds[kind]);
    for (int step = 0; step < 4; ++step) {
      CAPTURE(step);
      const auto all_passes = [&](Wrapped& of) {
        for (int pass = 0; pass < passes; ++pass) backward(of.net, hvd::rank(), 10 * step + pass);
      };
      plain.optimizer.zero_grad();
      all_passes(plain);
      plain.optimizer.step();

      it.optimizer.zero_grad();
      all_passes(it);
      // Who asks for gradients adds none.
      CHECK(torch::autograd::grad({small_loss(it.net, hvd::rank(), 0)}, it.net->parameters())
                .size() == it.net->parameters().size());
      const std::string text =
          error_of<hvd::InvalidArgument>([&] { backward(it.net, hvd::rank(), 77); });
      CHECK(contains(text,
                     "more than " + std::to_string(passes) + " backward passes without step()"));
      if (step == 1) {
        it.optimizer.zero_grad();
        all_passes(it);
      } else if (step == 2) {  // it has added nothing, so that the module's is recognised
        it.net->zero_grad();
        all_passes(it);
      }
      it.optimizer.step();
      CHECK(same(flat(it.net), flat(plain.net)));
      CHECK(same_on_all_ranks(flat(it.net)));
    }
  }
}

TEST_CASE(
    "what happens if backward comes after synchronize() where gradients are in shares: it is "
    "refused, and step() has what was there") {
  Wrapped it({.shard_gradients = true}), plain({.shard_gradients = true});
  for (int step = 0; step < 2; ++step) {
    for (Wrapped* const one : {&plain, &it}) {
      one->optimizer.zero_grad();
      backward(one->net, hvd::rank(), step);
      one->optimizer.synchronize();
      if (one == &it && hvd::size() > 1)
        CHECK(contains(error_of<hvd::InvalidArgument>([&] { backward(it.net, hvd::rank(), 5); }),
                       "in shares already"));
      one->optimizer.step();
    }
    CHECK(same(flat(it.net), flat(plain.net)));
  }
}

// ----------------------------------------------------------------------------- synchronize() twice

TEST_CASE("what happens if I call synchronize() twice: it reduces once") {
  for (const auto op : {ReduceOp::Average, ReduceOp::Sum}) {
    for (const auto& compression :
         {hvd::Compression::none(), hvd::Compression::bf16(), hvd::Compression::int8()}) {
      Wrapped it({.compression = compression, .op = op});
      const at::Tensor start = flat(it.net);
      backward(it.net, hvd::rank(), 0);
      it.optimizer.synchronize();
      const auto before = hvd::stats();
      const at::Tensor once = gradients(it.net);
      if (compression == hvd::Compression::none())
        CHECK(difference(once, reduced(gradients_of_all(
                                           [](auto& net, int rank) { backward(net, rank, 0); }),
                                       op)) < 1e-12);
      it.optimizer.synchronize();
      it.optimizer.synchronize();
      CHECK(same(gradients(it.net), once));
      it.optimizer.step();
      CHECK(hvd::stats().tensors_submitted == before.tensors_submitted);
      CHECK(difference(flat(it.net), start - 0.1 * once) < 1e-12);
      CHECK(same_on_all_ranks(flat(it.net)));
    }
  }
}

TEST_CASE(
    "what happens if I call backward() between two synchronize(): what it adds is reduced, with "
    "Sum too") {
  for (const auto op : {ReduceOp::Average, ReduceOp::Sum}) {
    Wrapped it({.op = op, .groups = 2});
    for (int step = 0; step < 3; ++step) {
      backward(it.net, hvd::rank(), step);
      it.optimizer.synchronize();
      it.net->parameters()[0].mutable_grad().mul_(1);  // a change that is the same on all ranks
      // The second pass does not reach the first layer.
      const at::Tensor hidden = data({5, 8}, kDouble, hvd::rank(), step);
      it.net[2]->as<Linear>()->forward(hidden).square().mean().backward();
      it.optimizer.synchronize();
      it.optimizer.synchronize();
      const auto all = gradients_of_all([&](Sequential& net, int rank) {
        net = small_model();
        const torch::NoGradGuard no_gradient;
        for (std::size_t i = 0; i < 4; ++i) net->parameters()[i].copy_(it.net->parameters()[i]);
        const torch::AutoGradMode with_gradient(true);
        backward(net, rank, step);
        net[2]->as<Linear>()->forward(data({5, 8}, kDouble, rank, step)).square().mean().backward();
      });
      CHECK(difference(gradients(it.net), reduced(all, op)) < 1e-11);
      CHECK(same_on_all_ranks(gradients(it.net)));
      it.optimizer.step();
      it.optimizer.zero_grad(step % 2 == 0);
    }
  }
}

TEST_CASE(
    "what happens if I never zero gradients: they add up over the steps as in one process, with "
    "Sum too") {
  for (const auto op : {ReduceOp::Average, ReduceOp::Sum}) {
    Wrapped it({.op = op});
    Sequential alone = small_model();
    SGD plain(alone->parameters(), SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      backward(it.net, hvd::rank(), step);
      it.optimizer.step();
      at::Tensor sum = torch::zeros({}, kDouble);
      for (const int rank : everyone()) sum = sum + small_loss(alone, rank, step);
      (op == ReduceOp::Average ? sum / hvd::size() : sum).backward();
      plain.step();
      CHECK(difference(flat(it.net), flat(alone)) < 1e-11);
      CHECK(same_on_all_ranks(flat(it.net)));
    }
  }
}

TEST_CASE(
    "what happens if I put a gradient there by hand after synchronize(): the next synchronize() "
    "reduces it") {
  for (const auto op : {ReduceOp::Average, ReduceOp::Sum}) {
    Wrapped it({.op = op});
    for (int round = 0; round < 3; ++round) {
      std::vector<at::Tensor> expected;
      for (auto& parameter : it.net->parameters()) {
        parameter.mutable_grad() = data(parameter.sizes(), kDouble, hvd::rank(), round);
        expected.push_back(
            reduced(all_data(parameter.sizes(), kDouble, everyone(), round), op).reshape({-1}));
      }
      it.optimizer.synchronize();
      CHECK(difference(gradients(it.net), torch::cat(expected)) < 1e-13);
    }
  }
}

TEST_CASE(
    "what happens if a closure synchronizes and clips by itself: every evaluation is reduced "
    "once") {
  for (const bool lbfgs : {false, true}) {
    const auto run = [&](bool by_itself) {
      Sequential net = small_model();
      std::unique_ptr<torch::optim::Optimizer> plain;
      if (lbfgs)
        plain = std::make_unique<torch::optim::LBFGS>(net->parameters(),
                                                      torch::optim::LBFGSOptions(0.01).max_iter(4));
      if (!lbfgs) plain = std::make_unique<SGD>(net->parameters(), SGDOptions(0.1));
      DistributedOptimizer optimizer(*plain, net->named_parameters(), {.op = ReduceOp::Sum});
      for (int step = 0; step < 2; ++step) {
        optimizer.step([&] {
          optimizer.zero_grad();
          const at::Tensor loss = small_loss(net, hvd::rank(), step);
          loss.backward();
          if (by_itself) optimizer.synchronize();
          return loss;
        });
      }
      return flat(net);
    };
    CHECK(same(run(true), run(false)));
  }
}

TEST_CASE(
    "what happens if only some ranks call backward() again after synchronize(): Mismatch on all, "
    "and not each other's gradients") {
  if (hvd::size() == 1) return;
  Wrapped it;
  backward(it.net, hvd::rank(), 0);
  it.optimizer.synchronize();
  const std::string text = error_of<hvd::Mismatch>([&] {
    if (last()) backward(it.net, hvd::rank(), 1);
    it.optimizer.step();
    it.optimizer.zero_grad();
    backward(it.net, hvd::rank(), 2);
    it.optimizer.step();
  });
  INFO(text);
  CHECK(contains(text, "(no error)") == false);
  CHECK(contains(text, "(another error)") == false);
  CHECK(contains(text, last_rank() + " has reduced gradients since its last step()"));
  hvd::broadcast_parameters(*it.net, 0);  // some have made a step more
  it.optimizer.zero_grad();
  backward(it.net, hvd::rank(), 3);
  it.optimizer.step();
}

// -------------------------------------------------------------------------------- the user's hooks

struct Counting : torch::autograd::PostAccumulateGradHook {
  explicit Counting(int& calls) : count(calls) {}
  void operator()(const at::Tensor& parameter) override {
    ++count;
    if (parameter.grad().defined()) parameter.mutable_grad().mul_(2);
  }
  int& count;
};
void set_hook(const at::Tensor& parameter, int& calls) {
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Counting>(calls));
}
bool has_own_hook(const at::Tensor& parameter) {
  return dynamic_cast<Counting*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get()) !=
         nullptr;
}

TEST_CASE(
    "what happens if a parameter has a hook of my own: it is called before the reduction, and is "
    "there again afterwards") {
  Sequential net = small_model();
  const at::Tensor weight = net->parameters()[0];
  const at::Tensor expected =
      2 * reduced(gradients_of_all([](auto& one, int rank) { backward(one, rank, 0); }),
                  ReduceOp::Average)
              .slice(0, 0, weight.numel());
  SGD plain(net->parameters(), SGDOptions(0));
  for (const bool first_ends_first : {true, false}) {
    int calls = 0;
    set_hook(weight, calls);
    const auto one_pass = [&](DistributedOptimizer& optimizer) {
      const int before = calls;
      const auto submitted = hvd::stats().tensors_submitted;
      net->zero_grad();
      backward(net, hvd::rank(), 0);
      CHECK(hvd::stats().tensors_submitted - submitted == 4);  // by one wrapper, during backward
      optimizer.step();
      CHECK(calls == before + 1);
      CHECK(difference(weight.grad().reshape({-1}), expected) < 1e-12);
    };
    auto first = std::make_unique<DistributedOptimizer>(plain, net->named_parameters());
    one_pass(*first);
    auto second = std::make_unique<DistributedOptimizer>(plain, net->named_parameters());
    one_pass(*second);
    (first_ends_first ? first : second).reset();
    one_pass(first_ends_first ? *second : *first);
    first.reset();
    second.reset();
    CHECK(has_own_hook(weight));
    CHECK(torch::autograd::impl::post_acc_grad_hooks(net->parameters()[1]) == nullptr);
    net->zero_grad();
    backward(net, hvd::rank(), 0);
    CHECK(calls == 4);
    torch::autograd::impl::set_post_acc_grad_hooks(weight, nullptr);
  }
}

TEST_CASE(
    "what happens if I set a hook of my own after wrapping: gradients are right, and leave early "
    "again from the next step on") {
  Wrapped it;
  int calls = 0;
  set_hook(it.net->parameters()[0], calls);
  for (int step = 0; step < 3; ++step) {
    it.optimizer.zero_grad();
    const auto before = hvd::stats().tensors_submitted;
    backward(it.net, hvd::rank(), step);
    CHECK(hvd::stats().tensors_submitted - before == (step == 0 ? 0 : 4));
    it.optimizer.step();
    CHECK(calls == step + 1);
    CHECK(same_on_all_ranks(flat(it.net)));
  }
}

// ----------------------------------------------------------- gradients that are thrown away (GANs)

/// A generator and a critic whose gradients from the generator's pass are thrown away by `drop`.
at::Tensor train_critic(const std::function<void(Sequential&, DistributedOptimizer&)>& drop,
                        DistributedOptimizerOptions options, int passes, bool uneven = false) {
  options.backward_passes_per_step = passes;
  Wrapped critic(options);
  for (int step = 0; step < 4; ++step) {
    // The generator's pass. Uneven: it does not reach all of the critic on all ranks.
    const bool part = uneven && hvd::rank() % 2 == 1;
    for (int pass = 0; pass < passes; ++pass) {
      if (part) critic.net[2]->as<Linear>()->forward(torch::ones({2, 8}, kDouble)).sum().backward();
      if (!part) backward(critic.net, hvd::rank(), 90 + step);
    }
    drop(critic.net, critic.optimizer);
    for (int pass = 0; pass < passes; ++pass)
      backward(critic.net, hvd::rank(), step * passes + pass);
    critic.optimizer.step();
    drop(critic.net, critic.optimizer);
    CHECK(same_on_all_ranks(flat(critic.net)));
  }
  return flat(critic.net);
}

TEST_CASE(
    "what happens if I throw gradients away by the module's zero_grad(), as GANs do: a new count "
    "begins") {
  const std::vector<DistributedOptimizerOptions> kinds{
      {.groups = 2},
      {.compression = hvd::Compression::int8()},
      {.compression = hvd::Compression::topk(0.3)},
      {.compression = hvd::Compression::powersgd(1)},
      {.op = ReduceOp::Adasum}};
  for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
    for (const int passes : {1, 2}) {
      for (const bool uneven : {false, true}) {
        CAPTURE(kind);
        CAPTURE(passes);
        CAPTURE(uneven);
        const auto train = [&](const auto& drop) {
          return train_critic(drop, kinds[kind], passes, uneven);
        };
        const at::Tensor expected = train([](auto&, auto& optimizer) { optimizer.zero_grad(); });
        CHECK(same(train([](auto& net, auto&) { net->zero_grad(); }), expected));
        if (kinds[kind].op == ReduceOp::Adasum) continue;  // which sees gradients dropped alone
        const auto by_hand = [](auto& net, auto&) {
          for (auto& parameter : net->parameters())
            parameter.mutable_grad() = torch::zeros_like(parameter);
        };
        CHECK(same(train(by_hand), expected));
      }
    }
  }
}

TEST_CASE(
    "what happens if I throw gradients away in the middle of backward_passes_per_step: a new count "
    "begins") {
  Wrapped it({.backward_passes_per_step = 2});
  for (int step = 0; step < 3; ++step) {
    backward(it.net, hvd::rank(), 50 + step);
    it.net->zero_grad();
    const auto both = [step](auto& net, int rank) {
      backward(net, rank, 2 * step);
      backward(net, rank, 2 * step + 1);
    };
    both(it.net, hvd::rank());
    it.optimizer.synchronize();
    std::vector<at::Tensor> all;
    for (const int rank : everyone()) {
      Sequential other = small_model();
      {
        const torch::NoGradGuard no_gradient;
        for (std::size_t i = 0; i < other->parameters().size(); ++i)
          other->parameters()[i].copy_(it.net->parameters()[i]);
      }
      both(other, rank);
      all.push_back(gradients(other));
    }
    CHECK(difference(gradients(it.net), reduced(all, ReduceOp::Average)) < 1e-12);
    it.optimizer.step();
    it.optimizer.zero_grad();
  }
}

TEST_CASE(
    "what happens if the module's zero_grad(false) zeroes gradients that are on their way: the "
    "error names the optimizer's") {
  Wrapped it;
  backward(it.net, hvd::rank(), 0);
  it.net->zero_grad(false);
  const std::string in_backward =
      error_of<hvd::InvalidArgument>([&] { backward(it.net, hvd::rank(), 1); });
  CHECK(contains(in_backward, "the optimizer's zero_grad()"));
  it.optimizer.zero_grad();
  if (hvd::size() > 1) {
    backward(it.net, hvd::rank(), 0);
    it.net->zero_grad(false);
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { it.optimizer.step(); }),
                   "the optimizer's zero_grad()"));
    it.optimizer.zero_grad();
  }
  backward(it.net, hvd::rank(), 2);
  it.optimizer.step();
  const auto all = gradients_of_all([](auto& net, int rank) { backward(net, rank, 2); });
  CHECK(difference(gradients(it.net), reduced(all, ReduceOp::Average)) < 1e-12);
}

TEST_CASE("what happens if I throw all gradients away and step: nothing is stepped, on any rank") {
  Wrapped it;
  const at::Tensor start = flat(it.net);
  for (int step = 0; step < 3; ++step) {
    backward(it.net, hvd::rank(), step);
    it.net->zero_grad();
    it.optimizer.step();
    CHECK(same(flat(it.net), start));
    CHECK(!it.net->parameters()[0].grad().defined());
  }
}

TEST_CASE(
    "what happens if I throw gradients away before their bucket is complete: the next ones are "
    "reduced once, on a GPU too") {
  using hvd::GradientReducer;
  int number = 0;
  for (const auto taking : {GradientReducer::Taking::ByDevice, GradientReducer::Taking::Together}) {
    for (const auto& compression : {hvd::Compression::none(), hvd::Compression::bf16()}) {
      const at::Tensor used = torch::ones({4}, torch::requires_grad()),
                       unused = torch::ones({4}, torch::requires_grad());
      const auto reducer = std::make_shared<GradientReducer>(
          std::vector<GradientReducer::Named>{{"used", used}, {"unused", unused}},
          DistributedOptimizerOptions{.compression = compression, .op = ReduceOp::Sum}, number++,
          "thrown", taking);
      reducer->hook();
      const float ranks = static_cast<float>(hvd::size());
      for (int step = 0; step < 3; ++step) {
        (used * 3).sum().backward();
        used.mutable_grad().reset();
        (used * (hvd::rank() + 1)).sum().backward();
        reducer->synchronize();
        CHECK(same(used.grad(), torch::full({4}, ranks * (ranks + 1) / 2)));
        CHECK(!unused.grad().defined());
        reducer->settle();
        used.mutable_grad().reset();
      }
      reducer->unhook();
    }
  }
}

TEST_CASE(
    "what happens if a gradient comes late on one rank, and its own round fails: Mismatch on all, "
    "the next pass is as any") {
  using hvd::GradientReducer;
  if (hvd::size() == 1) return;
  at::Tensor first = torch::ones({4}, torch::requires_grad()),
             second = torch::ones({4}, torch::requires_grad());
  const auto reducer = std::make_shared<GradientReducer>(
      std::vector<GradientReducer::Named>{{"first", first}, {"second", second}},
      DistributedOptimizerOptions{}, 0, "late");
  reducer->hook();
  second.set_requires_grad(false);
  first.sum().backward();
  second.set_requires_grad(true);
  if (last()) {
    second.sum().backward();  // when all of what was awaited has left
  } else {
    reducer->finish_pass();
    second.set_requires_grad(false);
    first.sum().backward();
    second.set_requires_grad(true);
  }
  CHECK_THROWS_AS(reducer->finish_pass(), hvd::Mismatch);
  for (int pass = 0; pass < 2; ++pass) {
    first.mutable_grad().reset();
    second.mutable_grad().reset();
    ((first + second) * (hvd::rank() + 1)).sum().backward();
    reducer->finish_pass();
    CHECK(same(second.grad(), torch::full({4}, (static_cast<float>(hvd::size()) + 1) / 2)));
  }
  reducer->unhook();
}

TEST_CASE(
    "what happens if one rank alone throws its gradients away by the module's zero_grad(): "
    "Mismatch on all") {
  if (hvd::size() == 1) return;
  Wrapped it;
  const std::string text = error_of<hvd::Mismatch>([&] {
    backward(it.net, hvd::rank(), 0);
    if (last()) it.net->zero_grad();
    it.optimizer.step();
    it.optimizer.zero_grad();
    backward(it.net, hvd::rank(), 1);
    it.optimizer.step();
  });
  INFO(text);
  CHECK(contains(text, last_rank() + " has "));
  hvd::broadcast_parameters(*it.net, 0);
  it.optimizer.zero_grad();
  backward(it.net, hvd::rank(), 2);
  it.optimizer.step();
}

}  // namespace
