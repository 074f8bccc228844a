#include "examples/train/trainer/precision.h"

namespace examples {
namespace {

/// Batch norm of any kind, also in a TorchScript module, where classes have no names here.
bool has_running_statistics(const torch::nn::Module& module) {
  const auto buffers = module.named_buffers(/*recurse=*/false);
  const auto* const mean = buffers.find("running_mean");
  return mean != nullptr && mean->defined();
}

}  // namespace

torch::Tensor Precision::input(const torch::Tensor& images) const {
  return narrow_weights && images.is_floating_point() ? images.to(narrow) : images;
}

torch::Tensor Precision::output(const torch::Tensor& scores) const { return narrow_weights ? scores.to(torch::kFloat) : scores; }

Precision precision_of(const Options& options) {
  const bool fp16 = options.amp == "fp16", autocast = options.opt_level == "O1", masters = options.opt_level == "O2";
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
      if (tensor.defined() && tensor.is_floating_point()) tensor.set_data(tensor.detach().to(precision.narrow));
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

}  // namespace examples
