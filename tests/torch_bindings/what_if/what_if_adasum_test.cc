// What happens if I ... : DistributedOptimizer with ReduceOp::Adasum, which combines what each
// rank's own step has changed.
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#include "tests/torch_bindings/tied_net.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;
using hvd::DistributedOptimizer;
using hvd::ReduceOp;
using torch::optim::Optimizer, torch::optim::SGD, torch::optim::SGDOptions;
using LossClosure = Optimizer::LossClosure;

/// By hand, in double: pairs of neighbours, then pairs of their results; one that is left over
/// waits.
at::Tensor adasum_by_hand(Parameters vectors) {
  std::vector<double> ranks(vectors.size(), 1.0);
  while (vectors.size() > 1) {
    Parameters next;
    std::vector<double> sums;
    for (std::size_t i = 0; i + 1 < vectors.size(); i += 2) {
      const at::Tensor &a = vectors[i], &b = vectors[i + 1];
      sums.push_back(ranks[i] + ranks[i + 1]);
      const double common = a.mul(b).sum().item<double>();
      const auto share = [&](const at::Tensor& of, double weight) {
        const double square = of.square().sum().item<double>();
        return square > 0 ? 1 - weight / sums.back() * common / square : 1.0;
      };
      next.push_back(a * share(a, ranks[i]) + b * share(b, ranks[i + 1]));
    }
    if (vectors.size() % 2 == 1) {
      next.push_back(vectors.back());
      sums.push_back(ranks.back());
    }
    vectors = std::move(next);
    ranks = std::move(sums);
  }
  return vectors.front();
}

/// Every rank's net and optimizer, computed here.
struct ByHand {
  explicit ByHand(const NamedOptimizer& kind, std::vector<int> of = everyone())
      : ranks(std::move(of)) {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      nets.push_back(std::make_unique<TiedNet>());
      optimizers.push_back(kind.make(nets.back()->parameters()));
    }
  }
  void step(
      int number, int passes = 1,
      const std::function<at::Tensor(at::Tensor)>& wire = [](at::Tensor x) { return x; }) {
    std::vector<Parameters> changes;  // by parameter, by rank
    Parameters start;
    for (const auto& parameter : once(nets.front()->parameters()))
      start.push_back(parameter.detach().clone());
    changes.resize(start.size());
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      nets[i]->zero_grad();
      for (int pass = 0; pass < passes; ++pass)
        nets[i]->loss(ranks[i], number * passes + pass).backward();
      optimizers[i]->step();
      const auto now = once(nets[i]->parameters());
      for (std::size_t p = 0; p < start.size(); ++p)
        changes[p].push_back(wire(now[p].detach() - start[p]).to(kDouble));
    }
    for (std::size_t p = 0; p < start.size(); ++p) {
      const torch::NoGradGuard no_gradient;
      const at::Tensor together = start[p] + wire(adasum_by_hand(changes[p])).to(kDouble);
      for (auto& net : nets) once(net->parameters())[p].copy_(together);
    }
  }
  std::vector<int> ranks;
  std::vector<std::unique_ptr<TiedNet>> nets;
  std::vector<std::unique_ptr<Optimizer>> optimizers;
};

void adasum_step(TiedNet& net, DistributedOptimizer& optimizer, int number, int passes = 1) {
  optimizer.zero_grad();
  for (int pass = 0; pass < passes; ++pass)
    net.loss(hvd::rank(), number * passes + pass).backward();
  optimizer.step();
}

TEST_CASE(
    "what happens if I train with Adasum: every optimizer's own steps are combined as by hand, "
    "accumulated and compressed too") {
  for (const auto& kind : torch_optimizers()) {
    for (const int passes : {1, 2}) {
      CAPTURE(kind.name);
      CAPTURE(passes);
      TiedNet net;
      const auto wrapped = kind.make(net.parameters());
      DistributedOptimizer optimizer(*wrapped, net.named_parameters(),
                                     {.op = ReduceOp::Adasum, .backward_passes_per_step = passes});
      ByHand by_hand(kind);
      for (int number = 0; number < 3; ++number) {
        adasum_step(net, optimizer, number, passes);
        by_hand.step(number, passes);
        CHECK(furthest(net, *by_hand.nets.front()) <= 1e-12);
        CHECK(equal_on_all_ranks(net));
      }
    }
  }
  if (hvd::size() == 1) return;  // nothing travels
  TiedNet net;
  const auto& kind = torch_optimizers().front();
  const auto wrapped = kind.make(net.parameters());
  DistributedOptimizer optimizer(*wrapped, net.named_parameters(),
                                 {.compression = hvd::Compression::fp16(), .op = ReduceOp::Adasum});
  ByHand by_hand(kind);
  for (int number = 0; number < 3; ++number) {
    adasum_step(net, optimizer, number);
    by_hand.step(number, 1, [](const at::Tensor& x) { return x.to(at::kHalf); });
    CHECK(furthest(net, *by_hand.nets.front()) <= 1e-4);
    CHECK(equal_on_all_ranks(net));
  }
}

TEST_CASE(
    "what happens to gradients that are orthogonal, or parallel: their steps add, or average; in "
    "several groups and types") {
  const int size = hvd::size();
  at::Tensor apart = torch::zeros({4}, kDouble).requires_grad_(),
             alike = torch::zeros({3}, kFloat).requires_grad_();
  at::Tensor rarely = torch::zeros({2}, kDouble).requires_grad_(),
             never = torch::ones({2}, kDouble).requires_grad_();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Parameters{apart, rarely, never});
  groups.emplace_back(Parameters{alike}, std::make_unique<SGDOptions>(0.5));
  SGD sgd(groups, SGDOptions(1));
  DistributedOptimizer optimizer(sgd, {}, {.op = ReduceOp::Adasum});
  optimizer.zero_grad();
  at::Tensor loss =
      apart[hvd::rank()] * (hvd::rank() + 1) + (alike * torch::tensor({1.0F, 2.0F, 3.0F})).sum();
  if (last()) loss = loss + rarely.sum();
  loss.backward();
  optimizer.synchronize();
  optimizer.step();
  for (int i = 0; i < 4; ++i)
    CHECK(apart[i].item<double>() == doctest::Approx(i < size ? -(i + 1) : 0));
  CHECK(torch::allclose(alike, torch::tensor({-0.5F, -1.0F, -1.5F})));
  CHECK(torch::allclose(rarely, torch::full({2}, -1.0, kDouble)));
  CHECK(same(never.detach(), torch::ones({2}, kDouble)));
  for (const auto& parameter : {apart, alike, rarely}) CHECK(same_on_all_ranks(parameter));
}

TEST_CASE(
    "what happens if I combine Adasum with what does not go with it: refused with words, on all "
    "ranks") {
  TiedNet net;
  SGD sgd(net.parameters(), SGDOptions(0.1));
  const auto refused = [&](hvd::DistributedOptimizerOptions options) {
    options.op = ReduceOp::Adasum;
    return error_of<hvd::InvalidArgument>(
        [&] { DistributedOptimizer(sgd, net.named_parameters(), options); });
  };
  CHECK(contains(refused({.shard_optimizer_state = true}), "shard_optimizer_state"));
  CHECK(contains(refused({.gradient_predivide_factor = 2}), "gradient_predivide_factor"));
  for (const auto& compression :
       {hvd::Compression::int8(), hvd::Compression::topk(), hvd::Compression::powersgd()})
    CHECK(contains(refused({.compression = compression}), "powersgd"));
  at::Tensor complex = torch::zeros({2}, at::kComplexDouble).requires_grad_();
  SGD of_complex({complex}, SGDOptions(0.1));
  CHECK(contains(error_of<hvd::InvalidArgument>([&] {
                   DistributedOptimizer(of_complex, {{"phase", complex}}, {.op = ReduceOp::Adasum});
                 }),
                 "phase"));
}

TEST_CASE(
    "what happens with Adasum if I clip, add parameters, use a closure, a process set, or too many "
    "passes: as without it") {
  const auto& kind = torch_optimizers().front();
  {
    TiedNet net;
    const auto wrapped = kind.make({net.hidden->weight, net.hidden->bias});
    DistributedOptimizer optimizer(*wrapped, net.named_parameters(), {.op = ReduceOp::Adasum});
    adasum_step(net, optimizer, 0);
    optimizer.add_param_group(
        torch::optim::OptimizerParamGroup({net.embedding->weight, net.decoder->weight}));
    const at::Tensor before = net.embedding->weight.detach().clone();
    net.zero_grad();
    adasum_step(net, optimizer, 1);
    CHECK(!same(net.embedding->weight.detach(), before));
    optimizer.zero_grad();
    net.loss(hvd::rank(), 2).backward();
    CHECK_THROWS_AS(net.loss(hvd::rank(), 2).backward(), hvd::InvalidArgument);
    optimizer.zero_grad();
    net.loss(hvd::rank(), 2).backward();
    optimizer.synchronize();
    torch::nn::utils::clip_grad_norm_(once(net.parameters()), 0.01);
    optimizer.step();
    optimizer.step([&] {
      optimizer.zero_grad();
      const at::Tensor loss = net.loss(hvd::rank(), 3);
      loss.backward();
      return loss;
    });
    CHECK(equal_on_all_ranks(net));
    net.to(kFloat);
    optimizer.state().clear();  // LibTorch's momentum is of the old type
    adasum_step(net, optimizer, 4);
    CHECK((net.hidden->weight.scalar_type() == kFloat));
    CHECK(equal_on_all_ranks(net));
  }
  const auto all_but_first = [] {
    std::vector<int> ranks;
    for (int r = hvd::size() > 1 ? 1 : 0; r < hvd::size(); ++r) ranks.push_back(r);
    return ranks;
  }();
  const auto set = hvd::add_process_set(all_but_first);
  TiedNet net;
  const auto wrapped = kind.make(net.parameters());
  DistributedOptimizer optimizer(*wrapped, net.named_parameters(),
                                 {.op = ReduceOp::Adasum, .process_set = set});
  ByHand by_hand(kind, set.included() ? all_but_first : std::vector<int>{hvd::rank()});
  for (int number = 0; number < 3; ++number) {
    adasum_step(net, optimizer, number);
    by_hand.step(number);
    CHECK(furthest(net, *by_hand.nets.front()) <= 1e-12);
  }
  hvd::remove_process_set(set);
}

TEST_CASE(
    "what happens with Adasum if the ranks' models differ: Mismatch on all, and the parameters are "
    "as before the step") {
  if (hvd::size() == 1) return;
  TiedNet net(last() ? 41 : 40);
  SGD sgd(net.parameters(), SGDOptions(0.1));
  DistributedOptimizer optimizer(sgd, net.named_parameters(), {.op = ReduceOp::Adasum});
  const at::Tensor before = net.hidden->weight.detach().clone();
  optimizer.zero_grad();
  net.loss(hvd::rank(), 0).backward();
  const std::string text = error_of<hvd::Mismatch>([&] { optimizer.step(); });
  INFO(text);
  CHECK(contains(text, "decoder.weight = embedding.weight"));
  CHECK(same(net.hidden->weight.detach(), before));
}

TEST_CASE("what happens if an optimizer evaluates its closure often with Adasum, also alone") {
  torch::nn::Sequential net = small_model();
  torch::optim::LBFGS lbfgs(net->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(4));
  DistributedOptimizer optimizer(lbfgs, net->named_parameters(), {.op = ReduceOp::Adasum});
  int evaluations = 0;
  for (int step = 0; step < 2; ++step) {
    optimizer.step([&] {
      ++evaluations;
      net->zero_grad();
      const at::Tensor loss = small_loss(net, hvd::rank(), step);
      loss.backward();
      return loss;
    });
    small_loss(net, hvd::rank(), step).backward();  // a pass after it is no pass too many
    optimizer.zero_grad();
  }
  CHECK(evaluations > 4);
}

TEST_CASE(
    "what happens if my optimizer's step throws with Adasum: the parameters are as before it") {
  if (hvd::size() == 1) return;  // nothing is put back
  struct Throwing : SGD {
    using SGD::SGD;
    at::Tensor step(LossClosure closure = nullptr) override {
      SGD::step(closure);
      throw std::runtime_error("out of memory");
    }
  };
  torch::nn::Sequential net = small_model();
  Throwing sgd(net->parameters(), SGDOptions(0.1));
  DistributedOptimizer optimizer(sgd, net->named_parameters(), {.op = ReduceOp::Adasum});
  const at::Tensor before = flat(net);
  small_loss(net, hvd::rank(), 0).backward();
  CHECK_THROWS_AS(optimizer.step(), std::runtime_error);
  CHECK(same(flat(net), before));
}

TEST_CASE(
    "what happens if one rank's step, or its closure, throws with Adasum: all throw, no step is "
    "made, and training goes on") {
  if (hvd::size() == 1) return;
  struct Throwing : SGD {
    using SGD::SGD;
    at::Tensor step(LossClosure closure = nullptr) override {
      const at::Tensor loss = SGD::step(std::move(closure));
      if (words) throw std::runtime_error(words);
      return loss;
    }
    const char* words = nullptr;
  };
  torch::nn::Sequential net = small_model();
  Throwing sgd(net->parameters(), SGDOptions(0.1).momentum(0.9));
  DistributedOptimizer optimizer(sgd, net->named_parameters(), {.op = ReduceOp::Adasum});
  int number = 0;
  const auto backward = [&] {
    optimizer.zero_grad();
    const at::Tensor loss = small_loss(net, hvd::rank(), number++);
    loss.backward();
    return loss;
  };
  for (const std::string words : {"out of memory", "out of data", ""}) {
    CAPTURE(words);
    const at::Tensor before = flat(net);
    if (last() && words != "out of data") sgd.words = words.c_str();
    const auto step = [&] {
      if (words == "out of memory") backward();
      optimizer.step(words == "out of memory" ? LossClosure() : LossClosure([&] {
        const at::Tensor loss = backward();
        if (last() && words == "out of data") throw std::runtime_error(words);
        return loss;
      }));
    };
    if (last()) {
      CHECK(error_of<std::runtime_error>(step) == words);
    } else {
      const std::string text = error_of<hvd::Mismatch>(step);
      CAPTURE(text);
      CHECK(contains(text, last_rank() + " has made no step: " +
                               (words.empty() ? "an exception without words" : words)));
    }
    CHECK(same(flat(net), before));
    sgd.words = nullptr;
    for (int more = 0; more < 2; ++more) {
      backward();
      optimizer.step();
    }
    CHECK(same_on_all_ranks(flat(net)));
    CHECK(!same(flat(net), before));
  }
}

TEST_CASE(
    "what happens if one rank alone steps the wrapped optimizer with Adasum: all throw, whether or "
    "not replicas are compared") {
  if (hvd::size() == 1) return;
  for (const bool compared : {true, false}) {
    CAPTURE(compared);
    hvd::Config config = hvd::Config::from_environment();
    config.replica_guard = compared ? hvd::ReplicaGuard::Slice : hvd::ReplicaGuard::Off;
    const Restarted world(config);
    torch::nn::Sequential net = small_model();
    SGD sgd(net->parameters(), SGDOptions(0.1).momentum(0.9));
    DistributedOptimizer optimizer(sgd, net->named_parameters(), {.op = ReduceOp::Adasum});
    optimizer.zero_grad();
    small_loss(net, hvd::rank(), 0).backward();
    if (last()) sgd.step();
    const auto step = [&] { optimizer.step(); };
    const std::string text =
        last() ? error_of<hvd::InvalidArgument>(step) : error_of<hvd::Mismatch>(step);
    CAPTURE(text);
    CHECK(contains(text, !last() && compared
                             ? "parameters are not equal"
                             : "step() of the optimizer that a DistributedOptimizer is around"));
    hvd::broadcast_parameters(*net, 0);
    optimizer.zero_grad();
    small_loss(net, hvd::rank(), 1).backward();
    optimizer.step();
    CHECK(same_on_all_ranks(flat(net)));
  }
}

TEST_CASE(
    "what happens with Adasum if a parameter has another shape on one rank, and nobody compares "
    "replicas: Mismatch on all, and no step") {
  if (hvd::size() == 1) return;
  hvd::Config unguarded = hvd::Config::from_environment();
  unguarded.replica_guard = hvd::ReplicaGuard::Off;
  const Restarted world(unguarded);
  at::Tensor weight = torch::ones({last() ? 4 : 3}, torch::requires_grad());
  SGD sgd({weight}, SGDOptions(1));
  DistributedOptimizer optimizer(sgd, {}, {.op = ReduceOp::Adasum});
  weight.sum().backward();
  CHECK_THROWS_AS(optimizer.step(), hvd::Mismatch);
  CHECK(torch::equal(weight.detach(), torch::ones_like(weight)));
}

TEST_CASE(
    "what happens to my own hook on a parameter with Adasum, set before or after wrapping: it is "
    "called, first, passes are counted, and it is there afterwards") {
  struct Halves : torch::autograd::PostAccumulateGradHook {
    explicit Halves(int& count) : count_(count) {}
    void operator()(const at::Tensor& parameter) override {
      ++count_;
      const torch::NoGradGuard no_gradient;
      parameter.mutable_grad().mul_(0.5);
    }
    int& count_;
  };
  for (const bool after_wrapping : {false, true}) {
    CAPTURE(after_wrapping);
    torch::nn::Sequential net = small_model(), plain = small_model();
    int calls = 0;
    const auto set_hooks = [&] {
      for (auto& parameter : net->parameters())
        torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Halves>(calls));
    };
    if (!after_wrapping) set_hooks();
    SGD sgd(net->parameters(), 0.1), half(plain->parameters(), 0.05);
    {
      DistributedOptimizer optimizer(sgd, net->named_parameters(), {.op = ReduceOp::Adasum});
      DistributedOptimizer reference(half, plain->named_parameters(), {.op = ReduceOp::Adasum});
      if (after_wrapping) set_hooks();  // in the place of the wrapper's
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        reference.zero_grad();
        small_loss(net, hvd::rank(), step).backward();
        small_loss(plain, hvd::rank(), step).backward();
        CHECK(calls == 4 * (step + 1));
        optimizer.step();
        reference.step();
        CHECK(difference(flat(net), flat(plain)) < 1e-14);
      }
      small_loss(net, hvd::rank(), 2).backward();
      CHECK(contains(
          error_of<hvd::InvalidArgument>([&] { small_loss(net, hvd::rank(), 2).backward(); }),
          "more than 1 backward passes"));
    }
    calls = 0;
    net->zero_grad();
    small_loss(net, hvd::rank(), 3).backward();
    CHECK(calls == 4);
  }
}

TEST_CASE(
    "what happens if I raise backward_passes_per_step with Adasum: a step takes as many passes") {
  at::Tensor weight = torch::zeros({3}, torch::requires_grad());
  SGD sgd({weight}, SGDOptions(1));
  DistributedOptimizer optimizer(sgd, {}, {.op = ReduceOp::Adasum});
  optimizer.set_backward_passes_per_step(2);
  for (int pass = 0; pass < 2; ++pass) weight.sum().backward();
  optimizer.step();
  CHECK(torch::allclose(weight.detach(), torch::full({3}, -2.0)));
}

}  // namespace
