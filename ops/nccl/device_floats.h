#pragma once
/// Room card: floats of device code: which types are floats, and the wider type in which an element is computed. Needs before it what
/// CUDA's headers or the tests' stand-ins give (__half, __nv_bfloat16, their conversions) and HVD_DEVICE.

#include <type_traits>

namespace hvd::nccl::device {

template <class T>
constexpr bool kFloating =
    std::is_same_v<T, float> || std::is_same_v<T, double> || std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

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

}  // namespace hvd::nccl::device
