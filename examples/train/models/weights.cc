#include "examples/train/models/weights.h"

#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/import_read.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

namespace examples {
namespace {

std::string shape_of(const torch::Tensor& tensor) {
  std::string text = "[";
  for (const auto size : tensor.sizes()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

}  // namespace

std::map<std::string, torch::Tensor> read_tensors(const std::string& file) try {
  caffe2::serialize::PyTorchStreamReader reader(file);
  // A plain dict: the reader makes nothing of the OrderedDict that state_dict() itself is.
  const auto value = torch::jit::readArchiveAndTensors("data", "", "", std::nullopt, std::nullopt, torch::Device(torch::kCPU), reader);
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
        throw std::runtime_error(file + " has no '" + item.key() + "', which the model has; take the weights of the same model");
      if (found->second.sizes() != item.value().sizes())
        throw std::runtime_error(file + ": '" + item.key() + "' has shape " + shape_of(found->second) + ", the model's has " +
                                 shape_of(item.value()) + "; take a model with as many classes and channels");
      moves.emplace_back(item.value(), found->second);
      tensors.erase(found);
    }
  };
  match(module.named_parameters());
  match(module.named_buffers());
  if (!tensors.empty())
    throw std::runtime_error(file + " has '" + tensors.begin()->first + "', which the model lacks; take the weights of the same model");
  const torch::NoGradGuard no_grad;
  for (auto& [to, from] : moves) to.copy_(from);
}

}  // namespace examples
