#pragma once
/// This header has the element formats of the scalar kernels: how an element lies in memory, what
/// it is computed in, and how it is rounded. It takes one element at a time, with branches, so that
/// it can be checked by reading; it shares nothing with simd.h.
// Tested in tests/ops/kernels/reduce_test.cc

#include <cmath>
#include <cstdint>
#include <cstring>

namespace hvd::kernels::scalar {

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 0x1f,
                      mantissa = half & 0x3ff;
  if (exponent == 31) return float_of(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign != 0 ? -magnitude : magnitude;
}

inline std::uint16_t float_to_half(float value) {
  const std::uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u,
                      magnitude = bits & 0x7fffffffu;
  const auto result = [&](std::uint32_t rest) { return static_cast<std::uint16_t>(sign | rest); };
  if (magnitude > 0x7f800000u) return result(0x7e00);   // NaN
  if (magnitude >= 0x477ff000u) return result(0x7c00);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                        // below 2^-14: a multiple of 2^-24
    return result(static_cast<std::uint32_t>(std::nearbyint(float_of(magnitude) * 0x1p24f)));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return result((rounded - (112u << 23)) >> 13);
}

inline float bfloat_to_float(std::uint16_t bfloat) {
  return float_of(static_cast<std::uint32_t>(bfloat) << 16);
}

inline std::uint16_t float_to_bfloat(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/// Rounds to float, inexact results to the neighbour with an odd mantissa: rounding that to 16 bits
/// equals rounding `value` to them.
inline float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (std::isnan(value) || static_cast<double>(nearest) == value) return nearest;
  const bool away = std::fabs(static_cast<double>(nearest)) > std::fabs(value);
  return float_of((bits_of(nearest) - (away ? 1u : 0u)) | 1u);
}

/// The type of an element in memory (`Stored`) and the one in which it is computed (`Value`).
template <class T>
struct Plain {
  using Stored = T;
  using Value = T;
  static T load(T stored) { return stored; }
  static T store(T value) { return value; }
};
template <float (*kLoad)(std::uint16_t), std::uint16_t (*kStore)(float)>
struct SixteenBits {
  using Stored = std::uint16_t;
  using Value = float;
  static float load(Stored stored) { return kLoad(stored); }
  static Stored store(float value) { return kStore(value); }
  static Stored store(double value) { return kStore(round_to_odd(value)); }
};
using Half = SixteenBits<half_to_float, float_to_half>;
using BFloat = SixteenBits<bfloat_to_float, float_to_bfloat>;
struct Single : Plain<float> {
  static float store(float value) { return value; }
  static float store(double value) { return static_cast<float>(value); }
};
struct Double : Plain<double> {};
struct Truth {
  using Stored = std::uint8_t;
  using Value = bool;
  static bool load(Stored stored) { return stored != 0; }
  static Stored store(bool value) { return value ? 1 : 0; }
};

}  // namespace hvd::kernels::scalar
