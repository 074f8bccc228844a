#pragma once
/// The optimizers that tests wrap, and what all ranks together would get, made by one process from
/// all ranks' batches.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/torch_bindings/support.h"

namespace hvd::test::wrapped {

using torch::nn::Sequential;
using torch::optim::Optimizer;
using Parameters = std::vector<at::Tensor>;

/// User code: an optimizer that LibTorch does not know, with options of its own.
struct SignOptions : torch::optim::OptimizerCloneableOptions<SignOptions> {
  explicit SignOptions(double rate) : lr(rate) {}
  double lr;
  double get_lr() const override { return lr; }
  void set_lr(const double rate) override { lr = rate; }
};
class SignSgd : public Optimizer {
 public:
  SignSgd(Parameters parameters, SignOptions options)
      : Optimizer(std::move(parameters), std::make_unique<SignOptions>(options)) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor value = closure ? closure() : at::Tensor();
    const torch::NoGradGuard no_gradient;
    for (auto& group : param_groups())
      for (auto& parameter : group.params())
        if (parameter.grad().defined())
          parameter.sub_(parameter.grad().sign() * group.options().get_lr());
    return value;
  }
};

struct Kind {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(Parameters)> make;
  bool closure = false;
};
inline const std::vector<Kind>& kinds() {
  using namespace torch::optim;
  static const std::vector<Kind> all{
      {"SGD",
       [](Parameters p) {
         return std::make_unique<SGD>(p, SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
       }},
      {"Adam", [](Parameters p) { return std::make_unique<Adam>(p, AdamOptions(0.01)); }},
      {"AdamW",
       [](Parameters p) { return std::make_unique<AdamW>(p, AdamWOptions(0.01).amsgrad(true)); }},
      {"RMSprop",
       [](Parameters p) {
         return std::make_unique<RMSprop>(p, RMSpropOptions(0.01).centered(true));
       }},
      {"Adagrad", [](Parameters p) { return std::make_unique<Adagrad>(p, AdagradOptions(0.05)); }},
      {"the user's own",
       [](Parameters p) { return std::make_unique<SignSgd>(p, SignOptions(0.01)); }},
      {"SGD with a closure", [](Parameters p) { return std::make_unique<SGD>(p, SGDOptions(0.1)); },
       true},
      {"LBFGS",
       [](Parameters p) { return std::make_unique<LBFGS>(p, LBFGSOptions(0.5).max_iter(6)); },
       true},
      {"LBFGS with line search",
       [](Parameters p) {
         return std::make_unique<LBFGS>(p,
                                        LBFGSOptions(1).max_iter(6).line_search_fn("strong_wolfe"));
       },
       true},
  };
  return all;
}
inline std::unique_ptr<Optimizer> sgd(const Parameters& parameters, double rate = 0.1,
                                      double momentum = 0.9) {
  return std::make_unique<torch::optim::SGD>(parameters,
                                             torch::optim::SGDOptions(rate).momentum(momentum));
}

/// What the ranks would get together: all of it computed here, for `passes` batches each, reduced
/// as asked.
struct Reference {
  std::vector<int> ranks = everyone();
  int passes = 1;
  ReduceOp op = ReduceOp::Average;
  std::optional<at::ScalarType> wire;

  Sequential net = small_model();
  std::unique_ptr<Optimizer> optimizer;

  /// Puts the reduced gradients in place and returns the mean loss.
  at::Tensor backward(int step) {
    std::vector<Parameters> gradients;
    at::Tensor sum;
    for (const int rank : ranks) {
      net->zero_grad();
      for (int pass = 0; pass < passes; ++pass) {
        const at::Tensor value = small_loss(net, rank, step * passes + pass);
        value.backward();
        sum = sum.defined() ? sum + value.detach() : value.detach();
      }
      Parameters own;
      for (const auto& parameter : net->parameters())
        own.push_back(wire ? parameter.grad().to(*wire) : parameter.grad().clone());
      gradients.push_back(std::move(own));
    }
    auto parameters = net->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      std::vector<at::Tensor> all;
      for (const auto& own : gradients) all.push_back(own[i]);
      parameters[i].mutable_grad() = reduced(all, op).to(parameters[i].scalar_type());
    }
    return op == ReduceOp::Average ? sum / static_cast<double>(ranks.size()) : sum;
  }
  void step(int number) {
    backward(number);
    optimizer->step();
  }
};

inline bool same_parameters(const Sequential& a, const Sequential& b, double tolerance = 0) {
  const auto left = a->parameters();
  const auto right = b->parameters();
  for (std::size_t i = 0; i < left.size(); ++i)
    if (!torch::allclose(left[i], right[i], tolerance, tolerance)) return false;
  return true;
}
inline bool same_everywhere(const Sequential& net) {
  std::vector<at::Tensor> flat;
  for (const auto& parameter : net->parameters()) flat.push_back(parameter.detach().reshape({-1}));
  return same_on_all_ranks(torch::cat(flat));
}

/// Runs `steps` steps on `net` with `optimizer` and on the reference, and compares.
inline void check_steps(Sequential& net, DistributedOptimizer& optimizer, Reference& reference,
                        int steps = 3, double tolerance = 0) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (int pass = 0; pass < reference.passes; ++pass)
      small_loss(net, rank(), step * reference.passes + pass).backward();
    optimizer.step();
    reference.step(step);
    CHECK(same_parameters(net, reference.net, tolerance));
    CHECK(same_everywhere(net));
  }
}

}  // namespace hvd::test::wrapped
