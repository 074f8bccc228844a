#pragma once
/// This file has learning rates for large batches, after Goyal et al.: Accurate, large minibatch SGD: training ImageNet in 1 hour (2017).
/// k times the batch takes k times the learning rate, reached by a gradual warm-up. It is for the optimizer's thread, and refers to the
/// optimizer.

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "hvd/hvd.h"

#pragma GCC visibility push(default)
namespace hvd {

/// Returns what the linear scaling rule makes of `rate`, found good for batches of `reference_batch_size`, for the global batch of all
/// ranks of the set.
double scaled_learning_rate(double rate, std::int64_t batch_size_per_rank, std::int64_t reference_batch_size = 256,
                            const ProcessSet& process_set = {});

/// WarmupOptions are those of a WarmupScheduler.
struct WarmupOptions {
  unsigned steps = 0;  ///< how many calls of step() the warm-up takes
  /// The share of the target that the first rate is; none: 1 / size, the rate of one rank.
  std::optional<double> start_factor{};
  /// The factor after the warm-up, by the number of steps since its end: a decay. None: 1.
  std::function<double(unsigned)> then{};
};

/// A WarmupScheduler is a scheduler of LibTorch's kind: after n calls of `step()` every group's rate is its target, which is the rate it
/// had when this was made, times start + (1 - start) * n / steps while n < steps, and times then(n - steps) from there on. The constructor
/// sets the first rate. Works on any optimizer, the distributed one included. Throws InvalidArgument for a start factor that is negative.
class WarmupScheduler : public torch::optim::LRScheduler {
 public:
  /// Sets the first rate.
  WarmupScheduler(torch::optim::Optimizer& optimizer, WarmupOptions options);
  /// Returns the factor after `step` calls.
  [[nodiscard]] double factor(unsigned step) const;

 protected:
  /// Returns the rate of each group, for LibTorch's step().
  std::vector<double> get_lrs() override;

 private:
  WarmupOptions options_;
  double start_factor_;
  std::vector<double> targets_;
};

}  // namespace hvd
#pragma GCC visibility pop
