#include "examples/train/models/models.h"

#include <stdexcept>
#include <string_view>

#include "examples/train/models/mlp.h"
#include "examples/train/models/resnet.h"
#include "examples/train/models/script.h"

namespace examples {

namespace {
constexpr std::string_view kScript = "script:";
}  // namespace

std::shared_ptr<torch::nn::Module> with_values_of(const torch::nn::Module& from, std::shared_ptr<torch::nn::Module> copy,
                                                  const std::optional<torch::Device>& device) {
  const torch::NoGradGuard no_grad;
  const auto fill = [&](const std::vector<torch::Tensor>& to, const std::vector<torch::Tensor>& values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      to[i].set_data(values[i].detach().to(device.value_or(values[i].device()), /*non_blocking=*/false, /*copy=*/true));
  };
  fill(copy->parameters(), from.parameters());
  fill(copy->buffers(), from.buffers());
  copy->train(from.is_training());
  return copy;
}

const std::vector<std::string>& model_names() {
  static const std::vector<std::string> names = {"resnet18", "resnet50", "mlp"};
  return names;
}

bool is_script(const std::string& name) { return name.size() > kScript.size() && name.starts_with(kScript); }

const std::vector<std::string>& stem_names() {
  static const std::vector<std::string> names = {"auto", "imagenet", "cifar"};
  return names;
}

std::shared_ptr<Classifier> make_model(const ModelOptions& options) {
  const ResNetOptions resnet{.channels = options.image.at(0), .classes = options.classes, .small_images = options.stem == "cifar"};
  if (options.name == "resnet18") return resnet18(resnet);
  if (options.name == "resnet50") return resnet50(resnet);
  if (is_script(options.name)) return script_model(options.name.substr(kScript.size()));
  if (options.name == "mlp") return mlp(options.image, options.classes);
  throw std::invalid_argument("there is no model '" + options.name + "'");
}

}  // namespace examples
