#pragma once
/// A Strategy says how a step is made: it has the ways to train in parallel (--strategy) and
/// precision (--opt-level) behind one function, so that they can be compared. It is for one thread;
/// hvd and ddp are collective. It refers to the model and the optimizer and owns what

/// wraps them. It fails by throwing what the wrappers throw.

#include <hvd/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "examples/train/data/batches.h"
#include "examples/train/models/models.h"
#include "examples/train/trainer/costs.h"
#include "examples/train/trainer/options.h"
#include "examples/train/trainer/setup.h"

namespace examples {

class Strategy {
 public:
  /// Throws std::runtime_error where the strategy is one process and there are more.
  Strategy(const Options& options, std::shared_ptr<Classifier> model,
           torch::optim::Optimizer& optimizer, torch::Device device);

  /// One optimizer step on this rank's batch, in --accumulate parts of the same size, whose
  /// gradients' mean it is. `on_loss` is given each part's mean loss, detached, on the device.
  /// Returns the last one's. Adds to `spent`: with ddp, whose reductions end with backward, all of
  /// it as computing.
  torch::Tensor step(const Batch& batch,
                     const std::function<void(const torch::Tensor& loss)>& on_loss, Spent& spent);

  /// What steps, and what a checkpoint saves.
  torch::optim::Optimizer& optimizer() { return distributed_ ? *distributed_ : local(); }
  /// Where losses are scaled.
  std::optional<hvd::GradScaler>& scaler() { return scaler_; }
  /// Collective, after the scaler's state was loaded: what a compression remembers is in the unit
  /// of losses before they are scaled, so it must know the scale at the first reduction.
  void announce_scale();
  /// Of ddp; hvd's is the optimizer's.
  [[nodiscard]] std::vector<torch::Tensor> compression_memory() const;
  /// While it lives, the model computes in 16 bits where --opt-level O1 says so.
  [[nodiscard]] hvd::AutocastGuard autocast() const;

 private:
  /// What steps on this rank.
  torch::optim::Optimizer& local() { return masters_ ? *masters_ : optimizer_; }
  void zero_grad();
  torch::Tensor forward(const torch::Tensor& images);
  torch::Tensor backward(const Batch& batch,
                         const std::function<void(const torch::Tensor&)>& on_loss);
  void clip();

  const Options options_;
  const Precision precision_;
  const std::shared_ptr<Classifier> model_;
  torch::optim::Optimizer& optimizer_;
  const torch::Device device_;
  std::optional<hvd::MasterWeights> masters_;               ///< around the optimizer
  std::unique_ptr<hvd::DistributedOptimizer> distributed_;  ///< hvd, around that
  std::unique_ptr<hvd::DistributedDataParallel<Classifier>> data_parallel_;  ///< ddp
  std::optional<hvd::DataParallel<Classifier>> replicas_;                    ///< data-parallel
  std::optional<hvd::GradScaler> scaler_;
};

}  // namespace examples
