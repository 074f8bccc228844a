#pragma once
/// A network whose decoder uses the embedding's weight, the optimizers of LibTorch around it, and
/// what one process would make of it with the data of all ranks.

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/torch_bindings/support.h"

namespace hvd::test {

using Parameters = std::vector<at::Tensor>;

struct TiedNet : torch::nn::Module {
  struct Weight : torch::nn::Module {
    explicit Weight(at::Tensor shared) { weight = register_parameter("weight", std::move(shared)); }
    at::Tensor weight;
  };
  explicit TiedNet(int width = 40, at::ScalarType type = at::kDouble) {
    const at::Tensor shared = data({width, 7}, at::kDouble, 0, 1) * 0.2;
    embedding = register_module("embedding", std::make_shared<Weight>(shared.to(type)));
    hidden = register_module("hidden", torch::nn::Linear(7, 7));
    decoder = register_module("decoder", std::make_shared<Weight>(embedding->weight));
    hidden->to(type);
    const torch::NoGradGuard no_gradient;
    int variant = 2;
    for (auto& parameter : hidden->parameters())
      parameter.copy_(data(parameter.sizes(), at::kDouble, 0, variant++) * 0.2);
  }
  at::Tensor loss(int rank, int step) {
    const auto type = embedding->weight.scalar_type();
    const at::Tensor x = data({3, embedding->weight.size(0)}, at::kDouble, rank, step).to(type);
    return torch::tanh(hidden->forward(x.matmul(embedding->weight)))
        .matmul(decoder->weight.t())
        .sub(x)
        .square()
        .mean();
  }
  std::shared_ptr<Weight> embedding, decoder;
  torch::nn::Linear hidden{nullptr};
};

struct NamedOptimizer {
  std::string name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(Parameters)> make;
};
inline const std::vector<NamedOptimizer>& torch_optimizers() {
  using namespace torch::optim;
  static const std::vector<NamedOptimizer> all{
      {"SGD",
       [](Parameters p) {
         return std::make_unique<SGD>(std::move(p),
                                      SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
       }},
      {"Adam",
       [](Parameters p) {
         return std::make_unique<Adam>(std::move(p), AdamOptions(0.01).amsgrad(true));
       }},
      {"AdamW",
       [](Parameters p) { return std::make_unique<AdamW>(std::move(p), AdamWOptions(0.01)); }},
      {"RMSprop",
       [](Parameters p) {
         return std::make_unique<RMSprop>(std::move(p),
                                          RMSpropOptions(0.01).centered(true).momentum(0.5));
       }},
      {"Adagrad",
       [](Parameters p) { return std::make_unique<Adagrad>(std::move(p), AdagradOptions(0.05)); }},
  };
  return all;
}

/// Each tensor once.
inline Parameters once(const Parameters& parameters) {
  std::set<const void*> seen;
  Parameters unique;
  for (const auto& parameter : parameters)
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) unique.push_back(parameter);
  return unique;
}

/// One process with the data of all `ranks`: the averages of their gradients, each summed over
/// `passes`, then the optimizer's step.
template <class Net>
void step_alone(Net& net, torch::optim::Optimizer& optimizer, int step,
                const std::vector<int>& ranks = everyone(), int passes = 1) {
  const Parameters parameters = once(net.parameters());
  std::vector<Parameters> gradients(parameters.size());
  for (const int rank : ranks) {
    net.zero_grad();
    for (int pass = 0; pass < passes; ++pass) net.loss(rank, step * passes + pass).backward();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      gradients[i].push_back(parameters[i].grad().defined() ? parameters[i].grad().clone()
                                                            : torch::zeros_like(parameters[i]));
  }
  for (std::size_t i = 0; i < parameters.size(); ++i)
    parameters[i].mutable_grad() = reduced(gradients[i], ReduceOp::Average);
  optimizer.step();
}

/// This rank's part of it.
template <class Net>
void step_together(Net& net, DistributedOptimizer& optimizer, int step, int passes = 1) {
  optimizer.zero_grad();
  for (int pass = 0; pass < passes; ++pass) net.loss(hvd::rank(), step * passes + pass).backward();
  optimizer.step();
}

inline double furthest(const torch::nn::Module& a, const torch::nn::Module& b) {
  const Parameters left = a.parameters(), right = b.parameters();
  double most = 0;
  for (std::size_t i = 0; i < left.size(); ++i)
    most = std::max(most, difference(left[i].detach(), right[i].detach()));
  return most;
}

inline bool equal_on_all_ranks(const torch::nn::Module& net) {
  Parameters rows;
  for (const auto& parameter : net.parameters())
    rows.push_back(parameter.detach().to(at::kDouble).reshape({-1}));
  return same_on_all_ranks(torch::cat(rows));
}

}  // namespace hvd::test
