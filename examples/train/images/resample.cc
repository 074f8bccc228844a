#include "examples/train/images/resample.h"

#include <algorithm>
#include <cmath>

#include "examples/train/images/resample_impl.h"

namespace examples {
namespace {

constexpr double kOne = 1 << 22;

double triangle(double x) { return std::max(0.0, 1.0 - std::abs(x)); }

void copy_planes(const std::uint8_t* pixels, std::size_t width, bool mirror, const ChannelTables& tables, float* out, std::size_t plane) {
  const std::ptrdiff_t step = mirror ? -1 : 1;
  for (std::size_t c = 0; c < 3; ++c, out += plane) {
    float* to = mirror ? out + width - 1 : out;
    for (std::size_t x = 0; x < width; ++x, to += step) *to = tables[c][pixels[4 * x + c]];
  }
}

}  // namespace

const ResampleKernels kBaselineResampleKernels = {across, down};

const std::vector<const ResampleKernels*>& resample_kernels() {
  static const auto usable = [] {
    std::vector<const ResampleKernels*> kernels;
#ifdef HVD_EXAMPLES_X86
    const bool avx512 = __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                        __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0;
    if (avx512) kernels.push_back(&kAvx512ResampleKernels);
    if (__builtin_cpu_supports("avx2") != 0) kernels.push_back(&kAvx2ResampleKernels);
#endif
    kernels.push_back(&kBaselineResampleKernels);
    return kernels;
  }();
  return usable;
}

/// Step by step as Pillow's precompute_coeffs() and normalize_coeffs_8bpc().
void Weights::compute(const Stretch& stretch) {
  const double scale = (stretch.end - stretch.begin) / stretch.size;
  const double support = std::max(scale, 1.0), inverse = 1.0 / support;
  taps = static_cast<int>(std::ceil(support)) * 2 + 1;
  const auto count = static_cast<std::size_t>(stretch.count);
  firsts.resize(count);
  counts.resize(count);
  values.assign(count * static_cast<std::size_t>(taps), 0);
  std::vector<double> exact(static_cast<std::size_t>(taps));
  for (std::size_t i = 0; i < count; ++i) {
    const double center = stretch.begin + (stretch.first + static_cast<double>(i) + 0.5) * scale;
    const int low = std::max(static_cast<int>(center - support + 0.5), stretch.limit_low);
    const int high = std::min(static_cast<int>(center + support + 0.5), stretch.limit_high);
    double sum = 0;
    for (int x = low; x < high; ++x) sum += exact[static_cast<std::size_t>(x - low)] = triangle((x - center + 0.5) * inverse);
    for (int x = low; x < high; ++x) {
      const double weight = sum == 0 ? 0 : exact[static_cast<std::size_t>(x - low)] / sum;
      values[i * static_cast<std::size_t>(taps) + static_cast<std::size_t>(x - low)] = static_cast<std::int32_t>(0.5 + weight * kOne);
    }
    firsts[i] = low;
    counts[i] = high - low;
  }
}

void Resampler::prepare(const Stretch& across, const Stretch& down) {
  across_.compute(across);
  down_.compute(down);
}

Box Resampler::needed() const { return {across_.low(), down_.low(), across_.high() - across_.low(), down_.high() - down_.low()}; }

void Resampler::run(const Pixels& input, bool mirror, const ChannelTables& tables, float* planes) {
  const auto& kernels = *resample_kernels().front();
  const std::size_t width = across_.firsts.size(), height = down_.firsts.size(), stride = 4 * width;
  const Box box = needed();
  narrowed_.resize(stride * static_cast<std::size_t>(box.height));
  row_.resize(stride);
  for (int y = 0; y < box.height; ++y) {
    kernels.across(input.at(box.left, box.top + y), box.left, across_, narrowed_.data() + static_cast<std::size_t>(y) * stride);
  }
  for (std::size_t y = 0; y < height; ++y) {
    const auto span = down_.span(y);
    kernels.down(narrowed_.data() + static_cast<std::size_t>(span.first - box.top) * stride, stride, span.count, span.weights, stride,
                 row_.data());
    copy_planes(row_.data(), width, mirror, tables, planes + y * width, width * height);
  }
}

}  // namespace examples
