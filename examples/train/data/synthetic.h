#pragma once
/// This is the embedded dataset: images made from a seed, bit for bit the same on every rank and in every run, without a download. Its
/// functions are pure.

#include <cstdint>

#include "examples/train/data/dataset.h"

namespace examples {

struct SyntheticOptions {
  std::int64_t train_images = 2500;
  std::int64_t test_images = 1000;
  std::int64_t side = 32;  ///< pixels
  float noise = 0.3F;      ///< deviation of the noise; a pattern's, in all colours together, is 0.42
  std::uint64_t seed = 0;
};

/// Ten classes of wave patterns, told apart by direction and wavelength. The phase and the colour (whose sign inverts the pattern) are
/// random, so an image and its negative are equally likely in every class: all classes have the same mean image, and a linear model on
/// raw pixels, which would have to score a pattern and its negative both high, cannot be right on more than about half of them.
/// A model with one hidden layer can.
Dataset make_synthetic(const SyntheticOptions& options = {});

}  // namespace examples
