#pragma once
/// This is an exponential moving average of a model's parameters, which often generalises better
/// than the last ones (Polyak and Juditsky: Acceleration of stochastic approximation by averaging,
/// 1992). It is local: ranks with the same parameters and as many updates keep the same averages; a
/// rank that ends a JoinGuard early has fewer, and other ones without a word. Made before the
/// ranks' parameters are equal, it begins again when they become so (broadcast_parameters(), a
/// DistributedDataParallel, Checkpoint::load). A parameter that is listed twice (tied weights) is
/// averaged once. Averages of 16-bit parameters are in fp32; where a MasterWeights has a
/// parameter's master on this rank, the master is averaged, and where a DistributedOptimizer has
/// shared the masters out, the parameter. Of a module the floating-point buffers (running
/// statistics) are averaged as well; what is of integers (counters, masks) is copied. It is for the
/// optimizer's thread, owns the averages and shares the parameters.
// Tested in tests/torch_bindings/training/training_helpers_test.cc,
// tests/torch_bindings/what_if/what_if_average_test.cc

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "hvd/errors.h"
#include "torch_bindings/platform/held_module.h"

#pragma GCC visibility push(default)
namespace hvd {

/// ExponentialMovingAverageOptions are those of an ExponentialMovingAverage.
struct ExponentialMovingAverageOptions {
  double decay = 0.999;  ///< from 0 (the last parameters) to below 1; higher remembers longer:
                         ///< about 1 / (1 - decay) updates
  /// True: remembers less at first: the decay of update t = 0, 1... is at most (1 + t) / (10 + t).
  bool warm_up = false;
};

/// An ExponentialMovingAverage has an average of each parameter.
class ExponentialMovingAverage {
 public:
  /// Starts with what the parameters are now. Throws InvalidArgument for a decay out of range.
  explicit ExponentialMovingAverage(std::vector<at::Tensor> parameters,
                                    ExponentialMovingAverageOptions options = {});
  /// Does the same with all parameters and buffers of a module.
  explicit ExponentialMovingAverage(const torch::nn::Module& module,
                                    ExponentialMovingAverageOptions options = {});
  /// Does the same for what a ModuleHolder, such as torch::nn::Linear, or a std::shared_ptr holds.
  template <detail::HoldsModule Held>
  explicit ExponentialMovingAverage(const Held& module,
                                    ExponentialMovingAverageOptions options = {})
      : ExponentialMovingAverage(detail::held_module(module, "ExponentialMovingAverage"), options) {
  }

  /// Makes each average decay * average + (1 - decay) * parameter. To be called after each
  /// optimizer step.
  void update();
  /// Returns how many updates there were.
  [[nodiscard]] std::int64_t updates() const { return updates_; }
  /// Returns the averages in the order of the parameters; one that is listed twice has the same
  /// tensor in both places.
  [[nodiscard]] const std::vector<at::Tensor>& averages() const { return averages_; }
  /// Makes parameters and buffers the averages, for good; inside of a guard until it ends.
  void copy_to_parameters();

  /// An Averaged is a guard: while it lives, parameters and buffers are the averages (for
  /// evaluation); then what they were, of which it keeps a copy, whatever was written to them
  /// meanwhile (of shared parameters all ranks' step is kept). One that begins while another lives
  /// changes nothing.
  class [[nodiscard]] Averaged {
   public:
    /// Begins the scope; averaged() does it.
    explicit Averaged(ExponentialMovingAverage& average) : average_(average) {
      if (average_.guards_ == 0) average_.put_in();
      ++average_.guards_;
    }
    ~Averaged() {
      if (--average_.guards_ == 0) average_.take_out();
    }
    Averaged(const Averaged&) = delete;
    Averaged& operator=(const Averaged&) = delete;

   private:
    ExponentialMovingAverage& average_;
  };
  /// Returns a guard for evaluation with the averages.
  Averaged averaged() { return Averaged(*this); }

  /// Returns the averages of buffers, which follow those of this rank: a Checkpoint keeps each
  /// rank's.
  [[nodiscard]] std::vector<at::Tensor> of_rank() const;
  /// Writes averages and number of updates.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Reads what save() wrote. Throws c10::Error, and stays as it was, for another model's averages.
  void load(torch::serialize::InputArchive& archive);

 private:
  struct Buffer {
    at::Tensor buffer, average;
    bool counts = false;  ///< of which the mean says nothing: the average is a copy
    at::Tensor kept;      ///< while the buffer is the average: what it was, if it differed
  };
  void begin_with_broadcasts();
  void put_in();
  void take_out();

  ExponentialMovingAverageOptions options_;
  std::vector<at::Tensor> parameters_, averages_;
  std::vector<at::Tensor> set_aside_;  ///< while averages are in: what parameters were
  std::vector<std::size_t> unique_;    ///< the places at which a parameter is listed first
  std::vector<Buffer> buffers_;
  int guards_ = 0;  ///< those that live
  std::int64_t updates_ = 0;
  /// Begins again; null once there was an update.
  std::shared_ptr<const std::function<void()>> begins_;
};

}  // namespace hvd
#pragma GCC visibility pop
