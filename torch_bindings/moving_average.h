#pragma once
/// This is an exponential moving average of a model's parameters, which often generalises better than the last ones (Polyak and
/// Juditsky: Acceleration of stochastic approximation by averaging, 1992). It is local: ranks with the same parameters keep the same
/// averages. A parameter that is listed twice (tied weights) is averaged once. Averages of 16-bit parameters are in fp32. It is for the
/// optimizer's thread, owns the averages and shares the parameters.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hvd/errors.h"

#pragma GCC visibility push(default)
namespace hvd {

/// ExponentialMovingAverageOptions are those of an ExponentialMovingAverage.
struct ExponentialMovingAverageOptions {
  double decay = 0.999;  ///< from 0 (the last parameters) to below 1; higher remembers longer: about 1 / (1 - decay) updates
  /// Whether to remember less at first: the decay of update t = 0, 1... is at most (1 + t) / (10 + t).
  bool warm_up = false;
};

/// An ExponentialMovingAverage has an average of each parameter.
class ExponentialMovingAverage {
 public:
  /// Starts with what the parameters are now. Throws InvalidArgument for a decay out of range.
  explicit ExponentialMovingAverage(std::vector<at::Tensor> parameters, ExponentialMovingAverageOptions options = {});
  /// Does the same with all parameters of a module.
  explicit ExponentialMovingAverage(const torch::nn::Module& module, ExponentialMovingAverageOptions options = {});

  /// Makes each average decay * average + (1 - decay) * parameter. To be called after each optimizer step.
  void update();
  /// Returns how many updates there were.
  [[nodiscard]] std::int64_t updates() const { return updates_; }
  /// Returns the averages in the order of the parameters; one that is listed twice has the same tensor in both places.
  [[nodiscard]] const std::vector<at::Tensor>& averages() const { return averages_; }
  /// Makes the parameters the averages, for good.
  void copy_to_parameters();

  /// An Averaged is a guard: while it lives, the parameters are the averages (for evaluation); then what they were.
  class [[nodiscard]] Averaged {
   public:
    /// Begins the scope; averaged() does it.
    explicit Averaged(ExponentialMovingAverage& average) : average_(average) { average_.exchange(); }
    ~Averaged() { average_.exchange(); }
    Averaged(const Averaged&) = delete;
    Averaged& operator=(const Averaged&) = delete;

   private:
    ExponentialMovingAverage& average_;
  };
  /// Returns a guard for evaluation with the averages.
  Averaged averaged() { return Averaged(*this); }

  /// Writes averages and number of updates.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Reads what save() wrote. Throws c10::Error for the averages of another model.
  void load(torch::serialize::InputArchive& archive);

 private:
  void exchange();

  ExponentialMovingAverageOptions options_;
  std::vector<at::Tensor> parameters_, averages_;
  std::vector<at::Tensor> set_aside_;  ///< while the parameters are the averages: what those in 16 bits were
  std::vector<std::size_t> unique_;    ///< the places at which a parameter is listed first
  std::int64_t updates_ = 0;
};

}  // namespace hvd
#pragma GCC visibility pop
