#pragma once
/// This draws the pictures of the embedded dataset (data/dataset.h) into bytes, without LibTorch. A
/// pure function.

#include <cstdint>

namespace examples {

constexpr int kSyntheticClasses = 10;

struct SyntheticPicture {
  int side = 32;       ///< pixels
  float noise = 0.3F;  ///< deviation of the noise
  std::uint64_t seed = 0;
};

/// Draws picture `number` of a split (0: training, 1: test) of the class `label`: three planes of
/// side x side bytes.
void draw_synthetic(std::uint8_t* planes, int label, const SyntheticPicture& options,
                    std::uint64_t split, std::uint64_t number);

}  // namespace examples
