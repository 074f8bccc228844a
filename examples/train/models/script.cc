#include "examples/train/models/script.h"

#include <torch/script.h>

#include <stdexcept>
#include <utility>

namespace examples {
namespace {

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

  torch::Tensor forward(const torch::Tensor& images) override { return script_.forward({images}).toTensor(); }

  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override {
    return std::make_shared<ScriptClassifier>(script_.deepcopy(device));
  }

  void train(bool on) override {
    Classifier::train(on);
    script_.train(on);
  }

 private:
  class Folder : public torch::nn::Module {};

  /// "layer1.0.conv1.weight": the module of "layer1.0.conv1", made where it is missing, and "weight".
  std::pair<torch::nn::Module*, std::string> home_of(const std::string& path) {
    torch::nn::Module* owner = this;
    std::size_t begin = 0;
    for (std::size_t dot = path.find('.'); dot != std::string::npos; begin = dot + 1, dot = path.find('.', begin)) {
      const std::string name = path.substr(begin, dot - begin);
      const auto children = owner->named_children();
      const auto* found = children.find(name);
      owner = found != nullptr ? found->get() : owner->register_module(name, std::make_shared<Folder>()).get();
    }
    return {owner, path.substr(begin)};
  }

  torch::jit::Module script_;
};

}  // namespace

std::shared_ptr<Classifier> script_model(const std::string& file) {
  try {
    return std::make_shared<ScriptClassifier>(torch::jit::load(file));
  } catch (const c10::Error& error) {
    const std::string words = error.what_without_backtrace();
    throw std::runtime_error(file + " is no TorchScript module that can be trained (" + words.substr(0, words.find('\n')) +
                             "); write it with torch.jit.script(model).save(FILE)");
  }
}

}  // namespace examples
