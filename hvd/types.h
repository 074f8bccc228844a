#pragma once
/// This file has the words that every floor shares: element types, operations, shapes, devices.
/// They are values and pure functions; any thread may use them, and nothing fails.
// Tested in tests/ops/kernels/reduce_test.cc, tests/hvd/negotiation/planner_test.cc

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#pragma GCC visibility push(default)
namespace hvd {

/// DataType is the element type of a tensor. Signatures have its number: append, never reorder.
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
/// The number of element types.
inline constexpr int kDataTypes = 12;

/// ReduceOp says how the ranks' values are combined. Average is the sum divided by the size of the
/// process set. BitAnd, BitOr and BitXor are of integers, bit by bit, and of Bool.
enum class ReduceOp : std::uint8_t {
  Average,
  Sum,
  Min,
  Max,
  Product,
  Adasum,
  BitAnd,
  BitOr,
  BitXor
};

/// Returns whether the operation combines bits.
constexpr bool is_bitwise(ReduceOp op) { return op >= ReduceOp::BitAnd; }

/// OpKind says what a submission asks for.
enum class OpKind : std::uint8_t {
  Allreduce,
  Allgather,
  Broadcast,
  Alltoall,
  Reducescatter,
  Barrier,
  Join,
  Control
};

/// Returns whether the operation combines values.
constexpr bool reduces(OpKind kind) {
  return kind == OpKind::Allreduce || kind == OpKind::Reducescatter;
}

/// DeviceKind says whose memory a tensor is in.
enum class DeviceKind : std::uint8_t { Cpu, Cuda };

/// A Device is the host's memory, or that of one of its GPUs.
struct Device {
  DeviceKind kind = DeviceKind::Cpu;  ///< whose memory it is
  int index = 0;  ///< number of the GPU as this process sees them; 0 for the host
  /// Compares kind and index.
  bool operator==(const Device&) const = default;
};

/// OperationTerms say what is to be done; all ranks must say the same.
struct OperationTerms {
  OpKind kind = OpKind::Allreduce;  ///< the operation
  ReduceOp op = ReduceOp::Average;  ///< Allreduce, Reducescatter
  double prescale_factor = 1;       ///< Allreduce, Reducescatter: multiplies every input
  double postscale_factor = 1;      ///< Allreduce, Reducescatter: multiplies the result
  int root = 0;                     ///< Broadcast: global rank
  /// Compares all of them.
  bool operator==(const OperationTerms&) const = default;
};

/// A Shape has the sizes of the dimensions, outermost first; it is empty for a scalar.
using Shape = std::vector<std::int64_t>;

/// Returns the bytes of one element.
constexpr std::size_t element_bytes(DataType dtype) {
  switch (dtype) {
    case DataType::UInt8:
    case DataType::Int8:
    case DataType::Bool: return 1;
    case DataType::Int16:
    case DataType::Float16:
    case DataType::BFloat16: return 2;
    case DataType::Int32:
    case DataType::Float32: return 4;
    case DataType::Int64:
    case DataType::Float64:
    case DataType::Complex64: return 8;
    case DataType::Complex128: return 16;
  }
  return 0;
}

/// Tensors in one block of memory begin at multiples of this many bytes.
inline constexpr std::size_t kMemberAlignment = 64;
/// Returns `bytes`, rounded up to the next multiple of `kMemberAlignment`.
constexpr std::size_t aligned_to_member(std::size_t bytes) {
  return (bytes + kMemberAlignment - 1) / kMemberAlignment * kMemberAlignment;
}

/// Returns whether it is an integer; Bool is none.
constexpr bool is_integer(DataType dtype) { return dtype <= DataType::Int64; }
/// Returns whether it is a complex number.
constexpr bool is_complex(DataType dtype) {
  return dtype == DataType::Complex64 || dtype == DataType::Complex128;
}

/// Returns the number of elements; 1 for a scalar.
std::int64_t element_count(const Shape& shape);

/// Returns "float32", "int8", ...: the spelling of messages, bench columns and timelines.
std::string_view name_of(DataType dtype);
/// Returns "average", "sum", ...
std::string_view name_of(ReduceOp op);
/// Returns "allreduce", "allgather", ...
std::string_view name_of(OpKind kind);
/// Returns "cpu" or "cuda".
std::string_view name_of(DeviceKind kind);
/// Returns "[17, 3]".
std::string to_string(const Shape& shape);

}  // namespace hvd
#pragma GCC visibility pop
