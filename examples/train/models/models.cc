#include "examples/train/models/models.h"

#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/import_read.h>
#include <torch/script.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace examples {
namespace {

constexpr std::string_view kScript = "script:";

class Mlp : public Classifier {
 public:
  Mlp(std::int64_t inputs, std::int64_t width, std::int64_t outputs)
      : fc1(inputs, width), fc2(width, width), fc3(width, outputs) {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    register_module("fc3", fc3);
  }

  torch::Tensor forward(const torch::Tensor& images) override {
    return fc3(torch::relu(fc2(torch::relu(fc1(images.flatten(1))))));
  }

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    const auto copy = std::make_shared<Mlp>(fc1->options.in_features(), fc1->options.out_features(),
                                            fc3->options.out_features());
    return with_values_of(*this, copy, device);
  }

 private:
  torch::nn::Linear fc1, fc2, fc3;
};

class ScriptClassifier : public Classifier {
 public:
  explicit ScriptClassifier(torch::jit::Module script) : script_(std::move(script)) {
    for (const auto& parameter : script_.named_parameters()) {
      auto [owner, name] = home_of(parameter.name);
      owner->register_parameter(name, parameter.value, parameter.value.requires_grad());
    }
    for (const auto& buffer : script_.named_buffers()) {
      auto [owner, name] = home_of(buffer.name);
      owner->register_buffer(name, buffer.value);
    }
  }

  torch::Tensor forward(const torch::Tensor& images) override {
    return script_.forward({images}).toTensor();
  }

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    return std::make_shared<ScriptClassifier>(script_.deepcopy(device));
  }

  void train(bool on) override {
    Classifier::train(on);
    script_.train(on);
  }

 private:
  class Folder : public torch::nn::Module {};

  /// "layer1.0.conv1.weight": the module of "layer1.0.conv1", made where it is missing, and
  /// "weight".
  std::pair<torch::nn::Module*, std::string> home_of(const std::string& path) {
    torch::nn::Module* owner = this;
    std::size_t begin = 0;
    for (std::size_t dot = path.find('.'); dot != std::string::npos;
         begin = dot + 1, dot = path.find('.', begin)) {
      const std::string name = path.substr(begin, dot - begin);
      const auto children = owner->named_children();
      const auto* found = children.find(name);
      owner = found != nullptr ? found->get()
                               : owner->register_module(name, std::make_shared<Folder>()).get();
    }
    return {owner, path.substr(begin)};
  }

  torch::jit::Module script_;
};

std::string shape_of(const torch::Tensor& tensor) {
  std::string text = "[";
  for (const auto size : tensor.sizes())
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

}  // namespace

std::shared_ptr<torch::nn::Module> with_values_of(const torch::nn::Module& from,
                                                  std::shared_ptr<torch::nn::Module> copy,
                                                  const std::optional<torch::Device>& device) {
  const torch::NoGradGuard no_grad;
  const auto fill = [&](const std::vector<torch::Tensor>& to,
                        const std::vector<torch::Tensor>& values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      to[i].set_data(values[i].detach().to(device.value_or(values[i].device()),
                                           /*non_blocking=*/false, /*copy=*/true));
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

bool is_script(const std::string& name) {
  return name.size() > kScript.size() && name.starts_with(kScript);
}

const std::vector<std::string>& stem_names() {
  static const std::vector<std::string> names = {"auto", "imagenet", "cifar"};
  return names;
}

std::shared_ptr<Classifier> make_model(const ModelOptions& options) {
  const ResNetOptions resnet{.channels = options.image.at(0),
                             .classes = options.classes,
                             .small_images = options.stem == "cifar"};
  if (options.name == "resnet18") return resnet18(resnet);
  if (options.name == "resnet50") return resnet50(resnet);
  if (is_script(options.name)) return script_model(options.name.substr(kScript.size()));
  if (options.name == "mlp") return mlp(options.image, options.classes);
  throw std::invalid_argument("there is no model '" + options.name + "'");
}

std::shared_ptr<Classifier> mlp(const std::vector<std::int64_t>& image, int classes,
                                std::int64_t width) {
  return std::make_shared<Mlp>(
      std::accumulate(image.begin(), image.end(), std::int64_t{1}, std::multiplies<>()), width,
      classes);
}

std::shared_ptr<Classifier> script_model(const std::string& file) {
  try {
    return std::make_shared<ScriptClassifier>(torch::jit::load(file));
  } catch (const c10::Error& error) {
    const std::string words = error.what_without_backtrace();
    throw std::runtime_error(file + " is no TorchScript module that can be trained (" +
                             words.substr(0, words.find('\n')) +
                             "); write it with torch.jit.script(model).save(FILE)");
  }
}

std::map<std::string, torch::Tensor> read_tensors(const std::string& file) try {
  caffe2::serialize::PyTorchStreamReader reader(file);
  // A plain dict: the reader makes nothing of the OrderedDict that state_dict() itself is.
  const auto value = torch::jit::readArchiveAndTensors("data", "", "", std::nullopt, std::nullopt,
                                                       torch::Device(torch::kCPU), reader);
  TORCH_CHECK(value.isGenericDict(), "it is no dict");
  std::map<std::string, torch::Tensor> tensors;
  for (const auto& entry : value.toGenericDict())
    if (entry.value().isTensor()) tensors[entry.key().toStringRef()] = entry.value().toTensor();
  return tensors;
} catch (const c10::Error& error) {
  const std::string words = error.what_without_backtrace();
  throw std::runtime_error(file + " holds no weights (" + words.substr(0, words.find('\n')) +
                           "); write it with torch.save(dict(model.state_dict()), FILE)");
}

void load_weights(torch::nn::Module& module, const std::string& file) {
  auto tensors = read_tensors(file);
  std::vector<std::pair<torch::Tensor, torch::Tensor>> moves;
  const auto match = [&](const auto& named) {
    for (const auto& item : named) {
      const auto found = tensors.find(item.key());
      if (found == tensors.end())
        throw std::runtime_error(file + " has no '" + item.key() +
                                 "', which the model has; take the weights of the same model");
      if (found->second.sizes() != item.value().sizes())
        throw std::runtime_error(file + ": '" + item.key() + "' has shape " +
                                 shape_of(found->second) + ", the model's has " +
                                 shape_of(item.value()) +
                                 "; take a model with as many classes and channels");
      moves.emplace_back(item.value(), found->second);
      tensors.erase(found);
    }
  };
  match(module.named_parameters());
  match(module.named_buffers());
  if (!tensors.empty())
    throw std::runtime_error(file + " has '" + tensors.begin()->first +
                             "', which the model lacks; take the weights of the same model");
  const torch::NoGradGuard no_grad;
  for (auto& [to, from] : moves) to.copy_(from);
}

}  // namespace examples
