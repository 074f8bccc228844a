#pragma once
/// These functions make the objects of a training run from its options. Each fails by throwing an exception that names the option.

#include <torch/torch.h>

#include <memory>
#include <string>

#include "examples/train/data/dataset.h"
#include "examples/train/models/models.h"
#include "examples/train/trainer/checkpoint.h"
#include "examples/train/trainer/options.h"
#include "examples/train/trainer/schedule.h"

namespace examples {

/// This rank's device, for --device auto, cpu or cuda. "auto" is a GPU where there is one and the library was built for it. Ranks of a host
/// take its GPUs in turn.
torch::Device choose_device(const std::string& said);

/// The same initial weights for the same seed. On `device`, in the types of --opt-level.
std::shared_ptr<Classifier> make_model(const Options& options, const Dataset& data, torch::Device device);

/// With --no-decay-norm-bias in two groups: what decays, and parameters of one dimension (norms, biases).
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& options, const torch::nn::Module& model);

/// For --sync-bn: batch norm over the batches of all ranks. Returns how many layers there are; refuses a model with layers that cannot be
/// converted, naming the first.
std::size_t synchronize_batch_norm(Classifier& model);

/// What a checkpoint of this run can be taken up by.
Identity identity_of(const Options& options, const Dataset& data);

/// Of the learning rate.
Schedule schedule_of(const Options& options);

/// One line for people.
std::string describe(const Options& options, const Dataset& data, const torch::nn::Module& model, torch::Device device);

}  // namespace examples
