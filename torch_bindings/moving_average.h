#pragma once
/// An exponential moving average of a model's parameters, which often generalises better than the last ones (Polyak and
/// Juditsky: Acceleration of stochastic approximation by averaging, 1992). Local: ranks with the same parameters keep the same averages.
/// A parameter that is listed twice (tied weights) is averaged once.
/// Thread: the optimizer's. Owns the averages; shares the parameters.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hvd/errors.h"

namespace hvd {

struct ExponentialMovingAverageOptions {
  double decay = 0.999;  ///< from 0 (the last parameters) to below 1; higher remembers longer: about 1 / (1 - decay) updates
  /// Remember less at first: the decay of update t = 0, 1... is at most (1 + t) / (10 + t).
  bool warm_up = false;
};

class ExponentialMovingAverage {
 public:
  /// Starts with what the parameters are now. Throws InvalidArgument for a decay out of range.
  explicit ExponentialMovingAverage(std::vector<at::Tensor> parameters, ExponentialMovingAverageOptions options = {});
  explicit ExponentialMovingAverage(const torch::nn::Module& module, ExponentialMovingAverageOptions options = {});

  /// average = decay * average + (1 - decay) * parameter; after each optimizer step.
  void update();
  [[nodiscard]] std::int64_t updates() const { return updates_; }
  /// In the order of the parameters; one that is listed twice has the same tensor in both places.
  [[nodiscard]] const std::vector<at::Tensor>& averages() const { return averages_; }
  /// Makes the parameters the averages, for good.
  void copy_to_parameters();

  /// While the guard lives, the parameters are the averages (for evaluation); then what they were.
  class [[nodiscard]] Averaged {
   public:
    explicit Averaged(ExponentialMovingAverage& average) : average_(average) { average_.exchange(); }
    ~Averaged() { average_.exchange(); }
    Averaged(const Averaged&) = delete;
    Averaged& operator=(const Averaged&) = delete;

   private:
    ExponentialMovingAverage& average_;
  };
  Averaged averaged() { return Averaged(*this); }

  void save(torch::serialize::OutputArchive& archive) const;
  /// Throws c10::Error for the averages of another model.
  void load(torch::serialize::InputArchive& archive);

 private:
  void exchange();

  ExponentialMovingAverageOptions options_;
  std::vector<at::Tensor> parameters_, averages_;
  std::vector<std::size_t> unique_;  ///< the places at which a parameter is listed first
  std::int64_t updates_ = 0;
};

}  // namespace hvd
