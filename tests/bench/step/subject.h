#pragma once
/// What step_bench measures: ways of training the same model on the same batch, each with a copy of
/// the model. By one thread.

#include <hvd/torch.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "examples/train/models/models.h"
#include "tests/bench/step/options.h"

namespace step_bench {

/// What one rank trains on. Random, other for every rank, the same for every subject.
struct Batch {
  Batch(const Options& options, torch::Device device);
  torch::Tensor inputs, labels;
};

/// One way of training, with a model of its own.
class Subject {
 public:
  Subject(std::string name, const Options& options, torch::Device device);

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] bool is_hvd() const { return name_.starts_with("hvd"); }
  [[nodiscard]] bool is_compressed() const { return name_ == "hvd-fp16" || name_ == "hvd-bf16"; }
  [[nodiscard]] std::vector<torch::Tensor> parameters() const { return model_->parameters(); }
  /// All parameters in one row.
  [[nodiscard]] torch::Tensor flat() const;
  [[nodiscard]] const std::vector<double>& update_milliseconds() const {
    return update_milliseconds_;
  }
  [[nodiscard]] const std::vector<double>& milliseconds() const { return milliseconds_; }
  /// Returns, for each of these steps, how long this rank waited for gradients after its backward
  /// pass: communication that nothing hides.
  [[nodiscard]] const std::vector<double>& exposed_milliseconds() const {
    return exposed_milliseconds_;
  }
  [[nodiscard]] double batches_per_step() const {
    return static_cast<double>(batches_) / static_cast<double>(milliseconds_.size());
  }

  /// Trains on the batch once, and notes how long that took if it `counts`.
  void step(const Batch& batch, bool counts);
  /// The optimizer's step alone, with the gradients of the last step.
  void update();

 private:
  [[nodiscard]] std::unique_ptr<torch::optim::Optimizer> make_optimizer(
      const Options& options) const;
  /// Returns how long it waited for gradients, in milliseconds.
  double train(const Batch& batch);
  double wait_for_gradients();
  [[nodiscard]] torch::Tensor loss(const Batch& batch) const;

  std::string name_;
  torch::Device device_;
  std::optional<torch::ScalarType> amp_;
  std::shared_ptr<examples::Classifier> model_;
  std::unique_ptr<torch::optim::Optimizer> plain_;
  std::optional<hvd::DistributedOptimizer> wrapped_;
  std::vector<double> milliseconds_, exposed_milliseconds_, update_milliseconds_;
  std::uint64_t batches_ = 0;
};

using Subjects = std::vector<std::unique_ptr<Subject>>;

}  // namespace step_bench
