#pragma once
/// This file has learning rates for large batches, after Goyal et al.: Accurate, large minibatch
/// SGD: training ImageNet in 1 hour (2017). k times the batch takes k times the learning rate,
/// reached by a gradual warm-up. And it has schedulers of LibTorch's kind that can be resumed,
/// which LibTorch's own cannot: each rate is made of the target, which is the rate that the group
/// had when the scheduler was made, and of the number of steps alone; so a run that goes on has the
/// rates, to the last bit, of one that was not broken off. All are for the optimizer's thread,
/// refer to the optimizer, and are made and stepped on all ranks alike.
// Tested in tests/torch_bindings/checkpoint/checkpoint_run_test.cc,
// tests/torch_bindings/training/training_helpers_test.cc

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "hvd/hvd.h"

#pragma GCC visibility push(default)
namespace hvd {

/// Returns what the linear scaling rule makes of `rate`, found good for batches of
/// `reference_batch_size`, for the global batch of all ranks of the set.
double scaled_learning_rate(double rate, std::int64_t batch_size_per_rank,
                            std::int64_t reference_batch_size = 256,
                            const ProcessSet& process_set = {});

/// WarmupOptions are those of a WarmupScheduler.
struct WarmupOptions {
  unsigned steps = 0;  ///< how many calls of step() the warm-up takes
  /// The share of the target that the first rate is; none: 1 / size, the rate of one rank.
  std::optional<double> start_factor{};
  /// The factor after the warm-up, by the number of steps since its end: a decay. None: 1.
  std::function<double(unsigned)> then{};
};

/// A Schedule is a scheduler whose rates follow from targets and the number of calls of `step()`. A
/// group that is added later starts with its own rate. An optimizer has one of them: the targets of
/// a second would be the rates at which the first begins, such as a warm-up's. What follows a
/// warm-up is its `then`.
class Schedule : public torch::optim::LRScheduler {
 public:
  /// Returns what the rate of a group is after `step` calls of step().
  [[nodiscard]] virtual double rate(double target, unsigned step) const = 0;
  /// Returns how often step() was called, in this run and those that it goes on from.
  [[nodiscard]] unsigned steps() const { return step_count_; }
  /// Writes targets and number of steps; the rest of the arguments the program gives again.
  /// `checkpoint.save(net, optimizer, n, {schedule})`.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Reads what save() wrote and sets the optimizer's rates. Throws InvalidArgument for another
  /// number of groups, with nothing changed.
  void load(torch::serialize::InputArchive& archive);

 protected:
  /// Notes the targets of the optimizer's groups.
  explicit Schedule(torch::optim::Optimizer& optimizer);
  /// Sets the rates for the present number of steps: the constructor of each class does.
  void set_rates();
  /// Returns the rate of each group, for LibTorch's step().
  std::vector<double> get_lrs() override;

 private:
  torch::optim::Optimizer& schedules_;
  std::vector<double> targets_;
};

/// A WarmupScheduler sets, after n calls of `step()`, every group's rate to its target times start
/// + (1 - start) * n / steps while n < steps, and times then(n - steps) from there on. Works on any
/// optimizer, the distributed one included. Throws InvalidArgument for a start factor that is
/// negative.
class WarmupScheduler : public Schedule {
 public:
  /// Sets the first rate.
  WarmupScheduler(torch::optim::Optimizer& optimizer, WarmupOptions options);
  /// Returns the factor after `step` calls.
  [[nodiscard]] double factor(unsigned step) const;
  [[nodiscard]] double rate(double target, unsigned step) const override {
    return target * factor(step);
  }

 private:
  WarmupOptions options_;
  double start_factor_;
};

/// A StepSchedule multiplies the rate by `gamma` after each `step_size` steps, as PyTorch's StepLR.
/// Throws InvalidArgument for a size of 0.
class StepSchedule : public Schedule {
 public:
  /// Leaves the rate as it is.
  StepSchedule(torch::optim::Optimizer& optimizer, unsigned step_size, double gamma = 0.1);
  [[nodiscard]] double rate(double target, unsigned step) const override;

 private:
  unsigned step_size_;
  double gamma_;
};

/// A MultiStepSchedule multiplies the rate by `gamma` at each of the milestones, in steps, as
/// PyTorch's MultiStepLR; one that is there twice counts twice.
class MultiStepSchedule : public Schedule {
 public:
  /// Sets the first rate.
  MultiStepSchedule(torch::optim::Optimizer& optimizer, std::vector<unsigned> milestones,
                    double gamma = 0.1);
  [[nodiscard]] double rate(double target, unsigned step) const override;

 private:
  std::vector<unsigned> milestones_;
  double gamma_;
};

/// A CosineSchedule lets the rate fall from its target along half a cosine to the rate `minimum` at
/// step `steps`, and stay there (Loshchilov and Hutter: SGDR: Stochastic gradient descent with warm
/// restarts, 2017; without the restarts), as PyTorch's CosineAnnealingLR with T_max and eta_min.
/// Throws InvalidArgument for 0 steps.
class CosineSchedule : public Schedule {
 public:
  /// Leaves the rate as it is.
  CosineSchedule(torch::optim::Optimizer& optimizer, unsigned steps, double minimum = 0);
  [[nodiscard]] double rate(double target, unsigned step) const override;

 private:
  unsigned steps_;
  double minimum_;
};

/// A LinearSchedule moves the rate in a straight line from `start_factor` times its target to
/// `end_factor` times, which it has from step `steps` on, as PyTorch's LinearLR. Throws
/// InvalidArgument for 0 steps.
class LinearSchedule : public Schedule {
 public:
  /// Sets the first rate.
  LinearSchedule(torch::optim::Optimizer& optimizer, double start_factor, double end_factor,
                 unsigned steps);
  [[nodiscard]] double rate(double target, unsigned step) const override;

 private:
  double start_factor_, end_factor_;
  unsigned steps_;
};

}  // namespace hvd
#pragma GCC visibility pop
