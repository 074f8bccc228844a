#pragma once
/// The words every floor shares: element types, operations, shapes, devices.
/// Values only; no thread, no state, nothing fails but the checked conversions (InvalidArgument).

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hvd {

/// Element type of a tensor. Travels in signatures as its number: append, never reorder.
enum class DataType : std::uint8_t {
  UInt8,
  Int8,
  Int16,
  Int32,
  Int64,
  Float16,
  BFloat16,
  Float32,
  Float64,
  Bool,
  Complex64,
  Complex128,
};
inline constexpr int kDataTypes = 12;

/// How the ranks' values are combined. Average is the sum divided by the size of the process set.
enum class ReduceOp : std::uint8_t { Average, Sum, Min, Max, Product, Adasum };

/// What a submission asks for.
enum class OpKind : std::uint8_t { Allreduce, Allgather, Broadcast, Alltoall, Reducescatter, Barrier, Join, Control };

/// Whether the operation combines values.
constexpr bool reduces(OpKind kind) { return kind == OpKind::Allreduce || kind == OpKind::Reducescatter; }

enum class DeviceKind : std::uint8_t { Cpu, Cuda };

struct Device {
  DeviceKind kind = DeviceKind::Cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

/// Sizes of the dimensions, outermost first; empty for a scalar.
using Shape = std::vector<std::int64_t>;

/// Bytes of one element.
constexpr std::size_t element_bytes(DataType dtype) {
  switch (dtype) {
    case DataType::UInt8:
    case DataType::Int8:
    case DataType::Bool:
      return 1;
    case DataType::Int16:
    case DataType::Float16:
    case DataType::BFloat16:
      return 2;
    case DataType::Int32:
    case DataType::Float32:
      return 4;
    case DataType::Int64:
    case DataType::Float64:
    case DataType::Complex64:
      return 8;
    case DataType::Complex128:
      return 16;
  }
  return 0;
}

/// Where tensors in one block of memory begin: multiples of this many bytes.
inline constexpr std::size_t kMemberAlignment = 64;
constexpr std::size_t aligned_to_member(std::size_t bytes) { return (bytes + kMemberAlignment - 1) / kMemberAlignment * kMemberAlignment; }

/// Integers proper; Bool is none of them.
constexpr bool is_integer(DataType dtype) { return dtype <= DataType::Int64; }
constexpr bool is_complex(DataType dtype) { return dtype == DataType::Complex64 || dtype == DataType::Complex128; }

/// Number of elements; 1 for a scalar.
std::int64_t element_count(const Shape& shape);

/// "float32", "int8", ...: the spelling of messages, bench columns and timelines.
std::string_view name_of(DataType dtype);
std::string_view name_of(ReduceOp op);
std::string_view name_of(OpKind kind);
std::string_view name_of(DeviceKind kind);
/// "[17, 3]"
std::string to_string(const Shape& shape);

}  // namespace hvd
