#pragma once
/// A checkpoint of the trainer is the state of a training run in a file, by the library's
/// Checkpoint, which a run that it does not belong to refuses. Everything but the constructor is
/// collective, and fails on all ranks alike by throwing std::runtime_error that names the

/// file, what is wrong and what to do.

#include <hvd/torch.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace examples {

/// How far training has come, besides what the sampler knows.
struct Position {
  std::int64_t epoch = 0;   ///< epochs that are over
  std::int64_t images = 0;  ///< of this epoch that were used, by all ranks together
  std::int64_t step = 0;    ///< optimizer steps since the beginning
  /// Of each rank's share of the `images` of this epoch; on as many ranks each goes on with its
  /// own, so that sums come out the same.
  std::vector<double> loss_sums{};

  [[nodiscard]] double loss_sum() const;  ///< over all ranks
};

/// What a run must have in common with the run whose checkpoint it takes up: pairs of an option (or
/// a property) and its value.
using Identity = std::vector<std::pair<std::string, std::string>>;

class CheckpointFile {
 public:
  /// The file is DIR/checkpoint.pt. `of_rank`: as CheckpointOptions has it. `class_names`: by
  /// label, where labels have names; a checkpoint with others is refused.
  CheckpointFile(const std::string& folder, Identity identity,
                 std::function<std::vector<torch::Tensor>()> of_rank = {},
                 std::vector<std::string> class_names = {});

  /// Replaces the file. `scaler`, `average`: where there is one, its state is saved and loaded too.
  void save(const torch::nn::Module& model, torch::optim::Optimizer& optimizer,
            const hvd::ElasticSampler& sampler, const Position& position,
            const std::optional<hvd::GradScaler>& scaler = std::nullopt,
            const hvd::ExponentialMovingAverage* average = nullptr) const;

  /// Overwrites the parameters and buffers of the model and the state of the optimizer; the
  /// optimizer's options (learning rate …) stay as they are. Nothing is changed when the identity
  /// differs. An average that is to be loaded and that the checkpoint lacks begins with the
  /// parameters. Where it lacks a sampler, as one of an older program, which dealt the images in
  /// another order, the epoch begins anew.
  Position load(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                hvd::ElasticSampler& sampler, std::optional<hvd::GradScaler>& scaler,
                std::optional<hvd::ExponentialMovingAverage>* average = nullptr,
                double decay = 0) const;

 private:
  void check_identity(const std::string& stored) const;
  void check_class_names(const std::string& stored) const;

  hvd::Checkpoint file_;
  Identity identity_;
  std::vector<std::string> class_names_;
};

}  // namespace examples
