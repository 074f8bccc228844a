// shard_optimizer_state: bit for bit what the plain optimizer does, with a share of its state on
// each rank.
#include <functional>
#include <memory>
#include <sstream>

#include "tests/torch_bindings/support.h"
#include "torch_bindings/sharding/optimizer_shards.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;
using hvd::DistributedOptimizer;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using Parameters = std::vector<at::Tensor>;

/// A large matrix that is cut, a channels-last convolution, small ones, and one that never gets a
/// gradient.
struct SmallNet : torch::nn::Module {
  explicit SmallNet(at::ScalarType type) {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3)));
    wide = register_module("wide", torch::nn::Linear(8 * 4 * 4, 67));
    out = register_module("out", torch::nn::Linear(67, 3));
    unused = register_parameter("unused", torch::ones({70}));
    to(type);
    const torch::NoGradGuard no_gradient;
    int variant = 0;
    for (auto& parameter : parameters())
      parameter.copy_(data(parameter.sizes(), kDouble, 0, variant++) * 0.1);
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor loss(int rank, int step) {
    const at::Tensor x = data({4, 3, 6, 6}, kDouble, rank, step).to(unused.scalar_type());
    const at::Tensor y = data({4, 3}, kDouble, rank, step + 1).to(unused.scalar_type());
    return torch::mse_loss(out(torch::tanh(wide(torch::relu(conv(x)).flatten(1)))), y);
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear wide{nullptr}, out{nullptr};
  at::Tensor unused;
};

/// Two groups, the second with half the learning rate.
template <class Kind, class Options>
std::unique_ptr<Optimizer> grouped(SmallNet& net, const Options& options) {
  Options half = options;
  half.lr(options.lr() / 2);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Parameters{net.conv->weight, net.conv->bias, net.unused, net.out->bias});
  groups.emplace_back(Parameters{net.wide->weight, net.wide->bias, net.out->weight},
                      std::make_unique<Options>(half));
  return std::make_unique<Kind>(std::move(groups), options);
}

using Make = std::function<std::unique_ptr<Optimizer>(SmallNet&)>;
const std::vector<std::pair<std::string, Make>>& optimizers() {
  using namespace torch::optim;
  static const std::vector<std::pair<std::string, Make>> all{
      {"SGD",
       [](SmallNet& net) {
         return grouped<SGD>(net, SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
       }},
      {"Adam", [](SmallNet& net) { return grouped<Adam>(net, AdamOptions(0.01)); }},
      {"AdamW",
       [](SmallNet& net) { return grouped<AdamW>(net, AdamWOptions(0.01).amsgrad(true)); }},
      {"RMSprop",
       [](SmallNet& net) {
         return grouped<RMSprop>(net, RMSpropOptions(0.01).centered(true).momentum(0.5));
       }},
      {"Adagrad",
       [](SmallNet& net) {
         return grouped<Adagrad>(net, AdagradOptions(0.05).initial_accumulator_value(0.1));
       }},
  };
  return all;
}

bool same_parameters(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto left = a.parameters();
  const auto right = b.parameters();
  for (std::size_t i = 0; i < left.size(); ++i)
    if (!torch::equal(left[i], right[i])) return false;
  return true;
}
bool same_everywhere(const torch::nn::Module& net) {
  Parameters rows;
  for (const auto& parameter : net.parameters()) rows.push_back(parameter.detach().reshape({-1}));
  return same_on_all_ranks(torch::cat(rows));
}

struct ShardedRun {
  ShardedRun(const Make& make, at::ScalarType type, bool shard, const hvd::ProcessSet& set = {})
      : net(type),
        plain(make(net)),
        optimizer(*plain, net.named_parameters(),
                  {.process_set = set,
                   .shard_optimizer_state = shard,
                   .share_parameters = shard && one_copy}) {}
  void step(int number, int rank = hvd::rank()) {
    optimizer.zero_grad();
    net.loss(rank, number).backward();
    optimizer.step();
  }
  std::string saved() {
    std::ostringstream out;
    torch::save(optimizer, out);
    return out.str();
  }
  void load(const std::string& text) {
    std::istringstream in(text);
    torch::load(optimizer, in);
  }
  SmallNet net;
  std::unique_ptr<Optimizer> plain;
  DistributedOptimizer optimizer;
};

TEST_CASE("sharded optimizers step as plain ones, bit for bit") {
  with_and_without_one_copy();
  for (const auto& [name, make] : optimizers()) {
    for (const auto type : {kFloat, kDouble}) {
      CAPTURE(name);
      CAPTURE(type);
      ShardedRun sharded(make, type, true), plain(make, type, false);
      for (int step = 0; step < 4; ++step) {
        sharded.step(step);
        plain.step(step);
        CHECK(same_parameters(sharded.net, plain.net));
        CHECK(same_everywhere(sharded.net));
      }
      CHECK(sharded.net.conv->weight.is_contiguous(at::MemoryFormat::ChannelsLast));
      CHECK(!sharded.net.unused.grad().defined());
    }
  }
}

std::int64_t momentum_elements(Optimizer& optimizer) {
  std::int64_t count = 0;
  for (const auto& [key, state] : optimizer.state())
    count += static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer().numel();
  return count;
}

TEST_CASE("sharded: each rank has its share of the state") {
  with_and_without_one_copy();
  const Make make = [](SmallNet& net) {
    return std::make_unique<torch::optim::SGD>(net.parameters(),
                                               torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  ShardedRun sharded(make, kFloat, true), plain(make, kFloat, false);
  sharded.step(0);
  plain.step(0);
  const auto all = momentum_elements(*plain.plain);
  const auto own = momentum_elements(*sharded.plain);
  const auto shares = hvd::allgather_object(own);
  std::int64_t sum = 0;
  const int ranks = one_copy ? hvd::local_size() : hvd::size();
  for (const auto share : shares) {
    // 70 elements without a gradient, and cuts at multiples of 64
    CHECK(std::abs(share - all / ranks) <= 200);
    sum += share;
  }
  CHECK(sum == all * (one_copy ? hvd::cross_size() : 1));
  // The wrapper shows whole groups, the wrapped optimizer those of this rank.
  CHECK(sharded.optimizer.param_groups()[0].params().size() == sharded.net.parameters().size());
  CHECK(sharded.optimizer.param_groups()[0].params()[0].is_same(sharded.net.parameters()[0]));
}

TEST_CASE("sharded: state saved by all ranks is loaded by any number of them, sharded or not") {
  with_and_without_one_copy();
  for (const auto& [name, make] : optimizers()) {
    CAPTURE(name);
    ShardedRun sharded(make, kDouble, true), plain(make, kDouble, false);
    for (int step = 0; step < 3; ++step) {
      sharded.step(step);
      plain.step(step);
    }
    const std::string text = sharded.saved();
    ShardedRun again(make, kDouble, true), whole(make, kDouble, false);
    hvd::broadcast_parameters(again.net, 0);
    for (auto* run : {&again, &whole}) {
      const torch::NoGradGuard no_gradient;
      auto to = run->net.parameters();
      const auto from = sharded.net.parameters();
      for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
      run->load(text);
    }
    again.load(plain.saved());  // what a plain optimizer wrote
    for (int step = 3; step < 6; ++step) {
      for (auto* run : {&sharded, &plain, &again, &whole}) run->step(step);
      CHECK(same_parameters(sharded.net, plain.net));
      CHECK(same_parameters(again.net, plain.net));
      CHECK(same_parameters(whole.net, plain.net));
    }
  }
}

TEST_CASE("sharded: fewer ranks take up the state of more") {
  with_and_without_one_copy();
  if (hvd::size() < 2) return;                    // nothing fewer
  if (one_copy && hvd::cross_size() > 1) return;  // one host has fewer ranks then, which is refused
  std::vector<int> others(static_cast<std::size_t>(hvd::size() - 1));
  for (std::size_t i = 0; i < others.size(); ++i) others[i] = static_cast<int>(i) + 1;
  const auto fewer = hvd::add_process_set(others);
  const auto& make = optimizers()[1].second;
  ShardedRun more(make, kDouble, true);
  for (int step = 0; step < 2; ++step) more.step(step);
  const std::string text = more.saved();
  if (fewer.included()) {
    ShardedRun sharded(make, kDouble, true, fewer), plain(make, kDouble, false, fewer);
    sharded.load(text);
    plain.load(text);
    for (int step = 0; step < 3; ++step) {
      sharded.step(step);
      plain.step(step);
      CHECK(same_parameters(sharded.net, plain.net));
    }
  }
  hvd::remove_process_set(fewer);
}

TEST_CASE(
    "sharded: schedulers, closures, clipping, accumulation, earlier state, broadcast of the "
    "state") {
  with_and_without_one_copy();
  const Make make = [](SmallNet& net) {
    return std::make_unique<torch::optim::Adam>(net.parameters(),
                                                torch::optim::AdamOptions(0.01).weight_decay(0.1));
  };
  {
    ShardedRun sharded(make, kDouble, true), plain(make, kDouble, false);
    torch::optim::StepLR of_wrapper(sharded.optimizer, 2, 0.5), of_wrapped(*plain.plain, 2, 0.5);
    for (int step = 0; step < 5; ++step) {
      for (auto* run : {&sharded, &plain}) {
        run->optimizer.zero_grad();
        run->net.loss(hvd::rank(), step).backward();
        run->optimizer.synchronize();
        torch::nn::utils::clip_grad_norm_(run->net.parameters(), 0.1);
        run->optimizer.step();
      }
      of_wrapper.step();
      of_wrapped.step();
      CHECK(same_parameters(sharded.net, plain.net));
    }
    CHECK(sharded.optimizer.param_groups()[0].options().get_lr() == doctest::Approx(0.0025));
    CHECK(sharded.plain->param_groups()[0].options().get_lr() == doctest::Approx(0.0025));
    for (auto* run : {&sharded, &plain}) {
      run->optimizer.set_backward_passes_per_step(2);
      run->optimizer.step([&] {
        run->optimizer.zero_grad();
        run->net.loss(hvd::rank(), 7).backward();
        const at::Tensor loss = run->net.loss(hvd::rank(), 8);
        loss.backward();
        return loss;
      });
    }
    CHECK(same_parameters(sharded.net, plain.net));
    // The options of the root, and everybody's share of the state, which is one already.
    sharded.optimizer.param_groups()[0].options().set_lr(0.01 * (hvd::rank() + 1));
    plain.optimizer.param_groups()[0].options().set_lr(0.01 * hvd::size());
    hvd::broadcast_optimizer_state(sharded.optimizer, hvd::size() - 1);
    CHECK(sharded.optimizer.param_groups()[0].options().get_lr() == 0.01 * hvd::size());
    sharded.optimizer.set_backward_passes_per_step(1);
    plain.optimizer.set_backward_passes_per_step(1);
    sharded.step(9);
    plain.step(9);
    CHECK(same_parameters(sharded.net, plain.net));
  }
  // state from before the wrapping, and groups given back after it
  SmallNet a(kDouble), b(kDouble);
  const auto first = make(a), second = make(b);
  for (int step = 0; step < 2; ++step) {
    for (auto* net : {&a, &b}) net->zero_grad();
    for (auto* net : {&a, &b}) net->loss(0, step).backward();
    first->step();
    second->step();
  }
  {
    DistributedOptimizer sharded(*first, a.named_parameters(),
                                 {.shard_optimizer_state = true, .share_parameters = one_copy});
    DistributedOptimizer plain(*second, b.named_parameters());
    for (int step = 2; step < 4; ++step) {
      sharded.zero_grad();
      plain.zero_grad();
      a.loss(hvd::rank(), step).backward();
      b.loss(hvd::rank(), step).backward();
      sharded.step();
      plain.step();
      CHECK(same_parameters(a, b));
    }
  }
  CHECK(first->param_groups()[0].params().size() == a.parameters().size());
  CHECK(first->param_groups()[0].params()[0].is_same(a.parameters()[0]));
}

/// User code: it looks at a whole parameter at once, so it must get whole ones.
struct NormOptions : torch::optim::OptimizerCloneableOptions<NormOptions> {};
struct Normalised : Optimizer {
  explicit Normalised(Parameters parameters)
      : Optimizer(std::move(parameters), std::make_unique<NormOptions>()) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const torch::NoGradGuard no_gradient;
    for (auto& group : param_groups())
      for (auto& parameter : group.params())
        if (parameter.grad().defined())
          parameter.sub_(parameter.grad() / (1 + parameter.grad().norm()));
    return {};
  }
};

TEST_CASE("sharded: the user's own optimizer; what is refused") {
  with_and_without_one_copy();
  const Make make = [](SmallNet& net) { return std::make_unique<Normalised>(net.parameters()); };
  {
    ShardedRun sharded(make, kDouble, true), plain(make, kDouble, false);
    for (int step = 0; step < 3; ++step) {
      sharded.step(step);
      plain.step(step);
      CHECK(same_parameters(sharded.net, plain.net));
    }
    CHECK(!sharded.saved().empty());  // it has no state
  }
  SmallNet net(kDouble);
  torch::optim::LBFGS lbfgs(net.parameters(), torch::optim::LBFGSOptions(0.1));
  const auto wrap = [&](Optimizer& optimizer) {
    DistributedOptimizer(optimizer, net.named_parameters(),
                         {.shard_optimizer_state = true, .share_parameters = one_copy});
  };
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { wrap(lbfgs); }), "LBFGS"));
  CHECK(lbfgs.param_groups()[0].params().size() == net.parameters().size());
  torch::optim::SGD sgd(net.parameters(), torch::optim::SGDOptions(0.1));
  DistributedOptimizer sharded(sgd, net.named_parameters(),
                               {.shard_optimizer_state = true, .share_parameters = one_copy});
  std::istringstream nonsense("nonsense");
  CHECK_THROWS(torch::load(sharded, nonsense));
  net.loss(hvd::rank(), 0).backward();
  sharded.step();
  CHECK(same_everywhere(net));
}

TEST_CASE("sharded: a refused lend leaves whole parameters in the wrapped optimizer's groups") {
  SmallNet net(kDouble);
  torch::optim::SGD sgd(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  hvd::OptimizerShards::Named named;
  for (const auto& item : net.named_parameters()) named.emplace_back(item.key(), item.value());
  hvd::OptimizerShards shards(sgd, hvd::global_process_set(), "lend", named);
  const at::Tensor before = net.unused.detach();
  net.unused.set_data(torch::ones({71 + hvd::rank()}, kDouble));
  for (int i = 0; i < 2; ++i)  // and each time
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { shards.lend(); }),
                   "'unused' has another shape"));
  const auto& group = sgd.param_groups()[0].params();
  REQUIRE(group.size() == net.parameters().size());
  for (std::size_t i = 0; i < group.size(); ++i) CHECK(group[i].is_same(net.parameters()[i]));
  net.unused.set_data(before);
  net.loss(hvd::rank(), 0).backward();
  shards.lend();
  sgd.step();
  shards.take_back();
  CHECK(sgd.state().size() > 1);  // beside the one that marks it
  CHECK(sgd.param_groups()[0].params()[0].is_same(net.parameters()[0]));
}

/// Gives every parameter a gradient, and the optimizer a state by a step.
void step_by_hand(SmallNet& net, Optimizer& optimizer) {
  for (auto& parameter : net.parameters())
    parameter.mutable_grad() = data(parameter.sizes(), kDouble, 0).clone();  // no view
  optimizer.step();
  optimizer.zero_grad();
}

TEST_CASE(
    "sharded: a state that does not fit one parameter is refused on all ranks, and the old one "
    "stays") {
  with_and_without_one_copy();
  for (const auto& [name, make] : optimizers()) {
    CAPTURE(name);
    SmallNet other(kDouble);
    other.out->bias.set_data(torch::ones({4}, kDouble));
    const auto of_other = make(other);
    step_by_hand(other, *of_other);
    for (auto& group : of_other->param_groups()) group.options().set_lr(7);
    std::ostringstream text;
    torch::save(*of_other, text);
    ShardedRun sharded(make, kDouble, true), plain(make, kDouble, false);
    for (int step = 0; step < 4; ++step) {
      sharded.step(step);
      plain.step(step);
      CHECK(same_parameters(sharded.net, plain.net));
      CHECK(contains(error_of<hvd::InvalidArgument>([&] { sharded.load(text.str()); }),
                     "the state of parameter 'out.bias' has shape [4], and the parameter [3]"));
    }
  }
}

TEST_CASE(
    "sharded: an optimizer with a state that does not fit one parameter is refused on all ranks, "
    "and keeps it") {
  with_and_without_one_copy();
  SmallNet net(kDouble);
  torch::optim::SGD sgd(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  step_by_hand(net, sgd);
  const auto momentum = [&](const at::Tensor& parameter) {
    const auto& state = sgd.state().at(parameter.unsafeGetTensorImpl());
    return static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer();
  };
  const auto wrap = [&] {
    DistributedOptimizer(sgd, net.named_parameters(),
                         {.shard_optimizer_state = true, .share_parameters = one_copy});
  };
  net.out->bias.set_data(torch::ones({4}, kDouble));
  CHECK(contains(error_of<hvd::InvalidArgument>(wrap),
                 "the state of parameter 'out.bias' has shape [3], and the parameter [4]"));
  net.out->bias.set_data(torch::ones({3}, kDouble));
  REQUIRE(sgd.state().size() == net.parameters().size());
  for (const auto& parameter : net.parameters())
    CHECK(torch::equal(momentum(parameter), data(parameter.sizes(), kDouble, 0)));
  wrap();
}

/// Throws instead of a step when it is told to.
struct Failing : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    const at::Tensor loss = closure ? closure() : at::Tensor();
    if (std::exchange(fails, false)) throw std::runtime_error("it fails");
    SGD::step();
    return loss;
  }
  bool fails = false;
};

TEST_CASE(
    "what happens if the step of a sharded optimizer throws on one rank: the others are told, and "
    "training goes on with the same parameters and states") {
  with_and_without_one_copy();
  for (const auto& [failing_rank, closure, masters] : {std::tuple{hvd::size() - 1, false, false},
                                                       {hvd::size() - 1, true, false},
                                                       {0, false, false},
                                                       {hvd::size() - 1, false, true},
                                                       {hvd::size() - 1, true, true}}) {
    CAPTURE(failing_rank);
    CAPTURE(closure);
    CAPTURE(masters);
    SmallNet net(masters ? at::kBFloat16 : kDouble);
    Failing failing(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    std::unique_ptr<Optimizer> of_masters;
    if (masters) of_masters = std::make_unique<hvd::MasterWeights>(failing);
    DistributedOptimizer sharded(masters ? *of_masters : failing, net.named_parameters(),
                                 {.shard_optimizer_state = true, .share_parameters = one_copy});
    for (int step = 0; step < 7; ++step) {
      const auto evaluate = [&] {
        sharded.zero_grad();
        const at::Tensor loss = net.loss(hvd::rank(), step);
        loss.backward();
        return loss;
      };
      const auto take_step = [&] {
        if (!closure) evaluate();
        closure ? sharded.step(evaluate) : sharded.step();
      };
      failing.fails = step % 3 == 0 && hvd::rank() == failing_rank;
      if (step % 3 > 0) {
        take_step();
      } else if (hvd::rank() == failing_rank) {
        CHECK(error_of<std::runtime_error>(take_step) == "it fails");
      } else {
        const std::string text = error_of<hvd::Mismatch>(take_step);
        CHECK_MESSAGE(contains(text, "rank " + std::to_string(failing_rank) + " "), text);
        CHECK_MESSAGE(contains(text, "it fails"), text);
      }
      CHECK(same_everywhere(net));
    }
  }
}

/// User code with a state that LibTorch does not know: how often a parameter was stepped.
struct StepCount : torch::optim::OptimizerCloneableParamState<StepCount> {
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue read;
    archive.read("steps", read);
    steps = read.toInt();
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("steps", c10::IValue(steps));
  }
  std::int64_t steps = 0;
};
struct Diminishing : Normalised {
  explicit Diminishing(Parameters parameters) : Normalised(std::move(parameters)) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    if (std::exchange(fails, false)) throw std::runtime_error("it fails");
    const torch::NoGradGuard no_gradient;
    for (auto& group : param_groups())
      for (auto& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        auto& state = state_[parameter.unsafeGetTensorImpl()];
        if (!state) state = std::make_unique<StepCount>();
        parameter.sub_(parameter.grad(),
                       1.0 / static_cast<double>(++static_cast<StepCount&>(*state).steps));
      }
    return {};
  }
  bool fails = false;
};

TEST_CASE(
    "what happens if a step of the user's own optimizer throws on one rank: hosts go on with the "
    "same states, or are told that they cannot") {
  for (const int failing_step : {1, 0}) {
    CAPTURE(failing_step);
    SmallNet net(kDouble);
    Diminishing diminishing(net.parameters());
    DistributedOptimizer optimizer(diminishing, net.named_parameters(), {.share_parameters = true});
    const auto take_step = [&] { optimizer.step(); };
    std::string refusal;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      net.loss(hvd::rank(), step).backward();
      diminishing.fails = step == failing_step && last();
      if (step == failing_step) {
        CHECK_THROWS(take_step());
      } else {
        refusal = error_of<hvd::Mismatch>(take_step);
        // the last rank has no state to read another into
        const bool cannot = failing_step == 0 && hvd::cross_size() > 1;
        CHECK_MESSAGE(contains(refusal, "make the optimizer anew") == cannot, refusal);
      }
      CHECK(same_everywhere(net));
    }
    if (refusal == "(no error)") continue;
    diminishing.state().clear();
    CHECK(error_of<hvd::Mismatch>(take_step) == "(no error)");
    CHECK(same_everywhere(net));
  }
}

}  // namespace
