#pragma once
/// What the tutorial's programs share: data set and network. Each program has all the rest itself.

#include <torch/torch.h>

#include "images.h"

/// The images as a data set of LibTorch's kind.
class Images : public torch::data::datasets::Dataset<Images> {
 public:
  explicit Images(int count, unsigned seed = 1) {
    auto data = make_images(count, seed);
    pixels_ = torch::tensor(data.pixels).view({count, kChannels, kSide, kSide});
    labels_ = torch::tensor(data.labels);
  }
  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {pixels_[i], labels_[i]};
  }
  std::optional<std::size_t> size() const override {
    return static_cast<std::size_t>(labels_.size(0));
  }

 private:
  torch::Tensor pixels_, labels_;
};

/// Returns a new network, with random weights. GELU instead of ReLU, in whose kink a difference in
/// the last bit may become a visible one: so programs that differ in rounding alone print the same
/// six decimals.
inline torch::nn::Sequential make_network(bool batch_norm = false) {
  const auto convolution = [](int from, int to) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(from, to, 3).stride(2).padding(1));
  };
  torch::nn::Sequential network;
  network->push_back(convolution(kChannels, 16));
  if (batch_norm) network->push_back(torch::nn::BatchNorm2d(16));
  network->push_back(torch::nn::GELU());
  network->push_back(convolution(16, 32));
  if (batch_norm) network->push_back(torch::nn::BatchNorm2d(32));
  network->push_back(torch::nn::GELU());
  network->push_back(torch::nn::Flatten());
  network->push_back(torch::nn::Linear(32 * kSide / 4 * kSide / 4, kClasses));
  return network;
}

/// Returns where a program without ranks computes: on the first GPU, or else on the CPU.
inline torch::Device first_device() {
  return torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
}
