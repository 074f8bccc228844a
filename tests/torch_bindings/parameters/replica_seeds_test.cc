// Every way to make one rank's replica differ that we know, with each kind of training: told on all
// ranks within one turn of the slices, with the right step, rank and name, or equal again; and
// afterwards all go on. What is changed, where, when and on which rank is random.
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/torch_bindings/support.h"

namespace replica_seeds {
namespace {

using namespace hvd::test;
using hvd::DistributedOptimizer, hvd::Mismatch;
using torch::nn::Linear, torch::nn::Sequential;
using torch::optim::SGD, torch::optim::SGDOptions;

enum class Kind : std::uint8_t { Plain, Sharded, OneCopy, Masters, Ddp };
constexpr Kind kKinds[]{Kind::Plain, Kind::Sharded, Kind::OneCopy, Kind::Masters, Kind::Ddp};
constexpr const char* kNames[]{"plain", "sharded", "one copy", "masters", "ddp"};

/// What the seed says.
struct Plan {
  Kind kind = Kind::Plain;
  bool is_wide = false;  ///< several slices
  int steps = 0;         ///< before anything happens
  int culprit = 0;
  std::size_t parameter = 0;
  std::uint32_t element = 0;
  [[nodiscard]] bool is_culprit() const { return hvd::rank() == culprit; }
  /// Whether hosts have a copy each of what their ranks have one copy of.
  [[nodiscard]] bool has_copies() const { return kind == Kind::OneCopy && hvd::cross_size() > 1; }
};

Sequential made(const Plan& plan) {
  torch::manual_seed(7);
  if (!plan.is_wide) return Sequential(Linear(6, 8), torch::nn::Tanh(), Linear(8, 3));
  return Sequential(Linear(40, 2000), torch::nn::ReLU(), Linear(2000, 45), Linear(45, 3));
}

/// Everything that trains.
class Training {
 public:
  /// `differs`: before the wrapper is made, on the culprit.
  Training(const Plan& plan, const std::function<void(Training&)>& differs)
      : net(made(plan)), kind_(plan.kind) {
    mask = net->register_buffer("mask", torch::ones({90'000}));
    if (kind_ == Kind::Masters) net->to(at::kBFloat16);
    named = net->named_parameters().pairs();
    if (plan.is_culprit()) differs(*this);
    std::vector<at::Tensor> parameters;
    for (const auto& [name, parameter] : named) parameters.push_back(parameter);
    plain =
        std::make_unique<SGD>(parameters, SGDOptions(plan.steps > 100 ? 1e-4 : 0.01).momentum(0.5));
    if (kind_ == Kind::Ddp) {
      ddp.emplace(net);
      return;
    }
    if (kind_ == Kind::Masters) masters.emplace(*plain);
    optimizer.emplace(
        masters ? static_cast<torch::optim::Optimizer&>(*masters) : *plain, named,
        hvd::DistributedOptimizerOptions{.shard_optimizer_state = kind_ == Kind::Sharded,
                                         .share_parameters = kind_ == Kind::OneCopy});
  }

  void step(const std::function<void()>& before_step = [] {}) {
    const auto in = net->parameters().front().size(1);
    const at::Tensor x = data({4, in}, at::kFloat, hvd::rank(), steps_made++)
                             .to(net->parameters().front().scalar_type());
    optimizer ? optimizer->zero_grad() : plain->zero_grad();
    (ddp ? ddp->forward(x) : net->forward(x)).square().mean().backward();
    before_step();
    optimizer ? static_cast<void>(optimizer->step()) : static_cast<void>(plain->step());
  }
  [[nodiscard]] torch::optim::Optimizer& given() {
    return optimizer ? static_cast<torch::optim::Optimizer&>(*optimizer) : *plain;
  }
  [[nodiscard]] SGDOptions& options() const {
    return static_cast<SGDOptions&>(plain->param_groups()[0].options());
  }
  /// All that a turn of the guard compares, in rounds.
  [[nodiscard]] int turn() const {
    std::size_t bytes = 0;
    for (const auto& parameter : net->parameters()) bytes += parameter.nbytes();
    return static_cast<int>((bytes + (1 << 18) - 1) >> 18);
  }
  [[nodiscard]] bool equal() const { return same_on_all_ranks(flat(net)); }

  Sequential net;
  at::Tensor mask;
  std::vector<std::pair<std::string, at::Tensor>> named;
  std::unique_ptr<SGD> plain;
  std::optional<hvd::MasterWeights> masters;
  std::optional<DistributedOptimizer> optimizer;
  std::optional<hvd::DistributedDataParallel<torch::nn::SequentialImpl>> ddp;
  int steps_made = 0;

 private:
  const Kind kind_;
};

/// Past every version counter.
void flip(const at::Tensor& tensor, std::uint32_t element) {
  const auto place = static_cast<std::int64_t>(element) % tensor.numel() *
                     static_cast<std::int64_t>(tensor.element_size());
  static_cast<unsigned char*>(tensor.data_ptr())[place] ^= 1;
}

enum class Found : std::uint8_t {
  AsParameter,  ///< told with the parameter that was changed
  AsOther,      ///< told with one that has changed by it
  AsOption,     ///< told at the next step, with the option's name
  AsBuffer,
  AsWritten,    ///< ranks with one copy have no other to compare it with: told as a write past the
                ///< guard, at the next step
  AsOrder,      ///< at the first step
  ToldOrEqual,  ///< a shard's owner gives its part to all with each step
  EqualByItself,  ///< nothing that anyone steps by
};
struct Way {
  std::string name;
  /// On the culprit: before the wrapper is made; between steps; in the midst of the next step. One
  /// of them.
  std::function<void(Training&)> at_first, between, within;
  std::function<Found(Kind)> found;
  std::string subject;  ///< what the message says of it, where that is not the parameter
};

Found of_parameter(Kind kind) {
  if (kind == Kind::Sharded) return Found::ToldOrEqual;
  return kind == Kind::OneCopy ? Found::AsWritten : Found::AsParameter;
}
Found of_option(Kind kind) { return kind == Kind::Ddp ? Found::AsOther : Found::AsOption; }

std::vector<Way> ways(const Plan& plan) {
  const auto parameter = [plan](Training& of) {
    return of.named[plan.parameter % of.named.size()].second;
  };
  const torch::NoGradGuard no_gradient;
  std::vector<Way> all;
  all.push_back({.name = "a bit",
                 .between = [=](Training& of) { flip(parameter(of), plan.element); },
                 .found = of_parameter});
  all.push_back({.name = "weights that it loads",
                 .between =
                     [=](Training& of) {
                       const torch::NoGradGuard writes;
                       parameter(of).mul_(1.5).add_(0.25);
                     },
                 .found = of_parameter});
  all.push_back({.name = "a write through data()",
                 .between = [=](Training& of) { parameter(of).data().add_(0.125); },
                 .found = of_parameter});
  all.push_back(
      {.name = "a rate, through the optimizer that it has",
       .between = [](Training& of) { of.given().param_groups()[0].options().set_lr(0.02); },
       .found = of_option,
       .subject = "option lr of group 0"});
  all.push_back({.name = "a rate, through the wrapped optimizer, between backward and step",
                 .within = [](Training& of) { of.options().lr(0.03); },
                 .found = of_option,
                 .subject = "option lr of group 0"});
  all.push_back({.name = "weight decay",
                 .between = [](Training& of) { of.options().weight_decay(0.5); },
                 .found = of_option,
                 .subject = "option weight_decay of group 0"});
  all.push_back(
      {.name = "a large buffer",
       .between = [=](Training& of) { flip(of.mask, plan.element); },
       .found =
           [](Kind kind) { return kind == Kind::Ddp ? Found::AsBuffer : Found::EqualByItself; },
       .subject = "buffer 'mask'"});
  all.push_back({.name = "a reduced gradient, through its pointer",
                 .within =
                     [=](Training& of) {
                       if (of.optimizer) of.optimizer->synchronize();
                       at::Tensor gradient = parameter(of).mutable_grad();
                       if (gradient.scalar_type() == at::kFloat)
                         gradient.data_ptr<float>()[plan.element % gradient.numel()] += 3;
                       if (gradient.scalar_type() != at::kFloat)
                         gradient.data_ptr<at::BFloat16>()[plan.element % gradient.numel()] += 3;
                     },
                 .found =
                     [](Kind kind) {
                       return kind == Kind::Sharded || kind == Kind::OneCopy ? Found::EqualByItself
                                                                             : Found::AsParameter;
                     }});
  all.push_back(
      {.name = "an order of registration",
       .at_first = [](Training& of) { std::reverse(of.named.begin(), of.named.end()); },
       .found =
           [](Kind kind) { return kind == Kind::Ddp ? Found::EqualByItself : Found::AsOrder; }});
  all.push_back({.name = "a broadcast that is missing",
                 .at_first =
                     [=](Training& of) {
                       const torch::NoGradGuard writes;
                       parameter(of).mul_(0.75).sub_(0.5);
                     },
                 .found =
                     [](Kind kind) {
                       return kind == Kind::Ddp ? Found::EqualByItself : Found::AsParameter;
                     }});
  return all;
}

/// What all ranks have been told, and after how many steps; 0: nothing in so many.
std::pair<int, std::string> told_within(Training& training, const Way& way, const Plan& plan,
                                        int most) {
  for (int step = 1; step <= most; ++step) {
    const std::string text = error_of<Mismatch>([&] {
      training.step([&] {
        if (step != 1 || !way.within) return;
        if (plan.is_culprit()) {
          way.within(training);
        } else if (way.name.starts_with("a reduced gradient") && training.optimizer) {
          training.optimizer->synchronize();
        }
      });
    });
    if (text != "(no error)") return {step, text};
  }
  return {0, "(no error)"};
}

void check_text(const std::string& text, const Way& way, const Plan& plan, const Training& training,
                Found found, int after) {
  const std::string& name = training.named[plan.parameter % training.named.size()].first;
  if (found == Found::AsWritten) {
    CHECK(contains(text, "was written since the last step"));
    CHECK(contains(text, "'" + name + "'"));
    return;
  }
  if (found == Found::AsOrder) {
    CHECK(contains(text, "parameters are not the same ones"));
  } else if (found == Found::AsOther) {
    CHECK(contains(text, "parameter '"));
  } else {
    CHECK(contains(text, way.subject.empty() ? "parameter '" + name + "'" : way.subject));
  }
  if (plan.has_copies()) return;  // all of a host differ, or have been told that one has written
  CHECK(contains(text, "step " + std::to_string(plan.steps + after) + ":"));
  const std::string rank = "rank " + std::to_string(plan.culprit);
  CHECK(contains(
      text, hvd::size() == 2 ? "rank 0 and rank 1 differ" : rank + " differs from the others"));
}

void run(const Plan& plan, const Way& way) {
  CAPTURE(way.name);
  const std::string kind = kNames[static_cast<int>(plan.kind)];
  CAPTURE(kind);
  CAPTURE(plan.steps);
  CAPTURE(plan.culprit);
  const auto nothing = [](Training&) {};
  Training training(plan, way.at_first ? way.at_first : nothing);
  const SGDOptions options = training.options();
  for (int step = 0; step < plan.steps; ++step) training.step();
  hvd::barrier();  // ranks with one copy read what is written now
  if (plan.is_culprit() && way.between) way.between(training);
  hvd::barrier();
  Found found = way.found(plan.kind);
  if (plan.has_copies() && (found == Found::AsWritten || found == Found::EqualByItself))
    found = Found::ToldOrEqual;
  const int turn = found == Found::AsBuffer ? 2 : training.turn();
  // What a step makes of it is there in the next one.
  const bool is_later = found == Found::AsParameter || found == Found::ToldOrEqual;
  const int lag = found == Found::AsOther || (way.within && is_later) ? 1 : 0;
  const bool at_once = found == Found::AsOption || found == Found::AsOrder ||
                       found == Found::AsWritten || way.at_first;
  const auto [after, text] = told_within(training, way, plan, at_once ? 1 : turn + lag);
  CAPTURE(after);
  CAPTURE(text);
  if (found == Found::EqualByItself) {
    CHECK(after == 0);
  } else if (found != Found::ToldOrEqual) {
    CHECK(after > 0);
    check_text(text, way, plan, training, found, after);
  } else if (after > 0) {
    check_text(text, way, plan, training, Found::AsParameter, after);
  }
  if (after == 0) CHECK(training.equal());
  // nothing but another program mends it; and LibTorch's state has no names
  if (way.name == "an order of registration") return;
  if (plan.is_culprit()) training.options() = options;
  hvd::broadcast_parameters(*training.net, 0);
  hvd::broadcast_optimizer_state(training.given(), 0);
  for (int step = 0; step < training.turn() + 1; ++step) training.step();
  CHECK(training.equal());
  if (training.optimizer) training.optimizer->check_replicas();
}

TEST_CASE(
    "replicas: each seeded way to make one rank differ, with each kind of training: told in a "
    "turn, or equal again") {
  if (hvd::size() == 1) return;
  std::mt19937 random(23);
  int number = 0;
  const std::size_t count = ways({}).size();
  for (std::size_t way = 0; way < count; ++way) {
    for (const Kind kind : kKinds) {
      Plan plan{.kind = kind, .is_wide = random() % 3 == 0};
      plan.culprit = static_cast<int>(random() % static_cast<unsigned>(hvd::size()));
      plan.parameter = random() % 4;
      plan.element = static_cast<std::uint32_t>(random());
      plan.steps = static_cast<int>(random() % 7);
      const Way chosen = ways(plan)[way];
      if (++number % 8 == 0) {
        plan.steps = 500;
        plan.is_wide = false;
      }
      // then they have one copy
      if (chosen.found(kind) == Found::AsWritten && plan.steps == 0) plan.steps = 1;
      if (chosen.at_first) plan.steps = 0;
      run(plan, ways(plan)[way]);
    }
  }
}

}  // namespace
}  // namespace replica_seeds
