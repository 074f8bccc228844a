#pragma once
/// These are the two inner loops of resampling, once per instruction set. Pixels have four bytes. Pure functions.

#include <cstddef>
#include <cstdint>

#include "examples/train/images/resample.h"

namespace examples {

struct ResampleKernels {
  /// One row: `row` is the pixel at column `origin` of the image.
  void (*across)(const std::uint8_t* row, int origin, const Weights& weights, std::uint8_t* out);
  /// `bytes` bytes, a multiple of 4, each of the weighted sum of `count` rows that lie `stride` bytes apart.
  void (*down)(const std::uint8_t* first_row, std::size_t stride, int count, const std::int32_t* weights, std::size_t bytes,
               std::uint8_t* out);
};

extern const ResampleKernels kBaselineResampleKernels;
#ifdef HVD_EXAMPLES_X86
extern const ResampleKernels kAvx2ResampleKernels, kAvx512ResampleKernels;
#endif

/// Those that this machine can run, the best first.
const std::vector<const ResampleKernels*>& resample_kernels();

}  // namespace examples
