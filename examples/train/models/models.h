#pragma once
/// These functions make the image classifiers of the trainer by name, and read their weights. They
/// are ordinary LibTorch modules that know nothing of other ranks. Unknown names throw
/// std::invalid_argument. A new model is a function and one line in make_model().

#include <torch/torch.h>

#include <cstdint>
#include <map>
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

/// For `clone()`: `copy`, a module of the same kind, on `device` (none: where `from` is) and with
/// the values of `from`.
std::shared_ptr<torch::nn::Module> with_values_of(const torch::nn::Module& from,
                                                  std::shared_ptr<torch::nn::Module> copy,
                                                  const std::optional<torch::Device>& device);

struct ModelOptions {
  std::string
      name;  ///< one of model_names(), or "script:" and a file that TorchScript was saved to
  std::string stem = "auto";        ///< ResNets: one of stem_names()
  std::vector<std::int64_t> image;  ///< channels, height, width
  int classes = 0;
};

const std::vector<std::string>& model_names();
bool is_script(const std::string& name);
/// "imagenet": 7 x 7 with stride 2, then a 3 x 3 maximum with stride 2, as torchvision has it.
/// "cifar": 3 x 3 with stride 1 and no maximum: for small images more accurate, and about eight
/// times the work. "auto" is "imagenet", whose weights fit torchvision's.
const std::vector<std::string>& stem_names();

std::shared_ptr<Classifier> make_model(const ModelOptions& options);

/// Residual networks (He, Zhang, Ren, Sun: Deep residual learning for image recognition, 2015).
/// Parameters and buffers are named, shaped and initialised as in torchvision, so that its weights
/// fit.
struct ResNetOptions {
  std::int64_t channels = 3;
  std::int64_t classes = 1000;
  bool small_images = false;  ///< the stem "cifar" of models.h
};

/// 62 parameters, 11.7 million numbers at 1,000 classes.
std::shared_ptr<Classifier> resnet18(const ResNetOptions& options);
/// 161 parameters, 25.6 million numbers at 1,000 classes.
std::shared_ptr<Classifier> resnet50(const ResNetOptions& options);

/// A multilayer perceptron on raw pixels, of two hidden layers of `width` rectified units: small,
/// fast, and without batch norm, so that N ranks equal one exactly.
std::shared_ptr<Classifier> mlp(const std::vector<std::int64_t>& image, int classes,
                                std::int64_t width = 256);

/// A TorchScript module from a file (`torch.jit.save` of Python, traced or scripted) as a
/// classifier that trains like one written in C++. Its parameters and buffers are registered under
/// their own names, so optimizers, checkpoints and broadcasts see them. Throws std::runtime_error
/// that names the file where it is none. It must take images [items, channels, height, width] and
/// give scores [items, classes].
std::shared_ptr<Classifier> script_model(const std::string& file);

/// The tensors, by name, of a file that Python wrote with torch.save(dict, FILE); other values are
/// passed over.
std::map<std::string, torch::Tensor> read_tensors(const std::string& file);

/// Reads weights that Python wrote, `torch.save(dict(model.state_dict()), FILE)`, for a model of
/// this folder: torchvision's fit the ResNets. Every parameter and buffer of `module` gets the
/// values that the file has under its name. Throws where one is missing, has another shape, or the
/// file has a name that the module lacks: std::runtime_error that names the file, the parameter and
/// what to do. Then the module is as it was.
void load_weights(torch::nn::Module& module, const std::string& file);

}  // namespace examples
