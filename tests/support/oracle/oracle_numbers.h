#pragma once
/// How the oracle reads and writes an element of each type. Nothing here is the library's.

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "tests/support/oracle/oracle.h"

namespace hvd::oracle {

/// A 16-bit float: bits after the point, and the exponent of the least normal number.
struct Small {
  int fraction_bits, least_exponent;
};
inline constexpr Small kHalf{10, -14};
inline constexpr Small kBrain{7, -126};
/// To nearest, ties to even; what is too large becomes infinite.
std::uint16_t narrow(double value, Small format);
double widened(std::uint16_t bits, Small format);

enum class Kind : std::uint8_t { Truth, Whole, Real };

/// An element (of complex numbers: one of its two parts) as `Stored` in memory, and as the `Value`
/// it is computed in.
template <class StoredType, class ValueType, Kind kKindOf, int kPartsOf>
struct NumberOf {
  using Stored = StoredType;
  using Value = ValueType;
  static constexpr Kind kKind = kKindOf;
  static constexpr int kParts = kPartsOf;
  static Stored raw(const std::byte* base, std::size_t i) {
    Stored stored;
    std::memcpy(&stored, base + i * sizeof stored, sizeof stored);
    return stored;
  }
  static void put_raw(Block& block, std::size_t i, Stored stored) {
    std::memcpy(block.data() + i * sizeof stored, &stored, sizeof stored);
  }
};

template <class T, Kind kKindOf, int kPartsOf = 1>
struct Native : NumberOf<T, T, kKindOf, kPartsOf> {
  using Base = NumberOf<T, T, kKindOf, kPartsOf>;
  static constexpr double kEpsilon =
      kKindOf == Kind::Real ? static_cast<double>(std::numeric_limits<T>::epsilon()) : 0;
  static constexpr double kLeast =
      kKindOf == Kind::Real ? static_cast<double>(std::numeric_limits<T>::denorm_min()) : 0;
  static T get(const std::byte* base, std::size_t i) { return Base::raw(base, i); }
  static void put(Block& block, std::size_t i, T value) { Base::put_raw(block, i, value); }
};

/// Two bytes that are computed in float.
template <bool kIsHalf>
struct Short : NumberOf<std::uint16_t, float, Kind::Real, 1> {
  static constexpr Small kFormat = kIsHalf ? kHalf : kBrain;
  static constexpr double kEpsilon = kIsHalf ? 0x1p-10 : 0x1p-7;
  static constexpr double kLeast = kIsHalf ? 0x1p-24 : 0x1p-133;
  static float get(const std::byte* base, std::size_t i) {
    return static_cast<float>(widened(raw(base, i), kFormat));
  }
  static void put(Block& block, std::size_t i, float value) {
    put_raw(block, i, narrow(value, kFormat));
  }
};

struct Truth : NumberOf<std::uint8_t, bool, Kind::Truth, 1> {
  static constexpr double kEpsilon = 0;
  static bool get(const std::byte* base, std::size_t i) { return raw(base, i) != 0; }
  static void put(Block& block, std::size_t i, bool value) { put_raw(block, i, value ? 1 : 0); }
};

/// Calls `use` with the number of that type.
template <class Use>
void with_number(DataType dtype, const Use& use) {
  switch (dtype) {
    case DataType::UInt8: return use(Native<std::uint8_t, Kind::Whole>());
    case DataType::Int8: return use(Native<std::int8_t, Kind::Whole>());
    case DataType::Int16: return use(Native<std::int16_t, Kind::Whole>());
    case DataType::Int32: return use(Native<std::int32_t, Kind::Whole>());
    case DataType::Int64: return use(Native<std::int64_t, Kind::Whole>());
    case DataType::Float16: return use(Short<true>());
    case DataType::BFloat16: return use(Short<false>());
    case DataType::Float32: return use(Native<float, Kind::Real>());
    case DataType::Float64: return use(Native<double, Kind::Real>());
    case DataType::Bool: return use(Truth());
    case DataType::Complex64: return use(Native<float, Kind::Real, 2>());
    case DataType::Complex128: return use(Native<double, Kind::Real, 2>());
  }
  throw std::logic_error("no such type");
}

}  // namespace hvd::oracle
