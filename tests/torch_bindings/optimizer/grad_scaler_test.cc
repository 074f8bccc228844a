// Mixed precision: GradScaler (its scale against PyTorch's own is
// tests/system/scripts/grad_scaler.sh) and AutocastGuard.
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>

#include <limits>
#include <memory>
#include <string_view>

#include "tests/torch_bindings/support.h"

namespace grad_scaler_test {
namespace {

using namespace hvd::test;
using at::kBFloat16, at::kDouble, at::kFloat, at::kHalf;
using hvd::AutocastGuard;
using hvd::DistributedOptimizer;
using hvd::GradScaler;
using torch::nn::Sequential;
using torch::optim::Optimizer;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Of all ranks, by one process.
at::Tensor global_small_loss(Sequential& net, int step) {
  at::Tensor sum;
  for (const int rank : everyone())
    sum = sum.defined() ? sum + small_loss(net, rank, step) : small_loss(net, rank, step);
  return sum / hvd::size();
}

double parameters_differ(const Sequential& a, const Sequential& b) {
  return (flat(a).to(kDouble) - flat(b).to(kDouble)).abs().max().item<double>();
}
SGD sgd(Sequential& net, double rate = 0.1) {
  return SGD(net->parameters(), SGDOptions(rate).momentum(0.9));
}

/// Not finite on one rank only.
at::Tensor spoilt(const at::Tensor& value, bool here) { return here ? value * kInfinity : value; }

TEST_CASE(
    "GradScaler: p ranks train as one process; an overflow on one rank is a step that nobody "
    "makes") {
  for (const int accumulate : {1, 2}) {
    CAPTURE(accumulate);
    Sequential net = small_model();
    Sequential alone = small_model();
    SGD wrapped = sgd(net);
    SGD reference = sgd(alone);
    DistributedOptimizer optimizer(wrapped, net->named_parameters(),
                                   {.backward_passes_per_step = accumulate});
    GradScaler scaler({.init_scale = 1024, .growth_interval = 3});
    for (int step = 0; step < 8; ++step) {
      CAPTURE(step);
      const bool bad = step == 2 || step == 3;
      optimizer.zero_grad();
      alone->zero_grad();
      for (int pass = 0; pass < accumulate; ++pass) {
        const int batch = step * accumulate + pass;
        scaler.scale(spoilt(small_loss(net, hvd::rank(), batch), bad && last() && pass == 0))
            .backward();
        global_small_loss(alone, batch).backward();
      }
      if (step % 2 == 0) {
        scaler.unscale_(optimizer);
        torch::nn::utils::clip_grad_norm_(net->parameters(), bad ? 1e9 : 0.05);
      }
      if (!bad) {
        if (step % 2 == 0) torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.05);
        reference.step();
      }
      const at::Tensor before = flat(net);
      scaler.step(optimizer);
      CHECK(same(flat(net), before) == bad);
      scaler.update();
      CHECK(parameters_differ(net, alone) < 1e-12);
      CHECK(same_on_all_ranks(flat(net)));
      // down twice; up after steps 4, 5 and 6
      CHECK(scaler.get_scale() == (step < 2 ? 1024 : step == 2 ? 512 : step < 6 ? 256 : 512));
    }
  }
}

TEST_CASE("GradScaler: a step that is left out, of an optimizer that remembers nothing") {
  for (const bool everywhere : {true, false}) {
    at::Tensor weight = torch::ones({3}).requires_grad_();
    SGD plain({weight}, SGDOptions(0.1));
    DistributedOptimizer optimizer(plain, {{"weight", weight}});
    GradScaler scaler({.init_scale = 8});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      spoilt(scaler.scale(weight.sum()), step == 1 && (everywhere || last())).backward();
      scaler.step(optimizer);
      scaler.update();
    }
    CHECK(same(weight.detach(), torch::ones({3}) - 0.1F - 0.1F));
  }
}

TEST_CASE(
    "GradScaler: what overflows in a compressed reduction is a step left out, until the scale "
    "fits") {
  Sequential net = small_model(kFloat);
  Sequential alone = small_model(kFloat);
  SGD wrapped = sgd(net);
  SGD reference = sgd(alone);
  DistributedOptimizer optimizer(wrapped, net->named_parameters(),
                                 {.compression = hvd::Compression::fp16()});
  const double start = std::pow(2.0, 21);
  GradScaler scaler({.init_scale = start});
  int left_out = 0;
  for (int attempt = 0; attempt < 25; ++attempt) {
    const at::Tensor before = flat(net);
    const double scale = scaler.get_scale();
    optimizer.zero_grad();
    scaler.scale(small_loss(net, hvd::rank(), 0)).backward();
    scaler.step(optimizer);
    scaler.update();
    CHECK(same_on_all_ranks(flat(net)));
    if (!same(flat(net), before)) break;
    CHECK(scaler.get_scale() == scale / 2);
    ++left_out;
  }
  CHECK(left_out >= 1);
  CHECK(left_out < 25);
  CHECK(scaler.get_scale() == start / std::pow(2.0, left_out));
  global_small_loss(alone, 0).backward();
  reference.step();
  CHECK(parameters_differ(net, alone) < 1e-3);  // fp16: 11 bits
}

TEST_CASE("GradScaler: ranks with plain optimizers agree, unless told otherwise") {
  for (const bool agree : {true, false}) {
    CAPTURE(agree);
    Sequential net = small_model();
    SGD optimizer = sgd(net);
    GradScaler scaler({.init_scale = 4, .agree = agree});
    for (int step = 0; step < 2; ++step) {
      const bool bad = step == 0;
      const at::Tensor before = flat(net);
      optimizer.zero_grad();
      scaler.scale(spoilt(small_loss(net, hvd::rank(), step), bad && last())).backward();
      scaler.step(optimizer);
      scaler.update();
      const bool hit = bad && (agree || last());
      CHECK(same(flat(net), before) == hit);
    }
    CHECK(scaler.get_scale() == (agree || last() ? 2 : 4));
  }
}

TEST_CASE("GradScaler: ranks on different branches, and one without any gradient") {
  Sequential first = small_model();
  Sequential second = small_model();
  auto parameters = first->parameters();
  for (const auto& parameter : second->parameters()) parameters.push_back(parameter);
  SGD wrapped(parameters, SGDOptions(0.1));
  DistributedOptimizer optimizer(wrapped);
  GradScaler scaler({.init_scale = 8});
  Sequential alone = small_model();
  SGD reference(alone->parameters(), SGDOptions(0.1));
  // A step left out, then one to which only the last rank contributes: the others must still take
  // part in its reduction.
  for (const bool bad : {true, false}) {
    optimizer.zero_grad();
    if (bad || last())
      scaler.scale(spoilt(small_loss(last() ? second : first, hvd::rank(), 0), bad && last()))
          .backward();
    scaler.step(optimizer);
    scaler.update();
  }
  (small_loss(alone, hvd::size() - 1, 0) / hvd::size()).backward();
  reference.step();
  CHECK(parameters_differ(second, alone) < 1e-12);
  CHECK(parameters_differ(first, small_model()) == 0);
  CHECK(scaler.get_scale() == 4);
  CHECK(same_on_all_ranks(flat(second)));
}

TEST_CASE(
    "GradScaler: a rank whose plain optimizer has no gradient hears of the others' overflow") {
  for (const bool bad : {true, false}) {
    Sequential net = small_model();
    SGD optimizer = sgd(net);
    GradScaler scaler({.init_scale = 4});
    scaler.scale(torch::ones({}));
    if (last()) scaler.scale(spoilt(small_loss(net, hvd::rank(), 0), bad)).backward();
    scaler.step(optimizer);
    scaler.update();
    CHECK(scaler.get_scale() == (bad ? 2 : 4));
    CHECK(same(flat(net), flat(small_model())) == (bad || !last()));
  }
}

TEST_CASE(
    "GradScaler: all ranks hear of one whose gradients cannot be unscaled, and the next step "
    "works") {
  for (const auto spoil : {+[](at::Tensor& given) {
                             if (given.dim() == 1) given = given.to(at::kComplexDouble);
                           },
                           +[](at::Tensor& given) {
                             if (given.dim() > 1) given = given.to_sparse_csr();
                           },
                           +[](at::Tensor& given) {
                             if (given.dim() > 1) given = given.to(at::kFloat8_e5m2);
                           }}) {
    Sequential net = small_model();
    const auto parameters = net->parameters();
    SGD optimizer = sgd(net);
    GradScaler scaler({.init_scale = 4});
    scaler.scale(small_loss(net, hvd::rank(), 0)).backward();
    std::vector<at::Tensor> given, before;
    for (const auto& parameter : parameters) {
      given.push_back(parameter.grad());
      before.push_back(given.back().clone());
      if (last()) spoil(parameter.mutable_grad());
    }
    if (last()) {
      CHECK_THROWS(scaler.unscale_(optimizer));
    } else {
      const std::string text = error_of<hvd::Mismatch>([&] { scaler.unscale_(optimizer); });
      CAPTURE(text);
      CHECK(contains(text, last_rank() + ": "));
    }
    for (std::size_t i = 0; i < given.size(); ++i) {
      parameters[i].mutable_grad() = given[i];
      CHECK(same(given[i], before[i]));
    }
    scaler.unscale_(optimizer);
    for (std::size_t i = 0; i < given.size(); ++i) CHECK(same(given[i], before[i] / 4));
  }
}

TEST_CASE("GradScaler: of scales that differ, each rank takes the least that it has heard of") {
  if (hvd::size() < 3) return;
  const auto low = hvd::add_process_set({0, 1}), high = hvd::add_process_set({1, 2});
  if (hvd::rank() < 3) {
    Sequential net = small_model(), other = small_model();
    SGD first = sgd(net), second = sgd(other);
    GradScaler scaler({.init_scale = static_cast<double>(1 << hvd::rank())});
    const auto train = [&](Sequential& model, SGD& plain, const hvd::ProcessSet& set) {
      if (!set.included()) return;
      DistributedOptimizer optimizer(plain, model->named_parameters(), {.process_set = set});
      scaler.scale(small_loss(model, hvd::rank(), 0)).backward();
      scaler.step(optimizer);
    };
    train(net, first, low);
    train(other, second, high);
    scaler.update();
    CHECK(scaler.get_scale() == (hvd::rank() == 2 ? 2 : 1));
  }
  hvd::barrier();
  hvd::remove_process_set(low);
  hvd::remove_process_set(high);
}

TEST_CASE("GradScaler: a scale stays finite, and does not grow by a step that was left out") {
  Sequential net = small_model();
  SGD optimizer = sgd(net);
  GradScaler scaler({.init_scale = 0x1p126, .growth_interval = 1});
  scaler.scale(torch::ones({}));
  for (const double expected : {0x1p127, 0x1p127}) {
    for (auto& parameter : net->parameters())
      parameter.mutable_grad() = torch::ones_like(parameter);
    scaler.step(optimizer);
    scaler.update();
    CHECK(scaler.get_scale() == expected);
  }
  GradScaler uneven({.init_scale = last() ? 4.0 : 8.0, .growth_interval = 1});
  const at::Tensor before = flat(net);
  uneven.scale(small_loss(net, hvd::rank(), 0)).backward();
  uneven.step(optimizer);
  uneven.update();
  CHECK(uneven.get_scale() == (hvd::size() > 1 ? 4 : 8));
  CHECK(same(flat(net), before) == (hvd::size() > 1));
  uneven.step(optimizer);  // of one scale again
  uneven.update();
  CHECK(uneven.get_scale() == (hvd::size() > 1 ? 8 : 16));
}

TEST_CASE(
    "GradScaler: the device is asked once in a step, overflow or not, and the scale is known "
    "without it") {
  Sequential net = small_model(kFloat);
  SGD optimizer = sgd(net);
  for (const bool agree : {true, false}) {
    GradScaler scaler({.init_scale = 16, .growth_interval = 2, .agree = agree});
    for (int step = 0; step < 5; ++step) {
      CAPTURE(step);
      net->zero_grad();
      thread_local int questions;  // "item", which waits for a GPU
      questions = 0;
      const auto counter = at::addThreadLocalCallback(
          at::RecordFunctionCallback([](const at::RecordFunction& operation) {
            if (std::string_view(operation.name()) == "aten::item") ++questions;
            return std::unique_ptr<at::ObserverContext>();
          }));
      scaler.scale(spoilt(small_loss(net, hvd::rank(), step), step == 2)).backward();
      const int before = questions;  // the model's own
      if (step % 2 == 0) scaler.unscale_(optimizer);
      scaler.step(optimizer);
      scaler.update();
      CHECK(scaler.get_scale() == (step == 0 ? 16 : step == 1 ? 32 : step < 4 ? 16 : 32));
      CHECK(scaler.state().growth_tracker == (step == 0 || step == 3 ? 1 : 0));
      at::removeCallback(counter);
      CHECK(questions - before == 1);
    }
  }
}

TEST_CASE("GradScaler: what PyTorch refuses is refused") {
  Sequential net = small_model(kFloat);
  SGD optimizer = sgd(net);
  GradScaler scaler;
  CHECK(scaler.is_enabled());
  CHECK(scaler.get_scale() == 65536);
  using Wrong = hvd::InvalidArgument;
  CHECK(contains(error_of<Wrong>([&] { scaler.unscale_(optimizer); }), "before any scale(loss)"));
  CHECK(contains(error_of<Wrong>([&] { scaler.step(optimizer); }), "before any scale(loss)"));
  CHECK(contains(error_of<Wrong>([&] { scaler.update(); }), "before any scale(loss)"));
  scaler.scale(small_loss(net, hvd::rank(), 0)).backward();
  CHECK(contains(error_of<Wrong>([&] { scaler.update(); }), "without an unscale_() or step()"));
  scaler.unscale_(optimizer);
  CHECK(contains(error_of<Wrong>([&] { scaler.unscale_(optimizer); }), "already been called"));
  CHECK(contains(error_of<Wrong>([&] { scaler.step(optimizer, [] { return at::Tensor(); }); }),
                 "closure"));
  scaler.step(optimizer);
  CHECK(contains(error_of<Wrong>([&] { scaler.step(optimizer); }), "already been called"));
  CHECK(contains(error_of<Wrong>([&] { scaler.unscale_(optimizer); }), "after step()"));
  scaler.update();
  optimizer.zero_grad();
  CHECK(contains(error_of<Wrong>([&] { scaler.step(optimizer); }),
                 "no parameter of the optimizer has a gradient"));
  CHECK(contains(error_of<Wrong>([] { GradScaler bad({.growth_factor = 1}); }),
                 "growth_factor is 1"));
  CHECK(contains(error_of<Wrong>([] { GradScaler bad({.backoff_factor = 1}); }),
                 "backoff_factor is 1"));

  Sequential half = small_model(kHalf);
  SGD other = sgd(half);
  for (auto& parameter : half->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  CHECK(contains(error_of<Wrong>([&] { scaler.unscale_(other); }), "fp16 gradients"));
}

TEST_CASE("GradScaler: off, its state, and several losses and optimizers at once") {
  Sequential net = small_model(kFloat);
  SGD optimizer = sgd(net);
  GradScaler off({.enabled = false});
  const at::Tensor value = small_loss(net, hvd::rank(), 0);
  CHECK(off.scale(value).is_same(value));
  CHECK(off.get_scale() == 1);
  int evaluations = 0;
  const at::Tensor returned = off.step(optimizer, [&] {
    ++evaluations;
    return value;
  });
  off.unscale_(optimizer);
  off.update();
  CHECK(evaluations == 1);
  CHECK(returned.is_same(value));
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { GradScaler().load_state(off.state()); }),
                 "not enabled"));

  GradScaler scaler({.init_scale = 32, .growth_interval = 3});
  Sequential second = small_model(kFloat);
  SGD other = sgd(second);
  const auto together = [&](GradScaler& with) {
    optimizer.zero_grad();
    other.zero_grad();
    const auto losses = with.scale(std::vector<at::Tensor>{small_loss(net, hvd::rank(), 1),
                                                           small_loss(second, hvd::rank(), 2)});
    (losses[0] + losses[1]).backward();
    with.unscale_(other);
    with.step(optimizer);
    with.step(other);
    with.update();
  };
  together(scaler);
  together(scaler);
  const hvd::GradScalerState state = scaler.state();
  CHECK(state.growth_tracker == 2);
  GradScaler fresh;
  fresh.load_state(state);
  CHECK(fresh.get_scale() == 32);
  CHECK(fresh.state() == state);
  together(scaler);
  together(fresh);
  CHECK(scaler.get_scale() == 64);
  CHECK(fresh.get_scale() == 64);
  fresh.update(7);
  CHECK(fresh.get_scale() == 7);
  fresh.load_state(state);
  CHECK(fresh.get_scale() == 32);
  CHECK(hvd::broadcast_object(scaler.state(), 0) == scaler.state());
}

TEST_CASE("AutocastGuard: products in 16 bits, guards nest, and what was comes back") {
  using at::autocast::get_autocast_dtype, at::autocast::is_autocast_enabled;
  const torch::nn::Linear layer(4, 3);
  const at::Tensor x = torch::ones({2, 4});
  const auto type_before = get_autocast_dtype(at::kCPU);
  const auto type = [&] { return layer->weight.matmul(x.t()).scalar_type(); };
  CHECK((type() == kFloat));
  {
    const AutocastGuard outer(at::kCPU, kBFloat16);
    CHECK((type() == kBFloat16));
    {
      const AutocastGuard inner(at::kCPU, kHalf);
      CHECK((type() == kHalf));
      {
        const AutocastGuard off(at::kCPU, kBFloat16, false);
        CHECK((type() == kFloat));
        CHECK_FALSE(is_autocast_enabled(at::kCPU));
      }
      CHECK((type() == kHalf));
    }
    CHECK((type() == kBFloat16));
    CHECK((get_autocast_dtype(at::kCPU) == kBFloat16));
    const std::string text =
        error_of<hvd::InvalidArgument>([] { const AutocastGuard wrong(at::kCPU, kDouble); });
    CHECK(contains(text, "must be bf16 or fp16"));
    CHECK(contains(
        error_of<hvd::InvalidArgument>([] { const AutocastGuard wrong(at::kMeta, kHalf); }),
        "there is none for"));
  }
  CHECK((type() == kFloat));
  CHECK_FALSE(is_autocast_enabled(at::kCPU));
  CHECK((get_autocast_dtype(at::kCPU) == type_before));
}

TEST_CASE(
    "AutocastGuard: kept copies of parameters end with the outermost guard, also when it ends by "
    "an exception") {
  Sequential net = small_model(kFloat);
  const at::Tensor x = data({5, 6}, kFloat, hvd::rank());
  const auto forward = [&] {
    const AutocastGuard guard(at::kCPU, kBFloat16);
    { const AutocastGuard inner(at::kCPU, kBFloat16); }
    return net->forward(x);
  };
  const at::Tensor before = forward();
  CHECK((before.scalar_type() == kBFloat16));
  {
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : net->parameters()) parameter.add_(1);
  }
  CHECK_FALSE(torch::equal(before, forward()));  // a copy kept from before would give the same
  try {
    const AutocastGuard guard(at::kCPU, kHalf);
    throw std::runtime_error("the user's");
  } catch (const std::runtime_error&) {
  }
  CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST_CASE("bf16 autocast, loss scaling and reduction together learn on all ranks alike") {
  Sequential net = small_model(kFloat);
  SGD wrapped = sgd(net, 0.02);
  DistributedOptimizer optimizer(wrapped, net->named_parameters(),
                                 {.compression = hvd::Compression::bf16()});
  GradScaler scaler({.init_scale = 256});
  double start = 0;
  double end = 0;
  for (int step = 0; step < 30; ++step) {
    optimizer.zero_grad();
    at::Tensor value;
    {
      const AutocastGuard guard(at::kCPU, kBFloat16);
      value = small_loss(net, hvd::rank(), 0);
    }
    scaler.scale(value).backward();
    scaler.step(optimizer);
    scaler.update();
    end = hvd::allreduce(value.detach().to(kFloat)).item<double>();
    if (step == 0) start = end;
  }
  CHECK(end < 0.7 * start);
  CHECK(same_on_all_ranks(flat(net)));
  CHECK((net->parameters().front().grad().scalar_type() == kFloat));
}

TEST_CASE(
    "GradScaler: a gradient that one rank alone cannot unscale is told to all, nothing is divided, "
    "and the next step is made") {
  Sequential net = small_model(last() ? kHalf : kFloat);
  SGD plain = sgd(net);
  GradScaler scaler({.init_scale = 4});
  static_cast<void>(scaler.scale(torch::ones({1})));
  for (auto& parameter : net->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  const auto told = [&](Optimizer& optimizer, const std::string& words) {
    const auto unscale = [&] { scaler.unscale_(optimizer); };
    const std::string text =
        last() ? error_of<hvd::InvalidArgument>(unscale) : error_of<hvd::Mismatch>(unscale);
    CHECK_MESSAGE(contains(text, words), text);
    scaler.update(4);
  };
  told(plain, "fp16 gradients");
  if (last())
    for (auto& parameter : net->parameters())
      parameter.mutable_grad() = torch::ones_like(parameter, kFloat);
  scaler.unscale_(plain);  // which divides once
  for (const auto& parameter : net->parameters())
    CHECK(torch::equal(parameter.grad(), torch::full_like(parameter.grad(), 0.25)));
  scaler.update(4);

  Sequential half = small_model(kBFloat16);
  SGD wrapped = sgd(half);
  hvd::MasterWeights masters(wrapped);
  DistributedOptimizer optimizer(masters, half->named_parameters());
  const auto backward = [&](int step) {
    optimizer.zero_grad();
    scaler.scale(small_loss(half, hvd::rank(), step)).backward();
  };
  backward(0);
  scaler.unscale_(optimizer);
  if (last()) half->parameters()[0].mutable_grad().mul_(2);
  scaler.update();
  told(optimizer, "was changed after");
  backward(1);
  scaler.step(optimizer);
  scaler.update();
  CHECK(same_on_all_ranks(flat(half)));
}

TEST_CASE(
    "GradScaler: Adasum on ranks that do not agree is refused, as one that left its step out would "
    "be waited for") {
  Sequential net = small_model(kFloat);
  SGD wrapped = sgd(net);
  DistributedOptimizer optimizer(wrapped, net->named_parameters(), {.op = hvd::ReduceOp::Adasum});
  for (const bool agree : {false, true}) {
    if (!agree && hvd::size() == 1) continue;
    GradScaler scaler({.init_scale = 4, .agree = agree});
    optimizer.zero_grad();
    scaler.scale(spoilt(small_loss(net, hvd::rank(), 0), last())).backward();
    const at::Tensor before = flat(net);
    if (agree) {
      scaler.step(optimizer);
      scaler.update();
      CHECK(scaler.get_scale() == 2);
    } else {
      CHECK(contains(error_of<hvd::InvalidArgument>([&] { scaler.step(optimizer); }),
                     "ranks have to agree"));
    }
    CHECK(same(flat(net), before));
  }
}

}  // namespace
}  // namespace grad_scaler_test
