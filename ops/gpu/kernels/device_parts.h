#pragma once
/// This header has what the kernels share: which item a block works on, the elements of one access,
/// which types are floats, the wider type in which an element is computed, and how integers are
/// scaled. Before it must stand what CUDA's headers or the tests' stand-ins give (__half,
/// __nv_bfloat16, their conversions, uint2, uint4) and HVD_DEVICE.
// Tested in tests/ops/gpu/kernels/batched_copy_test.cc, tests/ops/gpu/kernels/shared_reduce_test.cc

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace hvd::gpu::device {

/// Returns the last item of a launch's table that starts at or before chunk `block`.
template <class Table>
HVD_DEVICE int item_of(const Table& table, std::uint32_t block) {
  int low = 0, high = table.items - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.first_chunk[middle] <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// Names the word of so many bytes.
template <std::size_t kBytes>
using Word =
    std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, std::uint32_t>>;

/// Elements that are loaded or stored at once.
template <class T, int kElements>
union Group {
  static_assert(kElements * sizeof(T) == 16 || kElements * sizeof(T) == 8 ||
                kElements * sizeof(T) == 4);
  Word<kElements * sizeof(T)> word;
  T values[kElements];
  HVD_DEVICE Group() {}
};

template <class T>
constexpr bool kFloating = std::is_same_v<T, float> || std::is_same_v<T, double> ||
                           std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

HVD_DEVICE float widened(float value) { return value; }
HVD_DEVICE double widened(double value) { return value; }
HVD_DEVICE float widened(__half value) { return __half2float(value); }
HVD_DEVICE float widened(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class D, class Wide>
HVD_DEVICE D narrowed(Wide value) {
  if constexpr (std::is_same_v<D, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<D, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return static_cast<D>(value);
  }
}

template <class T>
constexpr T kLeast = std::numeric_limits<T>::min();
template <class T>
constexpr T kGreatest = std::numeric_limits<T>::max();

/// value * factor, truncated toward zero and clamped, as ops/kernels/reduce.h does it on the host.
template <class T>
HVD_DEVICE T clamped_product(T value, double factor) {
  const double product = static_cast<double>(value) * factor;
  if (product != product) return 0;
  if (product <= static_cast<double>(kLeast<T>)) return kLeast<T>;
  if (product >= static_cast<double>(kGreatest<T>)) return kGreatest<T>;
  return static_cast<T>(product);
}

}  // namespace hvd::gpu::device
