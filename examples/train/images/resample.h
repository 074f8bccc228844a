#pragma once
/// Resampling here is Pillow's `resize(..., BILINEAR)`, which torchvision's transforms call: a triangle as wide as an output pixel is in
/// the input, weights in fixed point with 22 bits, first across, then down, rounded to bytes in between; the results are equal bit for bit.
/// Pure functions; a Resampler keeps its buffers and is for one thread.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "examples/train/images/pixels.h"

namespace examples {

/// A stretch of one axis of an image that becomes `size` pixels, of which `count` are wanted from `first` on.
struct Stretch {
  double begin = 0, end = 0;          ///< in pixels of the input
  int limit_low = 0, limit_high = 0;  ///< what lies outside is not looked at
  int size = 0;
  int first = 0, count = 0;
};

/// For each output pixel of an axis the input pixels that it is made of.
struct Weights {
  struct Span {
    int first, count;
    const std::int32_t* weights;
  };
  int taps = 0;  ///< room for each
  std::vector<int> firsts, counts;
  std::vector<std::int32_t> values;

  void compute(const Stretch& stretch);
  [[nodiscard]] Span span(std::size_t i) const { return {firsts[i], counts[i], values.data() + i * static_cast<std::size_t>(taps)}; }
  [[nodiscard]] int low() const { return firsts.front(); }
  [[nodiscard]] int high() const { return firsts.back() + counts.back(); }
};

/// What a byte becomes, for each channel.
using ChannelTables = std::array<std::array<float, 256>, 3>;

class Resampler {
 public:
  /// Computes the weights of an output of across.count by down.count pixels.
  void prepare(const Stretch& across, const Stretch& down);
  /// Which pixels of the input are needed.
  [[nodiscard]] Box needed() const;
  /// Writes three planes, each down.count rows of across.count numbers; mirrored left to right if asked. `input` holds at least needed().
  void run(const Pixels& input, bool mirror, const ChannelTables& tables, float* planes);

 private:
  Weights across_, down_;
  std::vector<std::uint8_t> narrowed_, row_;
};

/// The two inner loops, once per instruction set (resample_impl.h). Pixels have four bytes. Pure functions.
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
