// Buffers of a DistributedDataParallel: by name, and large ones only where they have changed.
#include <algorithm>
#include <memory>
#include <string>

#include "tests/torch_bindings/norm_net.h"

namespace shared_buffers {
namespace {

using namespace hvd::test;
using namespace hvd::test::norm_net;
using hvd::DistributedDataParallel;

/// A model with a mask, tables and statistics of its own.
struct WithBuffers : torch::nn::Module {
  explicit WithBuffers(bool other_order = false, std::int64_t side = 512) {
    layer = register_module("layer", Linear(6, 3));
    to(kDouble);
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : parameters()) parameter.copy_(data(parameter.sizes(), kDouble, 0) * 0.3);
    const auto table = [&](const char* name, double value) {
      return register_buffer(name, torch::full({side, side}, value, kFloat));
    };
    if (other_order) {
      sine = table("sine", 2);
      cosine = table("cosine", 1);
    } else {
      cosine = table("cosine", 1);
      sine = table("sine", 2);
    }
    mean = register_buffer("running_mean", torch::full({128, 128}, 3, kFloat));  // large, too
    seen = register_buffer("seen", torch::zeros({}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen += 1;
    return layer(x) * (cosine[0][0] / cosine[0][0]).to(kDouble);
  }
  Linear layer{nullptr};
  at::Tensor cosine, sine, mean, seen;
};
using OfBuffers = DistributedDataParallel<WithBuffers>;
void pass(OfBuffers& ddp, int step) { loss(ddp, hvd::rank(), step).backward(); }
double value(const at::Tensor& table, std::int64_t row = 0) { return table[row][0].item<double>(); }

TEST_CASE(
    "what happens if a model has large constant buffers: they stay where they are, and others, as "
    "large statistics, travel as ever") {
  hvd::Config unguarded = hvd::Config::from_environment();
  unguarded.replica_guard = hvd::ReplicaGuard::Off;  // which would tell of what is done here
  const Restarted world(unguarded);
  const auto net = std::make_shared<WithBuffers>();
  OfBuffers ddp(net);
  const auto of_last = [&](at::Tensor& table) {
    return static_cast<float*>(table.mutable_data_ptr());
  };
  if (last() && hvd::size() > 1) {
    // which no version counter sees: it shows whether the root's comes
    of_last(net->cosine)[0] = of_last(net->mean)[0] = 9;
    net->seen.fill_(77);
  }
  for (int step = 0; step < 3; ++step) {
    pass(ddp, step);
    CHECK(net->seen.item<std::int64_t>() == step + 1);
  }
  CHECK(value(net->mean) == 3);
  CHECK(value(net->cosine) == (last() && hvd::size() > 1 ? 9 : 1));
  of_last(net->cosine)[0] = 1;
}

TEST_CASE(
    "what happens if a large buffer is changed: all get the first rank's, whoever changed it") {
  const auto net = std::make_shared<WithBuffers>();
  OfBuffers ddp(net);
  pass(ddp, 0);
  net->cosine.mul_(hvd::rank() + 3);  // on all ranks
  pass(ddp, 1);
  CHECK(value(net->cosine) == 3);
  if (hvd::rank() == 0) net->sine.fill_(5);
  pass(ddp, 2);
  CHECK(value(net->sine) == 5);
  if (last()) net->sine[1].fill_(8);  // on the last rank alone, whose change is not the first one's
  pass(ddp, 3);
  CHECK(value(net->sine, 1) == (hvd::size() == 1 ? 8 : 5));
  net->cosine.set_data(torch::full({512, 512}, hvd::rank() + 20.0, kFloat));  // other memory
  pass(ddp, 4);
  CHECK(value(net->cosine) == 20);
  net->cosine.set_data(net->cosine.t());
  net->cosine[1].fill_(hvd::rank() + 2);
  pass(ddp, 5);
  CHECK(value(net->cosine, 1) == 2);
  CHECK(is_same_on_all_ranks(*net));
  ddp.to(kFloat);
  ddp.to(kDouble);
  pass(ddp, 6);
  CHECK(net->cosine[3][3].item<double>() == 20);
  CHECK(is_same_on_all_ranks(*net));
}

TEST_CASE(
    "what happens if ranks register buffers in another order: each goes to the one of its name") {
  const bool other = last() && hvd::size() > 1;
  for (const std::int64_t side : {3, 512}) {  // such as always travel, and such as do not
    const auto net = std::make_shared<WithBuffers>(other, side);
    OfBuffers ddp(net);
    for (int step = 0; step < 2; ++step) {
      net->cosine.fill_(10 + step);
      net->sine.fill_(20 + step);
      pass(ddp, step);
      CHECK(value(net->cosine) == 10 + step);
      CHECK(value(net->sine) == 20 + step);
    }
    ddp.eval();
    CHECK(value(net->cosine) == 11);
  }
}

TEST_CASE(
    "what happens if one rank has a buffer more, or one of another name or shape: a Mismatch on "
    "all that names it") {
  if (hvd::size() == 1) return;
  const auto net = std::make_shared<WithBuffers>(false, 3);
  OfBuffers ddp(net);
  pass(ddp, 0);
  net->register_buffer(last() ? "phase" : "delay", torch::zeros({3}, kDouble));
  const std::string text = error_of<hvd::Mismatch>([&] { pass(ddp, 1); });
  CAPTURE(text);
  CHECK(contains(text, "'phase'"));
  CHECK(contains(text, "'delay'"));
  net->register_buffer(last() ? "delay" : "phase", torch::zeros({3}, kDouble));
  pass(ddp, 2);
  CHECK(is_same_on_all_ranks(*net));
  if (last()) net->cosine.set_data(torch::zeros({9}, kFloat));
  const std::string shape = error_of<hvd::Mismatch>([&] { pass(ddp, 3); });
  CAPTURE(shape);
  CHECK(contains(shape, "'cosine' is float32 [9]"));
  net->cosine.set_data(torch::zeros({9}, kFloat));
}

TEST_CASE(
    "what happens to a buffer whose elements share memory: all get the first rank's, small or "
    "large, and with uneven batches") {
  struct Expanded : torch::nn::Module {
    Expanded() {
      layer = register_module("layer", Linear(6, 3));
      layer->to(kDouble);
      const torch::NoGradGuard no_gradient;
      for (auto& parameter : parameters())
        parameter.copy_(data(parameter.sizes(), kDouble, 0) * 0.3);
      few = torch::full({3, 1}, hvd::rank(), kDouble);
      one = torch::full({1, 1}, hvd::rank(), kFloat);
      register_buffer("few", few.expand({3, 4}));
      register_buffer("many", one.expand({256, 256}));
    }
    at::Tensor forward(const at::Tensor& x) { return layer(x); }
    Linear layer{nullptr};
    at::Tensor few, one;
  };
  const auto net = std::make_shared<Expanded>();
  DistributedDataParallel<Expanded> ddp(net);
  const auto pass = [&](int step) {
    loss(ddp, hvd::rank(), step).backward();
    CHECK(same(net->few, torch::full({3, 1}, step, kDouble)));
    CHECK(same(net->one, torch::full({1, 1}, step, kFloat)));
    net->few.fill_(hvd::rank() + step + 1);
    net->one.fill_(hvd::rank() + step + 1);
  };
  for (int step = 0; step < 3; ++step) pass(step);
  auto guard = ddp.join();
  for (int step = 3; step < 5; ++step) pass(step);
}

TEST_CASE(
    "what happens to large buffers with uneven batches: ranks that still train share what has "
    "changed") {
  const auto net = std::make_shared<WithBuffers>();
  OfBuffers ddp(net);
  {
    auto guard = ddp.join();
    for (int step = 0; step < 2 + hvd::rank(); ++step) {
      net->sine.fill_(10 * step + hvd::rank());
      const at::Tensor output = ddp.forward(input(hvd::rank(), step));
      // The first rank that still trains: they end in the order of their numbers.
      CHECK(value(net->sine) == 10 * step + std::max(0, step - 1));
      torch::mse_loss(output, target(hvd::rank(), step)).backward();
    }
  }
  CHECK(is_same_on_all_ranks(*net));
}

/// Multiplies by a mask and a scale that it makes of a batch, if it is told to.
struct Scaling : torch::nn::Module {
  Scaling(std::int64_t width, bool has_gaps) {
    layer = register_module("layer", Linear(6, width));
    to(kDouble);
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : parameters()) parameter.copy_(data(parameter.sizes(), kDouble, 0) * 0.3);
    scale = register_buffer("scale", torch::ones({width, has_gaps ? 2 : 1}, kDouble).select(1, 0));
    mask = register_buffer("mask", torch::arange(width).remainder(3).to(kDouble));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (writes) {
      const torch::NoGradGuard no_gradient;
      scale.fill_(x.abs().mean() + 1);
    }
    return layer(x) * scale * mask;
  }
  Linear layer{nullptr};
  at::Tensor scale, mask;
  bool writes = true;
};

TEST_CASE(
    "what happens if a graph needs a buffer that has become the first rank's since: it is as one "
    "process where all have had the same, and else no rank gets a gradient") {
  for (const std::int64_t width : {6, 8192}) {  // of a buffer that always travels, and a large one
    for (const int variant : {0, 1, 2, 3}) {
      const bool has_gaps = variant % 2 == 1, retains = variant > 1;
      const auto net = std::make_shared<Scaling>(width, has_gaps);
      const auto alone = std::make_shared<Scaling>(width, has_gaps);
      DistributedDataParallel<Scaling> ddp(net);
      // through one graph twice, or through two at once, of which the first has written the scale
      const auto passes = [&](auto& module, int rank) {
        net->writes = alone->writes = true;
        const at::Tensor one = module.forward(input(rank, 0));
        net->writes = alone->writes = false;
        if (retains) one.sum().backward({}, /*retain_graph=*/true);
        (retains ? one.square() : one * module.forward(input(rank, 0))).sum().backward();
      };
      passes(ddp, 0);
      passes(*alone, 0);
      CHECK(difference(net->layer->weight.grad(), alone->layer->weight.grad()) < 1e-9);
      net->zero_grad();
      const std::string text = error_of<std::runtime_error>([&] { passes(ddp, hvd::rank()); });
      CAPTURE(text);
      if (hvd::size() > 1)
        CHECK(contains(text, hvd::rank() == 0 ? "has left a backward pass by an exception"
                                              : "modified by an inplace operation"));
      net->zero_grad();
      alone->zero_grad();
      ddp.forward(input(hvd::rank(), 1)).sum().backward();
      alone->scale.copy_(net->scale);
      for (const int rank : everyone())
        (alone->forward(input(rank, 1)).sum() / hvd::size()).backward();
      CHECK(difference(net->layer->weight.grad(), alone->layer->weight.grad()) < 1e-9);
    }
  }
}

/// Normalizes with statistics that have names of their own.
struct OwnNorm : torch::nn::Module {
  OwnNorm() {
    layer = register_module("layer", Linear(6, 3));
    to(kDouble);
    mean = register_buffer("mean_so_far", torch::zeros({3}, kDouble));
    variance = register_buffer("variance_so_far", torch::ones({3}, kDouble));
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::batch_norm(layer(x), {}, {}, mean, variance, true, 0.1, 1e-5, false);
  }
  Linear layer{nullptr};
  at::Tensor mean, variance;
};

TEST_CASE(
    "what happens if statistics have names of their own, and two passes come before backward: "
    "what kernels write past version counters is no change") {
  const auto net = std::make_shared<OwnNorm>();
  DistributedDataParallel<OwnNorm> ddp(net);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor one = ddp.forward(input(hvd::rank(), step));
    (one * ddp.forward(input(hvd::rank(), step + 1))).sum().backward();
    CHECK(same_on_all_ranks(net->layer->weight.grad()));
    CHECK(same_on_all_ranks(net->mean));
  }
}

TEST_CASE(
    "what happens to a buffer of a type that no collective has: all get the first rank's, small or "
    "large, and with uneven batches") {
  for (const auto type :
       {at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn, at::kComplexHalf}) {
    const auto net = std::make_shared<WithBuffers>(false, 3);
    net->register_buffer("few", torch::zeros({4}).to(type));
    net->register_buffer("many", torch::zeros({1 << 17}).to(type));
    OfBuffers ddp(net);
    const auto check = [&](int step) {
      for (auto& buffer : net->buffers())
        if (buffer.scalar_type() == type)
          buffer.copy_(torch::full(buffer.sizes(), step + hvd::rank(), kFloat).to(type));
      pass(ddp, step);
      for (const auto& buffer : net->buffers())
        if (buffer.scalar_type() == type)
          CHECK(torch::equal(buffer.to(at::kComplexFloat),
                             torch::full(buffer.sizes(), step, at::kComplexFloat)));
    };
    for (int step = 0; step < 2; ++step) check(step);
    auto guard = ddp.join();
    for (int step = 2; step < 4; ++step) check(step);
  }
}

}  // namespace
}  // namespace shared_buffers
