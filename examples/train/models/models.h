#pragma once
/// These functions make the image classifiers of the trainer by name. They are ordinary LibTorch modules that know nothing of other ranks.
/// Unknown names throw std::invalid_argument. A new model is a file of its own and one line in models.cc.

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace examples {

/// Images [items, channels, height, width], or what else a model takes, to scores [items, classes].
class Classifier : public torch::nn::Module {
 public:
  virtual torch::Tensor forward(const torch::Tensor& images) = 0;
};

/// For `clone()`: `copy`, a module of the same kind, on `device` (none: where `from` is) and with the values of `from`.
std::shared_ptr<torch::nn::Module> with_values_of(const torch::nn::Module& from, std::shared_ptr<torch::nn::Module> copy,
                                                  const std::optional<torch::Device>& device);

struct ModelOptions {
  std::string name;                 ///< one of model_names(), or "script:" and a file that TorchScript was saved to
  std::string stem = "auto";        ///< ResNets: one of stem_names()
  std::vector<std::int64_t> image;  ///< channels, height, width
  int classes = 0;
};

const std::vector<std::string>& model_names();
bool is_script(const std::string& name);
/// "imagenet": 7 x 7 with stride 2, then a 3 x 3 maximum with stride 2, as torchvision has it. "cifar": 3 x 3 with stride 1 and no maximum:
/// for small images more accurate, and about eight times the work. "auto" is "imagenet", whose weights fit torchvision's.
const std::vector<std::string>& stem_names();

std::shared_ptr<Classifier> make_model(const ModelOptions& options);

}  // namespace examples
