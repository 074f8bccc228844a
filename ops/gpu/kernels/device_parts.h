#pragma once
/// This header has what the kernels share: which item a block works on, which types are floats, and
/// the wider type in which an element is computed. Before it must stand what CUDA's headers or the
/// tests' stand-ins give (__half, __nv_bfloat16, their conversions) and HVD_DEVICE.
// Tested in tests/ops/gpu/kernels/batched_copy_test.cc, tests/ops/gpu/kernels/shared_reduce_test.cc

#include <cstdint>
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

}  // namespace hvd::gpu::device
