// hvd::MasterWeights: bit for bit what fp32 masters by hand give.
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <memory>
#include <sstream>

#include "tests/torch_bindings/shared_folder.h"
#include "tests/torch_bindings/tied_net.h"
#include "tests/torch_bindings/wrapped_optimizers.h"

namespace {

using namespace hvd::test;
using at::kBFloat16, at::kDouble, at::kFloat, at::kHalf;
using hvd::DistributedOptimizer;
using hvd::MasterWeights;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD, torch::optim::SGDOptions, torch::optim::Adam, torch::optim::AdamOptions;

/// 16-bit layers around a batch norm in fp32; a parameter that is frozen and one that never gets a
/// gradient.
struct MixedNet : torch::nn::Module {
  explicit MixedNet(at::ScalarType narrow) : type(narrow) {
    in = register_module("in", torch::nn::Linear(6, 41));
    norm = register_module("norm", torch::nn::BatchNorm1d(41));
    out = register_module("out", torch::nn::Linear(41, 3));
    frozen = register_parameter("frozen", torch::ones({6}), false);
    unused = register_parameter("unused", torch::ones({70}));
    in->to(type);
    out->to(type);
    for (at::Tensor* const parameter : {&frozen, &unused}) parameter->set_data(parameter->to(type));
    const torch::NoGradGuard no_gradient;
    int variant = 0;
    for (auto& parameter : parameters())
      parameter.copy_(data(parameter.sizes(), kDouble, 0, variant++) * 0.13);
  }
  at::Tensor loss(int rank, int step) {
    const at::Tensor x = data({5, 6}, kDouble, rank, step).to(type),
                     y = data({5, 3}, kDouble, rank, step + 1).to(kFloat);
    const at::Tensor h = torch::tanh(norm(in(x * frozen).to(kFloat))).to(type);
    return torch::mse_loss(out(h).to(kFloat), y);
  }
  at::ScalarType type;
  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor frozen, unused;
};

/// What MasterWeights does, by hand: a model in 16 bits, its parameters in fp32 in an optimizer.
template <class Net>
struct ByHand {
  ByHand(const NamedOptimizer& kind, at::ScalarType type)
      : net(make(type)), parameters(once(net->parameters())) {
    for (const auto& parameter : parameters)
      masters.push_back(
          parameter.detach().to(kFloat, false, true).requires_grad_(parameter.requires_grad()));
    Parameters listed;  // as the network lists them: tied ones twice
    for (const auto& parameter : net->parameters())
      for (std::size_t i = 0; i < parameters.size(); ++i)
        if (parameters[i].is_same(parameter)) listed.push_back(masters[i]);
    optimizer = kind.make(listed);
  }
  static std::shared_ptr<Net> make(at::ScalarType type) {
    if constexpr (std::is_same_v<Net, TiedNet>) {
      return std::make_shared<TiedNet>(40, type);
    } else {
      return std::make_shared<Net>(type);
    }
  }
  /// The average of all ranks' gradients, as they travel; `scale` of the loss.
  void backward(int step, double scale = 1) {
    std::vector<Parameters> gradients(parameters.size());
    std::vector<bool> there(parameters.size(), false);
    for (const int rank : everyone()) {
      net->zero_grad();
      (net->loss(rank, step) * scale).backward();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        there[i] = there[i] || parameters[i].grad().defined();
        gradients[i].push_back(parameters[i].grad().defined() ? parameters[i].grad().clone()
                                                              : torch::zeros_like(parameters[i]));
      }
    }
    for (std::size_t i = 0; i < parameters.size(); ++i)
      masters[i].mutable_grad() =
          there[i] ? reduced(gradients[i], hvd::ReduceOp::Average).to(kFloat) : at::Tensor();
  }
  void apply() {
    optimizer->step();
    const torch::NoGradGuard no_gradient;
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(masters[i]);
  }
  void step(int number) {
    backward(number);
    apply();
  }
  std::shared_ptr<Net> net;
  Parameters parameters, masters;
  std::unique_ptr<Optimizer> optimizer;
};

template <class Net>
bool same_weights(const Net& net, const ByHand<Net>& hand) {
  const Parameters mine = once(net.parameters());
  for (std::size_t i = 0; i < mine.size(); ++i)
    if (!same(mine[i].detach(), hand.parameters[i].detach())) return false;
  return true;
}
template <class Net>
bool same_masters(const MasterWeights& masters, const ByHand<Net>& hand, const Net& net) {
  const Parameters mine = once(net.parameters());
  for (const auto& [parameter, master] : masters.masters())
    for (std::size_t i = 0; i < mine.size(); ++i)
      if (mine[i].is_same(parameter) && !same(master.detach(), hand.masters[i].detach()))
        return false;
  return !masters.masters().empty();
}

enum class Way { Local, Whole, Sharded, SharedGradients, OneCopy };

template <class Net>
struct Run {
  Run(const NamedOptimizer& kind, at::ScalarType type, Way way, bool give_inner = false)
      : net(ByHand<Net>::make(type)), inner(kind.make(net->parameters())), masters(*inner) {
    if (way == Way::Local) return;
    optimizer = std::make_unique<DistributedOptimizer>(
        give_inner ? *inner : static_cast<Optimizer&>(masters), net->named_parameters(),
        hvd::DistributedOptimizerOptions{.shard_optimizer_state = way == Way::Sharded,
                                         .shard_gradients = way == Way::SharedGradients,
                                         .share_parameters = way == Way::OneCopy});
  }
  Optimizer& outer() { return optimizer ? static_cast<Optimizer&>(*optimizer) : masters; }
  void zero_grad() { optimizer ? optimizer->zero_grad() : masters.zero_grad(); }
  void step(int number) {
    zero_grad();
    net->loss(hvd::rank(), number).backward();
    outer().step();
  }
  std::shared_ptr<Net> net;
  std::unique_ptr<Optimizer> inner;
  MasterWeights masters;
  std::unique_ptr<DistributedOptimizer> optimizer;
};

template <class Net>
void check_follows(Way way) {
  for (const auto& kind : torch_optimizers()) {
    for (const auto type : {kBFloat16, kHalf}) {
      CAPTURE(kind.name);
      CAPTURE(type);
      Run<Net> run(kind, type, way, type == kHalf);
      ByHand<Net> hand(kind, type);
      for (int step = 0; step < 4; ++step) {
        run.step(step);
        hand.step(step);
        CHECK(same_weights(*run.net, hand));
        CHECK(equal_on_all_ranks(*run.net));
        if (way == Way::Whole) CHECK(same_masters(run.masters, hand, *run.net));
      }
    }
  }
}

TEST_CASE("MasterWeights in a DistributedOptimizer steps as fp32 masters by hand, bit for bit") {
  check_follows<MixedNet>(Way::Whole);
  check_follows<TiedNet>(Way::Whole);
}
TEST_CASE("MasterWeights sharded steps as fp32 masters by hand, bit for bit") {
  check_follows<MixedNet>(Way::Sharded);
  check_follows<TiedNet>(Way::Sharded);
}
TEST_CASE("MasterWeights with the gradients in shares steps as fp32 masters by hand, bit for bit") {
  check_follows<MixedNet>(Way::SharedGradients);
  check_follows<TiedNet>(Way::SharedGradients);
}
TEST_CASE(
    "MasterWeights with one copy of the parameters per host steps as fp32 masters by hand, bit for "
    "bit") {
  check_follows<MixedNet>(Way::OneCopy);
}

TEST_CASE("MasterWeights beside a DistributedDataParallel") {
  for (const auto& kind : torch_optimizers()) {
    CAPTURE(kind.name);
    Run<TiedNet> run(kind, kBFloat16, Way::Local);
    ByHand<TiedNet> hand(kind, kBFloat16);
    struct Loss : torch::nn::Module {
      explicit Loss(std::shared_ptr<TiedNet> of) : net(register_module("net", std::move(of))) {}
      at::Tensor forward(int step) { return net->loss(hvd::rank(), step); }
      std::shared_ptr<TiedNet> net;
    };
    hvd::DistributedDataParallel<Loss> ddp(std::make_shared<Loss>(run.net));
    for (int step = 0; step < 3; ++step) {
      run.masters.zero_grad();
      ddp.forward(step).backward();
      run.masters.step();
      hand.step(step);
      CHECK(same_weights(*run.net, hand));
    }
  }
}

TEST_CASE("MasterWeights with GradScaler and clipping: as by hand, on fp32 gradients") {
  const auto& kind = torch_optimizers()[1];
  for (const Way way : {Way::Whole, Way::Sharded, Way::SharedGradients}) {
    for (const auto type : {kHalf, kBFloat16}) {
      CAPTURE(type);
      Run<MixedNet> run(kind, type, way);
      ByHand<MixedNet> hand(kind, type);
      hvd::GradScaler scaler({.init_scale = 1000, .growth_interval = 2});
      for (int step = 0; step < 5; ++step) {
        run.zero_grad();
        const double scale = scaler.get_scale();
        const bool overflows = step == 3;
        (scaler.scale(run.net->loss(hvd::rank(), step)) * (overflows && last() ? INFINITY : 1))
            .backward();
        scaler.unscale_(run.outer());
        const double norm = hvd::clip_grad_norm_(*run.optimizer, 0.05);
        scaler.step(run.outer());
        scaler.update();
        if (overflows) {
          CHECK(scaler.get_scale() < scale);
          continue;
        }
        hand.backward(step, scale);
        std::vector<at::Tensor> norms;
        const auto inverse = static_cast<double>(static_cast<float>(1 / scale));
        for (auto& master : hand.masters)
          if (master.grad().defined()) {
            master.mutable_grad().mul_(inverse);
            norms.push_back(torch::linalg_vector_norm(master.grad(), 2).to(kDouble));
          }
        const double by_hand = torch::linalg_vector_norm(torch::stack(norms), 2).item<double>();
        // the shares' norms are added up
        CHECK(norm == doctest::Approx(by_hand).epsilon(way == Way::SharedGradients ? 1e-6 : 1e-9));
        const double factor = 0.05 / (by_hand + 1e-6);
        for (auto& master : hand.masters)
          if (master.grad().defined() && factor < 1) master.mutable_grad().mul_(factor);
        hand.apply();
        if (way == Way::SharedGradients) CHECK(furthest(*run.net, *hand.net) < 0.01);
        if (way != Way::SharedGradients) CHECK(same_weights(*run.net, hand));
      }
    }
  }
}

TEST_CASE("MasterWeights alone: scaler, clipping, closures, groups, schedulers") {
  const auto& kind = torch_optimizers()[0];
  Run<MixedNet> run(kind, kHalf, Way::Local);
  hvd::GradScaler scaler({.init_scale = 1024, .agree = false});
  for (int step = 0; step < 2; ++step) {
    run.masters.zero_grad();
    scaler.scale(run.net->loss(0, step)).backward();
    scaler.unscale_(run.masters);
    CHECK(hvd::clip_grad_norm_(run.masters, 0.5) > 0);
    scaler.step(run.masters);
    scaler.update();
  }
  CHECK(!run.net->unused.grad().defined());
  CHECK(run.masters.masters().size() == 4);  // the two 16-bit layers
  // An update that 16 bits cannot hold adds up.
  torch::nn::Linear layer(4, 1);
  layer->to(kBFloat16);
  {
    const torch::NoGradGuard no_gradient;
    layer->weight.fill_(1);
  }
  SGD sgd(layer->parameters(), SGDOptions(1e-4));
  MasterWeights masters(sgd);
  torch::optim::StepLR scheduler(masters, 100, 0.5);
  for (int step = 0; step < 150; ++step) {
    masters.zero_grad();
    layer(torch::ones({1, 4}, kBFloat16)).sum().backward();
    masters.step();
    scheduler.step();
  }
  CHECK(sgd.param_groups()[0].options().get_lr() == doctest::Approx(5e-5));
  const double expected = 1 - 101 * 1e-4 - 49 * 5e-5;
  CHECK(masters.masters()[0].second[0][0].item<double>() ==
        doctest::Approx(expected).epsilon(1e-5));
  CHECK(layer->weight[0][0].item<float>() != 1);
  for (const bool lbfgs : {false, true}) {
    CAPTURE(lbfgs);
    MixedNet net(kBFloat16);
    net.norm->eval();
    std::unique_ptr<Optimizer> inner;
    if (lbfgs) {
      inner = std::make_unique<torch::optim::LBFGS>(net.parameters(),
                                                    torch::optim::LBFGSOptions(0.5).max_iter(4));
    } else {
      inner = std::make_unique<SGD>(net.parameters(), SGDOptions(0.1));
    }
    MasterWeights around(*inner);
    const double before = net.loss(0, 0).item<double>();
    const auto closure = [&] {
      around.zero_grad();
      const at::Tensor loss = net.loss(0, 0);
      loss.backward();
      return loss;
    };
    for (int step = 0; step < 3; ++step) around.step(closure);
    CHECK(net.loss(0, 0).item<double>() < before);
  }
}

TEST_CASE("MasterWeights: a clipping counts for the gradient that was clipped alone") {
  const auto master_of = [](const MasterWeights& masters) {
    return masters.masters().empty() ? 0 : masters.masters()[0].second[0].item<double>();
  };
  for (const bool thrown_away : {true, false}) {
    at::Tensor weight = torch::zeros({4}, at::TensorOptions(kBFloat16)).requires_grad_();
    SGD sgd({weight}, SGDOptions(1));
    MasterWeights masters(sgd);
    DistributedOptimizer optimizer(masters);
    weight.sum().backward();
    hvd::clip_grad_norm_(optimizer, 0.5);
    if (thrown_away) {
      optimizer.zero_grad(false);
    } else {
      optimizer.step();
      weight.mutable_grad().zero_();  // as zero_grad(false) of a module
    }
    const double before = master_of(masters);
    (weight * 4).sum().backward();
    hvd::clip_grad_norm_(optimizer, 4);  // a norm of 8 is halved
    optimizer.step();
    CHECK(master_of(masters) - before == doctest::Approx(-2).epsilon(1e-5));
  }
  at::Tensor weight = torch::zeros({4}, at::TensorOptions(kBFloat16)).requires_grad_();
  SGD sgd({weight}, SGDOptions(1));
  MasterWeights masters(sgd);
  for (const double value : {1.0, 4.0}) {  // the second in the place of the first
    weight.mutable_grad() = torch::full_like(weight, value);
    hvd::clip_grad_norm_(masters, value);
  }
  masters.step();
  CHECK(master_of(masters) == doctest::Approx(-2).epsilon(1e-5));
}

TEST_CASE("MasterWeights with a closure in a DistributedOptimizer") {
  for (const Way way : {Way::Whole, Way::Sharded}) {
    const auto& kind = torch_optimizers()[0];
    Run<MixedNet> run(kind, kBFloat16, way);
    ByHand<MixedNet> hand(kind, kBFloat16);
    for (int step = 0; step < 3; ++step) {
      run.optimizer->step([&] {
        run.optimizer->zero_grad();
        const at::Tensor loss = run.net->loss(hvd::rank(), step);
        loss.backward();
        return loss;
      });
      hand.step(step);
      CHECK(same_weights(*run.net, hand));
    }
  }
}

TEST_CASE(
    "MasterWeights: what is written to the model counts, and the rest keeps its fp32 values") {
  for (const Way way : {Way::Whole, Way::Sharded}) {
    const auto& kind = torch_optimizers()[1];
    Run<MixedNet> run(kind, kBFloat16, way);
    ByHand<MixedNet> hand(kind, kBFloat16);
    for (int step = 0; step < 4; ++step) {
      run.step(step);
      hand.step(step);
      const torch::NoGradGuard no_gradient;
      run.net->in->weight.clamp_(-0.3, 0.3);  // weight clipping
      hand.net->in->weight.clamp_(-0.3, 0.3);
      auto& master = hand.masters[2];
      master.copy_(torch::where(master.to(kBFloat16).eq(hand.net->in->weight), master,
                                hand.net->in->weight.to(kFloat)));
      REQUIRE(hand.parameters[2].is_same(hand.net->in->weight));
      hvd::broadcast_parameters(*run.net, 0);
      CHECK(same_weights(*run.net, hand));
    }
  }
}

TEST_CASE("MasterWeights: an element that is written takes no bits from the others") {
  at::Tensor weight = torch::ones({4}, at::TensorOptions(kBFloat16)).requires_grad_();
  SGD sgd({weight}, SGDOptions(0x1p-12));
  MasterWeights masters(sgd);
  for (int step = 0; step < 3; ++step) {
    if (step == 2) weight.detach().select(0, 1).fill_(2);
    weight.mutable_grad() = torch::ones_like(weight);
    masters.step();
  }
  const at::Tensor expected = torch::full({4}, 1 - 3 * 0x1p-12);
  expected[1] = 2 - 0x1p-12;
  CHECK(same(masters.masters()[0].second, expected));
}

std::string saved(Optimizer& optimizer) {
  std::ostringstream out;
  torch::save(optimizer, out);
  return out.str();
}

TEST_CASE("MasterWeights in checkpoints: a run goes on as if it had not stopped, sharded or not") {
  const std::string path =
      (std::filesystem::temp_directory_path() /
       ("hvd_masters_" + std::to_string(hvd::broadcast_object(static_cast<int>(getpid()), 0))))
          .string();
  for (const auto& kind : torch_optimizers()) {
    for (const Way from : {Way::Whole, Way::Sharded}) {
      for (const Way to : {Way::Whole, Way::Sharded}) {
        for (const bool by_checkpoint : {true, false}) {
          CAPTURE(kind.name);
          CAPTURE(by_checkpoint);
          Run<TiedNet> first(kind, kBFloat16, from), resumed(kind, kBFloat16, to);
          for (int step = 0; step < 2; ++step) first.step(step);
          resumed.step(7);
          if (by_checkpoint) {
            const hvd::Checkpoint checkpoint(path);
            checkpoint.save(*first.net, first.outer(), 2);
            CHECK(checkpoint.load(*resumed.net, resumed.outer()) == 2);
          } else {
            std::istringstream in(saved(first.outer()));
            torch::load(resumed.outer(), in);
            const torch::NoGradGuard no_gradient;
            for (std::size_t i = 0; i < first.net->parameters().size(); ++i)
              resumed.net->parameters()[i].copy_(first.net->parameters()[i]);
          }
          ByHand<TiedNet> hand(kind, kBFloat16);
          for (int step = 0; step < 4; ++step) hand.step(step);
          for (int step = 2; step < 4; ++step) resumed.step(step);
          CHECK(same_weights(*resumed.net, hand));
        }
      }
    }
  }
  hvd::barrier();
  if (hvd::rank() == 0) std::filesystem::remove(path);
}

TEST_CASE("MasterWeights: a checkpoint that one rank refuses leaves the masters as they were") {
  const SharedFolder folder;
  const hvd::Checkpoint checkpoint(folder.file());
  const auto& kind = torch_optimizers()[1];
  for (const Way way : {Way::Whole, Way::Sharded}) {
    Run<TiedNet> run(kind, kBFloat16, way);
    ByHand<TiedNet> hand(kind, kBFloat16);
    hvd::ExponentialMovingAverage saved({torch::zeros({2})}),
        other({torch::zeros({last() ? 3 : 2})});
    checkpoint.save(*run.net, run.outer(), 0, {saved});
    for (int step = 0; step < 4; ++step) {
      if (step == 2)
        CHECK(contains(error_of<hvd::CheckpointError>(
                           [&] { checkpoint.load(*run.net, run.outer(), {other}); }),
                       "does not fit"));
      run.step(step);
      hand.step(step);
      CHECK(same_weights(*run.net, hand));
    }
    if (way == Way::Sharded) run.optimizer->unshard();
    CHECK(same_masters(run.masters, hand, *run.net));
  }
}

TEST_CASE("MasterWeights: broadcast_optimizer_state brings the masters") {
  const auto& kind = torch_optimizers()[1];
  Run<MixedNet> run(kind, kBFloat16, Way::Local);
  for (int step = 0; step < 2; ++step) {
    run.masters.zero_grad();
    run.net->loss(hvd::rank(), step).backward();
    run.masters.step();
  }
  hvd::broadcast_parameters(*run.net, 0);
  hvd::broadcast_optimizer_state(run.masters, 0);
  for (const auto& [parameter, master] : run.masters.masters()) CHECK(same_on_all_ranks(master));
  run.masters.zero_grad();
  run.net->loss(0, 3).backward();
  run.masters.step();
  CHECK(equal_on_all_ranks(*run.net));
  for (const auto& [parameter, master] : run.masters.masters()) CHECK(same_on_all_ranks(master));
}

TEST_CASE("MasterWeights: shared out after some steps, and given back") {
  for (const auto& kind : torch_optimizers()) {
    CAPTURE(kind.name);
    Run<MixedNet> run(kind, kBFloat16, Way::Whole);
    ByHand<MixedNet> hand(kind, kBFloat16);
    run.step(0);
    hand.step(0);
    run.optimizer.reset();
    run.optimizer = std::make_unique<DistributedOptimizer>(
        run.masters, run.net->named_parameters(),
        hvd::DistributedOptimizerOptions{.shard_optimizer_state = true});
    CHECK(run.masters.masters().empty());
    for (int step = 1; step < 3; ++step) {
      run.step(step);
      hand.step(step);
    }
    CHECK(same_weights(*run.net, hand));
    run.optimizer->unshard();
    CHECK(same_masters(run.masters, hand, *run.net));
    run.step(3);
    hand.step(3);
    CHECK(same_weights(*run.net, hand));
    CHECK(same_masters(run.masters, hand, *run.net));
  }
}

TEST_CASE(
    "MasterWeights: the user's own optimizer, accumulation, compression, parameters that come "
    "later") {
  MixedNet net(kBFloat16);
  wrapped::SignSgd own(net.parameters(), wrapped::SignOptions(0.001));
  MasterWeights masters(own);
  DistributedOptimizer optimizer(
      masters, net.named_parameters(),
      {.compression = hvd::Compression::fp16(), .backward_passes_per_step = 2});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    for (int pass = 0; pass < 2; ++pass) net.loss(hvd::rank(), step * 2 + pass).backward();
    optimizer.step();
    CHECK(equal_on_all_ranks(net));
    if (step == 0) net.frozen.requires_grad_(true);
  }
  CHECK(masters.masters().size() == 5);
  const at::Tensor more = torch::ones({3}, kBFloat16).requires_grad_();
  optimizer.param_groups()[0].params().push_back(more);
  optimizer.zero_grad();
  for (int pass = 0; pass < 2; ++pass) (net.loss(hvd::rank(), 0) + more.sum()).backward();
  optimizer.step();
  CHECK(masters.masters().size() == 6);
  CHECK(masters.masters().back().second[0].item<float>() == doctest::Approx(0.999));
}

TEST_CASE("MasterWeights refuses what would not be what it says") {
  const auto& kind = torch_optimizers()[1];
  MixedNet net(kBFloat16);
  const auto inner = kind.make(net.parameters());
  {
    DistributedOptimizer optimizer(*inner, net.named_parameters());
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { MasterWeights masters(optimizer); }),
                   "make the MasterWeights around the plain"));
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { MasterWeights masters(*inner); }),
                   "make the MasterWeights first"));
  }
  MasterWeights masters(*inner);
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { MasterWeights second(*inner); }),
                 "around this optimizer already"));
  CHECK(contains(error_of<hvd::InvalidArgument>([&] {
                   DistributedOptimizer optimizer(masters, net.named_parameters(),
                                                  {.op = hvd::ReduceOp::Adasum});
                 }),
                 "does not go with MasterWeights"));
  net.loss(0, 0).backward();
  hvd::clip_grad_norm_(masters, 1e-3);
  net.out->weight.mutable_grad().add_(1);
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { masters.step(); }),
                 "was changed after GradScaler::unscale_() or clip_grad_norm_()"));
  masters.zero_grad();
  net.loss(0, 0).backward();
  inner->step();
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { masters.step(); }), "was stepped by itself"));
}

TEST_CASE("MasterWeights: without it the optimizer goes on in 16 bits") {
  const auto& kind = torch_optimizers()[1];
  MixedNet net(kBFloat16);
  const auto inner = kind.make(net.parameters());
  net.loss(0, 0).backward();
  inner->step();  // a state that it has already
  {
    MasterWeights masters(*inner);
    net.zero_grad();
    net.loss(0, 1).backward();
    masters.step();
    CHECK(masters.masters().size() == 4);
  }
  net.zero_grad();
  net.loss(0, 2).backward();
  inner->step();
  for (const auto& [key, state] : inner->state()) {
    auto& adam = static_cast<torch::optim::AdamParamState&>(*state);
    CHECK(adam.step() == 3);
    const bool is_norm = adam.exp_avg().numel() == 41 && adam.exp_avg().scalar_type() == kFloat;
    CHECK((is_norm || adam.exp_avg().scalar_type() == kBFloat16));
  }
}

TEST_CASE(
    "MasterWeights: a closure that is evaluated often clips each evaluation's gradients, whoever "
    "throws the last ones away") {
  const auto train = [](bool by_module) {
    MixedNet net(kBFloat16);
    net.norm->eval();
    torch::optim::LBFGS inner(net.parameters(), torch::optim::LBFGSOptions(0.5).max_iter(4));
    MasterWeights masters(inner);
    DistributedOptimizer optimizer(masters, net.named_parameters());
    int evaluations = 0;
    for (int step = 0; step < 2; ++step)
      optimizer.step([&] {
        ++evaluations;
        by_module ? net.zero_grad() : optimizer.zero_grad();
        const at::Tensor loss = net.loss(hvd::rank(), step);
        loss.backward();
        hvd::clip_grad_norm_(optimizer, 0.05);
        return loss;
      });
    CHECK(evaluations > 2);
    CHECK(equal_on_all_ranks(net));
    return net.in->weight.detach();
  };
  CHECK(same(train(true), train(false)));
}

TEST_CASE("MasterWeights: a model that becomes fp32 goes on with its masters and its state") {
  for (const auto& kind : torch_optimizers()) {
    CAPTURE(kind.name);
    for (const Way way : {Way::Local, Way::Whole}) {
      at::Tensor weight = torch::ones({40}, kBFloat16).requires_grad_(),
                 by_hand = torch::ones({40}).requires_grad_();
      const auto inner = kind.make({weight}), plain = kind.make({by_hand});
      MasterWeights masters(*inner);
      std::unique_ptr<DistributedOptimizer> around;
      if (way == Way::Whole) around = std::make_unique<DistributedOptimizer>(masters);
      for (int step = 0; step < 6; ++step) {
        if (step == 3) {  // as module->to(kFloat) does
          CHECK(same(masters.masters()[0].second, by_hand.detach()));
          weight.mutable_grad().reset();
          weight.set_data(weight.detach().to(kFloat));
        }
        if (step == 3) weight.detach()[1].fill_(3);  // which counts, as ever
        if (step == 3) by_hand.detach()[1].fill_(3);
        weight.mutable_grad() = data({40}, weight.scalar_type(), 0, step);
        by_hand.mutable_grad() = data({40}, kFloat, 0, step);
        around ? around->step() : masters.step();
        plain->step();
        CHECK(same(weight.detach(), by_hand.detach().to(weight.scalar_type())));
      }
      CHECK(masters.masters().empty());
      CHECK(inner->state().size() == plain->state().size());
    }
  }
}

TEST_CASE("MasterWeights: a model that becomes a 16-bit one after some steps keeps its state") {
  for (const auto& kind : torch_optimizers()) {
    CAPTURE(kind.name);
    at::Tensor weight = torch::ones({40}).requires_grad_(),
               by_hand = torch::ones({40}).requires_grad_();
    const auto inner = kind.make({weight}), plain = kind.make({by_hand});
    MasterWeights masters(*inner);
    DistributedOptimizer optimizer(masters);
    for (int step = 0; step < 5; ++step) {
      if (step == 2) {
        weight.mutable_grad().reset();
        weight.set_data(weight.detach().to(kBFloat16));
        by_hand.detach().copy_(weight.detach());  // what `to()` has made of it
      }
      weight.mutable_grad() = data({40}, weight.scalar_type(), 0, step);
      by_hand.mutable_grad() = data({40}, kFloat, 0, step);
      optimizer.step();
      plain->step();
      CHECK(same(weight.detach(), by_hand.detach().to(weight.scalar_type())));
    }
    CHECK(same(masters.masters()[0].second, by_hand.detach()));
  }
}

}  // namespace
