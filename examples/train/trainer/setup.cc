#include "examples/train/trainer/setup.h"

#include <hvd/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <stdexcept>
#include <utility>

namespace examples {
namespace {

/// Batch norm of any kind, also in a TorchScript module, where classes have no names here.
bool has_running_statistics(const torch::nn::Module& module) {
  const auto buffers = module.named_buffers(/*recurse=*/false);
  const auto* const mean = buffers.find("running_mean");
  return mean != nullptr && mean->defined();
}

std::string shape_words(const std::vector<std::int64_t>& sizes) {
  std::string words;
  for (const auto size : sizes) words += (words.empty() ? "" : " x ") + std::to_string(size);
  return words;
}

std::int64_t count_parameters(const torch::nn::Module& model) {
  std::int64_t count = 0;
  for (const auto& parameter : model.parameters()) count += parameter.numel();
  return count;
}

/// The optimizer for all parameters, or for two groups of which the second has no weight decay.
template <class Optimizer, class OptimizerOptions>
std::unique_ptr<torch::optim::Optimizer> with_groups(const torch::nn::Module& model,
                                                     const OptimizerOptions& all, bool decay_all) {
  if (decay_all) return std::make_unique<Optimizer>(model.parameters(), all);
  std::vector<torch::Tensor> decayed, free;
  for (const auto& parameter : model.parameters())
    (parameter.dim() > 1 ? decayed : free).push_back(parameter);
  auto without = std::make_unique<OptimizerOptions>(all);
  without->weight_decay(0);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  if (!decayed.empty()) groups.emplace_back(decayed, std::make_unique<OptimizerOptions>(all));
  if (!free.empty()) groups.emplace_back(free, std::move(without));
  return std::make_unique<Optimizer>(std::move(groups), all);
}

}  // namespace

torch::Tensor Precision::input(const torch::Tensor& images) const {
  return narrow_weights && images.is_floating_point() ? images.to(narrow) : images;
}

torch::Tensor Precision::output(const torch::Tensor& scores) const {
  return narrow_weights ? scores.to(torch::kFloat) : scores;
}

Precision precision_of(const Options& options) {
  const bool fp16 = options.amp == "fp16", autocast = options.opt_level == "O1",
             masters = options.opt_level == "O2";
  return {.narrow = fp16 ? torch::kHalf : torch::kBFloat16,
          .autocast = autocast,
          .narrow_weights = masters || options.opt_level == "O3",
          .masters = masters,
          .scales_loss = fp16 && (autocast || masters)};
}

void take_weights_to(const Precision& precision, torch::nn::Module& model) {
  if (!precision.narrow_weights) return;
  for (const auto& module : model.modules()) {
    if (precision.masters && has_running_statistics(*module)) continue;
    const auto narrow = [&](torch::Tensor tensor) {
      if (tensor.defined() && tensor.is_floating_point())
        tensor.set_data(tensor.detach().to(precision.narrow));
    };
    for (const auto& parameter : module->parameters(/*recurse=*/false)) narrow(parameter);
    for (const auto& buffer : module->buffers(/*recurse=*/false)) narrow(buffer);
  }
}

std::string words_of_weights(const Precision& precision) {
  if (!precision.narrow_weights) return "fp32";
  const std::string type = precision.narrow == torch::kHalf ? "fp16" : "bf16";
  return precision.masters ? type + " with fp32 masters" : type;
}

torch::Device choose_device(const std::string& said) {
  const torch::Device own = hvd::local_device();  // the CPU where hvd or LibTorch is without CUDA
  const bool usable = torch::cuda::is_available() && own.is_cuda();
  if (said == "cuda" && !usable) {
    throw std::runtime_error(
        std::string("--device cuda: ") +
        (hvd::cuda_built() ? "LibTorch finds no GPU here" : "hvd was built without CUDA") +
        "; use --device cpu");
  }
  return said == "cpu" || !usable ? torch::kCPU : own;
}

std::shared_ptr<Classifier> make_model(const Options& options, const Dataset& data,
                                       torch::Device device) {
  torch::manual_seed(options.seed);
  auto model = make_model({.name = options.model,
                           .stem = options.stem,
                           .image = data.image_shape(),
                           .classes = data.classes});
  if (!options.weights.empty()) load_weights(*model, options.weights);
  model->to(device);
  take_weights_to(precision_of(options), *model);
  return model;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& options,
                                                        const torch::nn::Module& model) {
  namespace optim = torch::optim;
  const double rate = options.learning_rate, decay = options.weight_decay;
  if (options.optimizer == "sgd") {
    return with_groups<optim::SGD>(
        model, optim::SGDOptions(rate).momentum(options.momentum).weight_decay(decay),
        options.decay_all);
  }
  if (options.optimizer == "adam") {
    return with_groups<optim::Adam>(model, optim::AdamOptions(rate).weight_decay(decay),
                                    options.decay_all);
  }
  return with_groups<optim::AdamW>(model, optim::AdamWOptions(rate).weight_decay(decay),
                                   options.decay_all);
}

std::int64_t batch_size_of(const Options& options, std::int64_t images, int ranks) {
  const std::int64_t passes = ranks * options.accumulate;
  if (images < passes) {
    throw std::invalid_argument(
        std::to_string(images) + " training images are too few for " + std::to_string(ranks) +
        " ranks with --accumulate " + std::to_string(options.accumulate) +
        ": every rank needs at least one per backward pass; start fewer ranks or give more data");
  }
  return std::min(options.batch_size, images / passes);
}

std::unique_ptr<torch::optim::LRScheduler> make_schedule(const Options& options,
                                                         torch::optim::Optimizer& optimizer,
                                                         std::int64_t steps_per_epoch) {
  const auto epoch = static_cast<double>(steps_per_epoch);
  const double warmup = std::min(std::ceil(options.warmup_epochs * epoch - 1e-9), 4e9);
  hvd::WarmupOptions schedule{.steps = static_cast<unsigned>(warmup)};
  // A rate that was scaled up begins as it was, others begin small.
  const double passes = static_cast<double>(hvd::size()) * static_cast<double>(options.accumulate);
  schedule.start_factor = options.scale_lr && passes > 1 ? 1 / passes : 0.01;
  if (options.schedule == "step") {
    schedule.then = [=, epochs = options.lr_steps, gamma = options.lr_gamma](unsigned step) {
      const auto passed = std::count_if(epochs.begin(), epochs.end(), [&](std::int64_t end) {
        return warmup + step >= static_cast<double>(end) * epoch;
      });
      return std::pow(gamma, static_cast<double>(passed));
    };
  } else if (options.schedule == "cosine") {
    const double length = std::max(static_cast<double>(options.epochs) * epoch - warmup, 1.0);
    schedule.then = [=](unsigned step) {
      return 0.5 * (1 + std::cos(std::numbers::pi * std::min(step / length, 1.0)));
    };
  }
  return std::make_unique<hvd::WarmupScheduler>(optimizer, std::move(schedule));
}

std::size_t synchronize_batch_norm(Classifier& model) {
  hvd::convert_sync_batchnorm(model);
  const auto report = hvd::sync_batchnorm_report(model);
  if (!report.local.empty()) {
    throw std::runtime_error("--sync-bn: '" + report.local.front() + "' and, with it, " +
                             std::to_string(report.local.size()) +
                             " layers with running statistics cannot be converted, as those of "
                             "TorchScript never can; leave out --sync-bn");
  }
  return report.synchronized.size();
}

Identity identity_of(const Options& options, const Dataset& data) {
  return {{"--model", options.model},
          {"--stem", options.stem == "auto" ? "imagenet" : options.stem},
          {"--dataset", options.dataset},
          {"image shape", shape_words(data.image_shape())},
          {"number of classes", std::to_string(data.classes)},
          {"number of training images", std::to_string(data.train.size())},
          {"--optimizer", options.optimizer},
          {"type of the weights", words_of_weights(precision_of(options))},
          {"--seed", std::to_string(options.seed)}};
}

std::string describe(const Options& options, const Dataset& data, const torch::nn::Module& model,
                     torch::Device device) {
  const std::string precision =
      options.opt_level == "O0" ? "fp32" : options.opt_level + " in " + options.amp;
  char text[320];
  std::snprintf(text, sizeof(text),
                "%s, %.1f million parameters; %s, %lld training and %lld test images of %s; %s, "
                "learning rate %g, %s; %d rank%s on %s, %d thread%s each",
                options.model.c_str(), static_cast<double>(count_parameters(model)) / 1e6,
                data.name.c_str(), static_cast<long long>(data.train.size()),
                static_cast<long long>(data.test.size()), shape_words(data.image_shape()).c_str(),
                options.optimizer.c_str(), options.learning_rate, precision.c_str(), hvd::size(),
                hvd::size() == 1 ? "" : "s", device.str().c_str(), torch::get_num_threads(),
                torch::get_num_threads() == 1 ? "" : "s");
  return text;
}

}  // namespace examples
