#include "examples/train/models/mlp.h"

#include <functional>
#include <numeric>

namespace examples {
namespace {

class Mlp : public Classifier {
 public:
  Mlp(std::int64_t inputs, std::int64_t width, std::int64_t outputs) : fc1(inputs, width), fc2(width, width), fc3(width, outputs) {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    register_module("fc3", fc3);
  }

  torch::Tensor forward(const torch::Tensor& images) override { return fc3(torch::relu(fc2(torch::relu(fc1(images.flatten(1)))))); }

  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override {
    const auto copy = std::make_shared<Mlp>(fc1->options.in_features(), fc1->options.out_features(), fc3->options.out_features());
    return with_values_of(*this, copy, device);
  }

 private:
  torch::nn::Linear fc1, fc2, fc3;
};

}  // namespace

std::shared_ptr<Classifier> mlp(const std::vector<std::int64_t>& image, int classes, std::int64_t width) {
  return std::make_shared<Mlp>(std::accumulate(image.begin(), image.end(), std::int64_t{1}, std::multiplies<>()), width, classes);
}

}  // namespace examples
