#pragma once
/// A Trainer is the training loop on all ranks: every rank has one, and calls the same functions in
/// the same order, in one thread. It owns the data, the model, the optimizer and what wraps them.
/// It fails by throwing Refused when all ranks know of it, and anything else when

/// only this rank does.

#include <hvd/torch.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <optional>

#include "examples/train/data/batches.h"
#include "examples/train/trainer/checkpoint.h"
#include "examples/train/trainer/options.h"
#include "examples/train/trainer/profile.h"
#include "examples/train/trainer/report.h"
#include "examples/train/trainer/setup.h"
#include "examples/train/trainer/strategy.h"

namespace examples {

/// Returns what this rank's share of the test images adds up to. The model is left in the mode it
/// was in. `workers` threads make batches ahead. Images that cannot be used are left out and added
/// to `bad`.
hvd::EvaluationTally evaluate_share(Classifier& model, const Dataset& data, std::size_t batch_size,
                                    torch::Device device, std::size_t workers = 0,
                                    std::vector<BadImage>* bad = nullptr,
                                    const Precision& precision = {});

class Trainer {
 public:
  /// Makes and checks everything before the first step. Collective.
  explicit Trainer(const Options& options);

  /// Trains up to --epochs or --max-steps, or evaluates (--evaluate). Collective.
  void run();

 private:
  void load_inputs();
  void check_same_files();
  void restore();
  bool finished() const;
  bool epoch_is_over() const;
  std::int64_t images_per_step() const { return batch_size_ * options_.accumulate * hvd::size(); }
  std::int64_t steps_per_epoch() const { return data_.train.size() / images_per_step(); }

  void train_epoch();
  torch::Tensor train_step(const Batch& batch);
  void start_clock();
  void show_progress(const torch::Tensor& loss);
  double images_per_second() const;

  void evaluate_only();
  void close_epoch();
  hvd::Evaluation evaluate(bool keep_statistics);
  void gather_costs(Record& record);
  void report(const Record& record);
  void summarize();
  void gather_loss();
  void save_checkpoint();

  Options options_;
  Display display_;
  Dataset data_;
  torch::Device device_ = torch::kCPU;
  std::shared_ptr<Classifier> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<Strategy> strategy_;
  std::optional<CheckpointFile> checkpoint_;              ///< with --checkpoint
  std::optional<Reporter> reporter_;                      ///< rank 0
  std::optional<hvd::ExponentialMovingAverage> average_;  ///< with --ema
  Profile profile_;
  BadImageLog bad_images_;
  std::int64_t batch_size_ = 0;                 ///< images per rank and backward pass
  std::optional<hvd::ElasticSampler> sampler_;  ///< deals the training images
  std::unique_ptr<torch::data::StatelessDataLoader<TrainingImages, hvd::ElasticSampler>> loader_;

  Position position_;
  std::unique_ptr<torch::optim::LRScheduler> schedule_;
  double learning_rate_ = 0;    ///< of the last step
  Spent spent_, spent_before_;  ///< in this epoch; in epochs before it
  std::int64_t bad_training_images_ = 0, bad_test_images_ = 0;  ///< of this epoch, this rank's
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  torch::Tensor loss_sum_;            ///< of this rank in this epoch; stays on the device
  std::int64_t images_at_start_ = 0;  ///< of the epoch, when its clock was started
  std::chrono::steady_clock::time_point epoch_started_;
};

}  // namespace examples
