#pragma once
/// These are residual networks (He, Zhang, Ren, Sun: Deep residual learning for image recognition, 2015). Parameters and buffers are named,
/// shaped and initialised as in torchvision, so that its weights fit.

#include <cstdint>
#include <memory>

#include "examples/train/models/models.h"

namespace examples {

struct ResNetOptions {
  std::int64_t channels = 3;
  std::int64_t classes = 1000;
  bool small_images = false;  ///< the stem "cifar" of models.h
};

/// 62 parameters, 11.7 million numbers at 1,000 classes.
std::shared_ptr<Classifier> resnet18(const ResNetOptions& options);
/// 161 parameters, 25.6 million numbers at 1,000 classes.
std::shared_ptr<Classifier> resnet50(const ResNetOptions& options);

}  // namespace examples
