#pragma once
/// These functions make the objects of a training run from its options. Each fails by throwing an
/// exception that names the option.

#include <torch/torch.h>

#include <memory>
#include <string>

#include "examples/train/data/dataset.h"
#include "examples/train/models/models.h"
#include "examples/train/trainer/checkpoint.h"
#include "examples/train/trainer/options.h"

namespace examples {

/// What --opt-level and --amp come to: the types of weights and products, as apex's levels have
/// them. A value.
struct Precision {
  torch::ScalarType narrow = torch::kBFloat16;  ///< the 16-bit type, where there is one
  bool autocast = false;                        ///< O1: products in `narrow`, weights in fp32
  bool narrow_weights = false;                  ///< O2, O3
  bool masters = false;      ///< O2: the optimizer steps fp32 masters, and batch norm stays in fp32
  bool scales_loss = false;  ///< O1, O2 in fp16

  /// Returns images for the network, in the type of its weights.
  [[nodiscard]] torch::Tensor input(const torch::Tensor& images) const;
  /// Returns the network's scores in fp32, in which losses are computed.
  [[nodiscard]] torch::Tensor output(const torch::Tensor& scores) const;
};

Precision precision_of(const Options& options);

/// Takes the weights of a model to 16 bits where the precision says so; what counts (batch norm's
/// batches) stays a whole number.
void take_weights_to(const Precision& precision, torch::nn::Module& model);

/// Returns "fp32", "bf16 with fp32 masters" and the like: what a checkpoint holds.
std::string words_of_weights(const Precision& precision);

/// This rank's device, for --device auto, cpu or cuda. "auto" is a GPU where there is one and the
/// library was built for it. Ranks of a host take its GPUs in turn.
torch::Device choose_device(const std::string& said);

/// The same initial weights for the same seed. On `device`, in the types of --opt-level.
std::shared_ptr<Classifier> make_model(const Options& options, const Dataset& data,
                                       torch::Device device);

/// With --no-decay-norm-bias in two groups: what decays, and parameters of one dimension (norms,
/// biases).
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& options,
                                                        const torch::nn::Module& model);

/// For --sync-bn: batch norm over the batches of all ranks. Returns how many layers there are;
/// refuses a model with layers that cannot be converted, naming the first.
std::size_t synchronize_batch_norm(Classifier& model);

/// What a checkpoint of this run can be taken up by.
Identity identity_of(const Options& options, const Dataset& data);

/// Returns the images per rank and backward pass: --batch-size, or as many as there are for a step
/// of all ranks, if there are fewer. Throws std::invalid_argument where there is not even one.
std::int64_t batch_size_of(const Options& options, std::int64_t images, int ranks);

/// Sets the optimizer's first learning rate; each step() of what is returned sets the next. The
/// warm-up is followed by --lr-schedule, which counts epochs from the beginning.
std::unique_ptr<torch::optim::LRScheduler> make_schedule(const Options& options,
                                                         torch::optim::Optimizer& optimizer,
                                                         std::int64_t steps_per_epoch);

/// One line for people.
std::string describe(const Options& options, const Dataset& data, const torch::nn::Module& model,
                     torch::Device device);

}  // namespace examples
