#pragma once
/// This is a multilayer perceptron on raw pixels: small, fast, and without batch norm, so that N ranks equal one exactly.

#include <cstdint>
#include <memory>
#include <vector>

#include "examples/train/models/models.h"

namespace examples {

/// Two hidden layers of `width` rectified units.
std::shared_ptr<Classifier> mlp(const std::vector<std::int64_t>& image, int classes, std::int64_t width = 256);

}  // namespace examples
