#include "examples/train/models/models.h"

#include <array>

namespace examples {
namespace {

namespace nn = torch::nn;

nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t kernel,
                       std::int64_t stride) {
  return nn::Conv2d(
      nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

/// Two 3 x 3 convolutions and the way around them.
class BasicBlock : public nn::Module {
 public:
  static constexpr std::int64_t kExpansion = 1;

  BasicBlock(std::int64_t in, std::int64_t width, std::int64_t stride)
      : conv1(convolution(in, width, 3, stride)),
        bn1(width),
        conv2(convolution(width, width, 3, 1)),
        bn2(width) {
    register_module("conv1", conv1);
    register_module("bn1", bn1);
    register_module("conv2", conv2);
    register_module("bn2", bn2);
    if (stride != 1 || in != width) {
      downsample = register_module(
          "downsample", nn::Sequential(convolution(in, width, 1, stride), nn::BatchNorm2d(width)));
    }
  }

  torch::Tensor forward(const torch::Tensor& input) {
    auto around = downsample.is_empty() ? input : downsample->forward(input);
    return bn2(conv2(bn1(conv1(input)).relu_())).add_(around).relu_();
  }

 private:
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Conv2d conv2;
  nn::BatchNorm2d bn2;
  nn::Sequential downsample{nullptr};
};

/// 1 x 1 to fewer channels, 3 x 3 among those, 1 x 1 to four times as many, and the way around
/// them.
class Bottleneck : public nn::Module {
 public:
  static constexpr std::int64_t kExpansion = 4;

  Bottleneck(std::int64_t in, std::int64_t width, std::int64_t stride)
      : conv1(convolution(in, width, 1, 1)),
        bn1(width),
        conv2(convolution(width, width, 3, stride)),
        bn2(width),
        conv3(convolution(width, width * kExpansion, 1, 1)),
        bn3(width * kExpansion) {
    register_module("conv1", conv1);
    register_module("bn1", bn1);
    register_module("conv2", conv2);
    register_module("bn2", bn2);
    register_module("conv3", conv3);
    register_module("bn3", bn3);
    if (stride != 1 || in != width * kExpansion) {
      downsample = register_module("downsample",
                                   nn::Sequential(convolution(in, width * kExpansion, 1, stride),
                                                  nn::BatchNorm2d(width * kExpansion)));
    }
  }

  torch::Tensor forward(const torch::Tensor& input) {
    auto around = downsample.is_empty() ? input : downsample->forward(input);
    const auto inside = bn2(conv2(bn1(conv1(input)).relu_())).relu_();
    return bn3(conv3(inside)).add_(around).relu_();
  }

 private:
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Conv2d conv2;
  nn::BatchNorm2d bn2;
  nn::Conv2d conv3;
  nn::BatchNorm2d bn3;
  nn::Sequential downsample{nullptr};
};

template <class Block>
class ResNet : public Classifier {
 public:
  ResNet(const std::array<int, 4>& blocks, const ResNetOptions& options)
      : blocks_(blocks),
        options_(options),
        conv1(options.small_images ? convolution(options.channels, 64, 3, 1)
                                   : convolution(options.channels, 64, 7, 2)),
        bn1(64),
        fc(512 * Block::kExpansion, options.classes) {
    register_module("conv1", conv1);
    register_module("bn1", bn1);
    std::int64_t channels = 64;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      layers[i] =
          register_module("layer" + std::to_string(i + 1),
                          layer(channels, std::int64_t{64} << i, blocks[i], i == 0 ? 1 : 2));
      channels = (std::int64_t{64} << i) * Block::kExpansion;
    }
    register_module("fc", fc);
    initialise();
  }

  torch::Tensor forward(const torch::Tensor& images) override {
    auto x = bn1(conv1(images)).relu_();
    if (!options_.small_images) x = torch::max_pool2d(x, 3, 2, 1);
    for (auto& layer : layers) x = layer->forward(x);
    return fc(x.mean({2, 3}));
  }

  std::shared_ptr<nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    return with_values_of(*this, std::make_shared<ResNet>(blocks_, options_), device);
  }

 private:
  static nn::Sequential layer(std::int64_t in, std::int64_t width, int blocks,
                              std::int64_t stride) {
    nn::Sequential sequence(Block(in, width, stride));
    for (int i = 1; i < blocks; ++i)
      sequence->push_back(Block(width * Block::kExpansion, width, 1));
    return sequence;
  }

  /// Convolutions as torchvision does it; batch norm starts with weight 1 and bias 0 by itself.
  void initialise() {
    for (auto& module : this->modules(/*include_self=*/false)) {
      if (auto* convolution = module->template as<nn::Conv2d>())
        nn::init::kaiming_normal_(convolution->weight, 0, torch::kFanOut, torch::kReLU);
    }
  }

  std::array<int, 4> blocks_;
  ResNetOptions options_;
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  std::array<nn::Sequential, 4> layers{nullptr, nullptr, nullptr, nullptr};
  nn::Linear fc;
};

}  // namespace

std::shared_ptr<Classifier> resnet18(const ResNetOptions& options) {
  return std::make_shared<ResNet<BasicBlock>>(std::array<int, 4>{2, 2, 2, 2}, options);
}

std::shared_ptr<Classifier> resnet50(const ResNetOptions& options) {
  return std::make_shared<ResNet<Bottleneck>>(std::array<int, 4>{3, 4, 6, 3}, options);
}

}  // namespace examples
