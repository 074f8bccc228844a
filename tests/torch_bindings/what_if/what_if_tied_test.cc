// What happens if I ... : a parameter that a model, and so its optimizer, lists twice.
#include <sstream>

#include "tests/torch_bindings/tied_net.h"

namespace {

using namespace hvd::test;
using at::kDouble;
using hvd::DistributedOptimizer;
using hvd::DistributedOptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD, torch::optim::SGDOptions;

TEST_CASE(
    "what happens if I tie two weights: they are reduced once and stepped as in one process, by "
    "every optimizer, sharded too") {
  with_and_without_one_copy();
  for (const auto& kind : torch_optimizers()) {
    for (const bool shard : {false, true}) {
      for (const bool named : {true, false}) {
        CAPTURE(kind.name);
        CAPTURE(shard);
        CAPTURE(named);
        TiedNet net, alone;
        const auto wrapped = kind.make(net.parameters()), plain = kind.make(alone.parameters());
        // LibTorch lists the weight twice
        REQUIRE(wrapped->param_groups()[0].params().size() == 4);
        const auto names =
            named ? net.named_parameters() : torch::OrderedDict<std::string, at::Tensor>();
        DistributedOptimizer optimizer(
            *wrapped, names,
            {.shard_optimizer_state = shard, .share_parameters = shard && one_copy});
        for (int step = 0; step < 3; ++step) {
          const auto before = hvd::stats().tensors_submitted;
          optimizer.zero_grad();
          net.loss(hvd::rank(), step).backward();
          optimizer.synchronize();
          CHECK(hvd::stats().tensors_submitted - before == 3);
          optimizer.step();
          step_alone(alone, *plain, step);
          CHECK(furthest(net, alone) <= 1e-12);
          CHECK(equal_on_all_ranks(net));
        }
        CHECK(net.embedding->weight.is_same(net.decoder->weight));
      }
    }
  }
}

TEST_CASE(
    "what happens if I save tied weights' optimizer and load it: it goes on as if it had not "
    "stopped, sharded or not") {
  with_and_without_one_copy();
  for (const auto& kind : torch_optimizers()) {
    for (const bool shard : {false, true}) {
      CAPTURE(kind.name);
      CAPTURE(shard);
      TiedNet net;
      const auto wrapped = kind.make(net.parameters());
      DistributedOptimizer optimizer(
          *wrapped, net.named_parameters(),
          {.shard_optimizer_state = shard, .share_parameters = shard && one_copy});
      for (int step = 0; step < 2; ++step) step_together(net, optimizer, step);
      std::stringstream state;
      torch::save(optimizer, state);
      TiedNet resumed;
      {
        const torch::NoGradGuard no_gradient;
        Parameters to = resumed.parameters(), from = net.parameters();
        for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
      }
      const auto fresh = kind.make(resumed.parameters());
      DistributedOptimizer loaded(*fresh, resumed.named_parameters(),
                                  {.shard_optimizer_state = !shard});
      torch::load(loaded, state);
      hvd::broadcast_optimizer_state(loaded, hvd::size() - 1);
      for (int step = 2; step < 4; ++step) {
        step_together(net, optimizer, step);
        step_together(resumed, loaded, step);
        CHECK(furthest(net, resumed) == 0);
      }
    }
  }
}

TEST_CASE(
    "what happens if a message names a tied weight: it has all its names, the same on all ranks") {
  if (hvd::size() > 1) {
    TiedNet net(last() ? 41 : 40);
    SGD wrapped(net.parameters(), SGDOptions(0.1));
    DistributedOptimizer optimizer(wrapped, net.named_parameters());
    net.loss(hvd::rank(), 0).backward();
    const std::string text = error_of<hvd::Mismatch>([&] { optimizer.step(); });
    INFO(text);
    CHECK(contains(text, "decoder.weight = embedding.weight"));
  }
  TiedNet net;
  std::vector<OptimizerParamGroup> groups{
      OptimizerParamGroup({net.embedding->weight, net.hidden->weight}),
      OptimizerParamGroup({net.decoder->weight})};
  SGD twice(groups, SGDOptions(0.1));
  const std::string text =
      error_of<hvd::InvalidArgument>([&] { DistributedOptimizer(twice, net.named_parameters()); });
  INFO(text);
  CHECK(contains(text, "decoder.weight = embedding.weight"));
  CHECK(contains(text, "two groups"));
}

TEST_CASE(
    "what happens if I list a tied weight twice in a group of gradients, or types together: it "
    "counts once, types travel apart") {
  TiedNet net, alone;
  SGD wrapped(net.parameters(), SGDOptions(0.1).momentum(0.9)),
      plain(alone.parameters(), SGDOptions(0.1).momentum(0.9));
  DistributedOptimizer optimizer(wrapped, net.named_parameters(),
                                 {.groups = std::vector<Parameters>{net.parameters()}});
  for (int step = 0; step < 2; ++step) {
    step_together(net, optimizer, step);
    step_alone(alone, plain, step);
    CHECK(furthest(net, alone) <= 1e-12);
  }
  for (const auto& compression : {hvd::Compression::none(), hvd::Compression::bf16()}) {
    for (const bool list : {true, false}) {
      Parameters mixed;
      int variant = 0;
      for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kFloat, at::kDouble})
        mixed.push_back(data({3, 5}, type, 0, variant++).requires_grad_());
      SGD sgd(mixed, SGDOptions(0.5));
      DistributedOptimizerOptions options{.compression = compression};
      if (list)
        options.groups = std::vector<Parameters>{{mixed[4], mixed[0], mixed[2], mixed[1]}};
      else
        options.groups = 2;
      DistributedOptimizer together(sgd, {}, options);
      together.zero_grad();
      for (auto& parameter : mixed)
        (parameter.to(kDouble) * data({3, 5}, kDouble, hvd::rank())).sum().backward();
      together.synchronize();
      for (const auto& parameter : mixed) {
        const at::Tensor mean =
            reduced(all_data({3, 5}, kDouble, everyone()), hvd::ReduceOp::Average);
        CHECK(torch::allclose(parameter.grad().to(kDouble), mean, 1e-2, 1e-2));
        CHECK(same_on_all_ranks(parameter.grad()));
      }
      together.step();
    }
  }
}

/// Lists one weight under two names, and uses it as both.
struct TwoNames : torch::nn::Cloneable<TwoNames> {
  TwoNames() { reset(); }
  void reset() override {
    first = register_parameter("first", data({5, 5}, kDouble, 0, 3) * 0.3);
    second = register_parameter("second", first);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(x.mm(first)).mm(second); }
  at::Tensor first, second;
};

TEST_CASE("what happens if I split a batch over replicas of a model with tied weights") {
  for (const int replicas : {1, 2, 3}) {
    CAPTURE(replicas);
    auto net = std::make_shared<TwoNames>(), alone = std::make_shared<TwoNames>();
    REQUIRE(net->parameters().size() == 2);
    const at::Tensor x = data({6, 5}, kDouble, hvd::rank());
    hvd::data_parallel(net, x, replicas).square().sum().backward();
    alone->forward(x).square().sum().backward();
    CHECK(difference(net->first.grad(), alone->first.grad()) < 1e-12);
  }
}

TEST_CASE("what happens if I scale the loss of tied weights: their gradient is unscaled once") {
  TiedNet net, alone;
  SGD wrapped(net.parameters(), SGDOptions(0.1).momentum(0.9)),
      plain(alone.parameters(), SGDOptions(0.1).momentum(0.9));
  DistributedOptimizer optimizer(wrapped, net.named_parameters());
  hvd::GradScaler scaler({.init_scale = 8});
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    scaler.scale(net.loss(hvd::rank(), step)).backward();
    scaler.step(optimizer);
    scaler.update();
    step_alone(alone, plain, step);
    CHECK(furthest(net, alone) <= 1e-12);
  }
}

}  // namespace
