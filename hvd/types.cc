#include "hvd/types.h"

#include <array>
#include <functional>
#include <numeric>

#include "hvd/base/text.h"

namespace hvd {

namespace {

/// Messages also have values that a cast has made and that are refused.
template <class Names, class Enum>
std::string_view name_in(const Names& names, Enum value) {
  const auto index = static_cast<std::size_t>(value);
  return index < names.size() ? names[index] : "unknown";
}

}  // namespace

std::int64_t element_count(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::string_view name_of(DataType dtype) {
  static constexpr std::array<std::string_view, kDataTypes> kNames{
      "uint8",    "int8",    "int16",   "int32", "int64",     "float16",
      "bfloat16", "float32", "float64", "bool",  "complex64", "complex128"};
  return name_in(kNames, dtype);
}

std::string_view name_of(ReduceOp op) {
  static constexpr std::array<std::string_view, 9> kNames{
      "average", "sum", "min", "max", "product", "adasum", "bitand", "bitor", "bitxor"};
  return name_in(kNames, op);
}

std::string_view name_of(OpKind kind) {
  static constexpr std::array<std::string_view, 8> kNames{"allreduce", "allgather",     "broadcast",
                                                          "alltoall",  "reducescatter", "barrier",
                                                          "join",      "control"};
  return name_in(kNames, kind);
}

std::string_view name_of(DeviceKind kind) { return kind == DeviceKind::Cpu ? "cpu" : "cuda"; }

std::string to_string(const Shape& shape) { return formatted("[{}]", joined(shape, ", ")); }

}  // namespace hvd
