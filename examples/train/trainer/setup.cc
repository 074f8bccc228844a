#include "examples/train/trainer/setup.h"

#include <hvd/torch.h>

#include <cstdio>
#include <stdexcept>

#include "examples/train/models/weights.h"
#include "examples/train/trainer/precision.h"

namespace examples {
namespace {

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

}  // namespace

torch::Device choose_device(const std::string& said) {
  const torch::Device own = hvd::local_device();  // the CPU where hvd or LibTorch is without CUDA
  const bool usable = torch::cuda::is_available() && own.is_cuda();
  if (said == "cuda" && !usable) {
    throw std::runtime_error(std::string("--device cuda: ") +
                             (hvd::cuda_built() ? "LibTorch finds no GPU here" : "hvd was built without CUDA") + "; use --device cpu");
  }
  return said == "cpu" || !usable ? torch::kCPU : own;
}

std::shared_ptr<Classifier> make_model(const Options& options, const Dataset& data, torch::Device device) {
  torch::manual_seed(options.seed);
  auto model = make_model({.name = options.model, .stem = options.stem, .image = data.image_shape(), .classes = data.classes});
  if (!options.weights.empty()) load_weights(*model, options.weights);
  model->to(device);
  take_weights_to(precision_of(options), *model);
  return model;
}

namespace {

/// The optimizer for all parameters, or for two groups of which the second has no weight decay.
template <class Optimizer, class OptimizerOptions>
std::unique_ptr<torch::optim::Optimizer> with_groups(const torch::nn::Module& model, const OptimizerOptions& all, bool decay_all) {
  if (decay_all) return std::make_unique<Optimizer>(model.parameters(), all);
  std::vector<torch::Tensor> decayed, free;
  for (const auto& parameter : model.parameters()) (parameter.dim() > 1 ? decayed : free).push_back(parameter);
  auto without = std::make_unique<OptimizerOptions>(all);
  without->weight_decay(0);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  if (!decayed.empty()) groups.emplace_back(decayed, std::make_unique<OptimizerOptions>(all));
  if (!free.empty()) groups.emplace_back(free, std::move(without));
  return std::make_unique<Optimizer>(std::move(groups), all);
}

}  // namespace

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& options, const torch::nn::Module& model) {
  namespace optim = torch::optim;
  const double rate = options.learning_rate, decay = options.weight_decay;
  if (options.optimizer == "sgd") {
    return with_groups<optim::SGD>(model, optim::SGDOptions(rate).momentum(options.momentum).weight_decay(decay), options.decay_all);
  }
  if (options.optimizer == "adam") {
    return with_groups<optim::Adam>(model, optim::AdamOptions(rate).weight_decay(decay), options.decay_all);
  }
  return with_groups<optim::AdamW>(model, optim::AdamWOptions(rate).weight_decay(decay), options.decay_all);
}

Schedule schedule_of(const Options& options) {
  // A rate that was scaled up begins as it was, others begin small.
  const double passes = static_cast<double>(hvd::size()) * static_cast<double>(options.accumulate);
  return {.kind = options.schedule,
          .steps = options.lr_steps,
          .gamma = options.lr_gamma,
          .epochs = static_cast<double>(options.epochs),
          .warmup_epochs = options.warmup_epochs,
          .first_factor = options.scale_lr && passes > 1 ? 1 / passes : 0.01};
}

std::size_t synchronize_batch_norm(Classifier& model) {
  hvd::convert_sync_batchnorm(model);
  const auto report = hvd::sync_batchnorm_report(model);
  if (!report.local.empty()) {
    throw std::runtime_error("--sync-bn: '" + report.local.front() + "' and, with it, " + std::to_string(report.local.size()) +
                             " layers with running statistics cannot be converted, as those of TorchScript never can; leave out --sync-bn");
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

std::string describe(const Options& options, const Dataset& data, const torch::nn::Module& model, torch::Device device) {
  const std::string precision = options.opt_level == "O0" ? "fp32" : options.opt_level + " in " + options.amp;
  char text[320];
  std::snprintf(text, sizeof(text),
                "%s, %.1f million parameters; %s, %lld training and %lld test images of %s; %s, learning rate %g, %s; %d rank%s on %s, %d "
                "thread%s each",
                options.model.c_str(), static_cast<double>(count_parameters(model)) / 1e6, data.name.c_str(),
                static_cast<long long>(data.train.size()), static_cast<long long>(data.test.size()),
                shape_words(data.image_shape()).c_str(), options.optimizer.c_str(), options.learning_rate, precision.c_str(), hvd::size(),
                hvd::size() == 1 ? "" : "s", device.str().c_str(), torch::get_num_threads(), torch::get_num_threads() == 1 ? "" : "s");
  return text;
}

}  // namespace examples
