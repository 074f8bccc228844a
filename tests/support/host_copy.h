#pragma once
/// Room card: `batched_copy.h` done on host memory, one element at a time and written to be read: the oracle of the kernels on a GPU, and
/// the kernel of the host table. Any thread, no state.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "ops/nccl/batched_copy.h"

namespace hvd::nccl::test {

__extension__ using Half = _Float16;

struct Bfloat {
  std::uint16_t bits = 0;
  Bfloat() = default;
  explicit Bfloat(float value) {
    std::uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    bits = static_cast<std::uint16_t>(std::isnan(value) ? (word >> 16 | 0x40u) : (word + 0x7fffu + (word >> 16 & 1u)) >> 16);
  }
  explicit Bfloat(double value) : Bfloat(static_cast<float>(value)) {}
  explicit operator float() const {
    const std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
  explicit operator double() const { return static_cast<float>(*this); }
};

template <class T>
constexpr bool kInteger = std::is_integral_v<T>;

template <class T>
struct TypeTag {
  using Native = T;
};

/// Calls `use` with the tag of a real type; Bool is a byte.
template <class Use>
void with_host_type(DataType dtype, const Use& use) {
  switch (dtype) {
    case DataType::UInt8:
    case DataType::Bool:
      return use(TypeTag<std::uint8_t>());
    case DataType::Int8:
      return use(TypeTag<std::int8_t>());
    case DataType::Int16:
      return use(TypeTag<std::int16_t>());
    case DataType::Int32:
      return use(TypeTag<std::int32_t>());
    case DataType::Int64:
      return use(TypeTag<std::int64_t>());
    case DataType::Float16:
      return use(TypeTag<Half>());
    case DataType::BFloat16:
      return use(TypeTag<Bfloat>());
    case DataType::Float32:
      return use(TypeTag<float>());
    case DataType::Float64:
      return use(TypeTag<double>());
    default:
      throw std::logic_error("with_host_type: not a real type");
  }
}

template <class T>
T product_on_host(T value, double factor) {
  using Limits = std::numeric_limits<T>;
  const double product = static_cast<double>(value) * factor;
  if (std::isnan(product)) return 0;
  if (product <= static_cast<double>(Limits::min())) return Limits::min();
  if (product >= static_cast<double>(Limits::max())) return Limits::max();
  return static_cast<T>(product);
}

template <class S, class D>
D copied_on_host(S value, double factor, std::int64_t divisor) {
  if constexpr (kInteger<S> && kInteger<D>) {
    const auto quotient = static_cast<S>(static_cast<std::int64_t>(value) / divisor);
    const auto scaled = [&](auto narrow) { return factor == 1 ? narrow : product_on_host(narrow, factor); };
    if constexpr (sizeof(D) > sizeof(S)) {
      return static_cast<D>(scaled(quotient));
    } else {
      return scaled(static_cast<D>(quotient));
    }
  } else if constexpr (!kInteger<S> && !kInteger<D>) {
    using Wide = std::conditional_t<std::is_same_v<S, double>, double, float>;
    return static_cast<D>(static_cast<Wide>(value) / static_cast<Wide>(divisor) * static_cast<Wide>(factor));
  } else {
    throw std::logic_error("copied_on_host: integer against float");
  }
}

/// Carries the job out at once.
inline CudaCode copy_on_host(const CopyJob& job) {
  if (!copy_supported(job)) return CudaCode::InvalidValue;
  for (const CopyItem& item : job.items) {
    if (item.count <= 0) continue;
    if (is_plain(job)) {
      std::memmove(item.dst, item.src, static_cast<std::size_t>(item.count) * element_bytes(job.from));
      continue;
    }
    with_host_type(job.from, [&](auto from) {
      with_host_type(job.to, [&](auto to) {
        using S = typename decltype(from)::Native;
        using D = typename decltype(to)::Native;
        for (std::int64_t i = 0; i < item.count; ++i) {
          static_cast<D*>(item.dst)[i] = copied_on_host<S, D>(static_cast<const S*>(item.src)[i], job.factor, job.divisor);
        }
      });
    });
  }
  return CudaCode::Success;
}

}  // namespace hvd::nccl::test
