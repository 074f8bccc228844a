#pragma once
/// `launch_batched_copy` and `launch_shared_reduce` (ops/gpu/kernels/kernels.h) done on host
/// memory: the oracles of the kernels on a GPU, and the kernels of the host table. Any thread, no
/// state.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "ops/gpu/kernels/kernels.h"

namespace hvd::gpu::test {

__extension__ using Half = _Float16;

struct Bfloat {
  std::uint16_t bits = 0;
  Bfloat() = default;
  explicit Bfloat(float value) {
    std::uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    bits = static_cast<std::uint16_t>(
        std::isnan(value) ? (word >> 16 | 0x40u) : (word + 0x7fffu + (word >> 16 & 1u)) >> 16);
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
    case DataType::Bool: return use(TypeTag<std::uint8_t>());
    case DataType::Int8: return use(TypeTag<std::int8_t>());
    case DataType::Int16: return use(TypeTag<std::int16_t>());
    case DataType::Int32: return use(TypeTag<std::int32_t>());
    case DataType::Int64: return use(TypeTag<std::int64_t>());
    case DataType::Float16: return use(TypeTag<Half>());
    case DataType::BFloat16: return use(TypeTag<Bfloat>());
    case DataType::Float32: return use(TypeTag<float>());
    case DataType::Float64: return use(TypeTag<double>());
    default: throw std::logic_error("with_host_type: not a real type");
  }
}

/// Carries the job out at once, one element at a time.
CudaCode copy_on_host(const CopyJob& job);
/// Does so by the scalar kernels of the host.
CudaCode reduce_job_on_host(const ReduceJob& job);

}  // namespace hvd::gpu::test
