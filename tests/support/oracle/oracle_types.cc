// The oracle's types: names, sizes, 16-bit floats, and the values that tests are made of.

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "tests/support/oracle/oracle.h"
#include "tests/support/oracle/oracle_numbers.h"

namespace hvd::oracle {

namespace {

struct Facts {
  const char* name;
  std::size_t bytes;
};

Facts facts(DataType dtype) {
  switch (dtype) {
    case DataType::UInt8: return {"uint8", 1};
    case DataType::Int8: return {"int8", 1};
    case DataType::Int16: return {"int16", 2};
    case DataType::Int32: return {"int32", 4};
    case DataType::Int64: return {"int64", 8};
    case DataType::Float16: return {"float16", 2};
    case DataType::BFloat16: return {"bfloat16", 2};
    case DataType::Float32: return {"float32", 4};
    case DataType::Float64: return {"float64", 8};
    case DataType::Bool: return {"bool", 1};
    case DataType::Complex64: return {"complex64", 8};
    case DataType::Complex128: return {"complex128", 16};
  }
  throw std::logic_error("no such type");
}

std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

std::uint64_t draw(int rank, std::size_t index, std::uint64_t salt) {
  return mix(mix(salt * 131 + static_cast<std::uint64_t>(rank) + 1) + index);
}

/// From -1 to 1, with 30 random bits.
double unit(std::uint64_t random) {
  return static_cast<double>(static_cast<std::int64_t>(random >> 33) - (1LL << 30)) / (1LL << 30);
}

double real_value(DataType dtype, ReduceOp op, Values values, int rank, std::size_t index,
                  std::uint64_t random) {
  if (values == Values::Exact) return static_cast<double>(random % 7) - 3;
  if (op == ReduceOp::Product) return (random & 1U ? 1 : -1) * (1 + unit(random) / 2);
  // Sums that overflow 16 bits where the average does not.
  if (values == Values::Full && dtype == DataType::Float16 && op == ReduceOp::Average &&
      index % 7 == 3)
    return 50000 + 64 * rank;
  const double value = 4 * unit(random);
  return value == 0 ? 1 : value;  // no zero: which sign it gets is nobody's promise
}

std::int64_t whole_value(std::int64_t low, std::int64_t high, ReduceOp op, Values values, int ranks,
                         std::uint64_t random) {
  if (values == Values::Exact) return static_cast<std::int64_t>(random % 4);
  if (values == Values::Full) return static_cast<std::int64_t>(random);
  if (op == ReduceOp::Product) return static_cast<std::int64_t>(random % 2) + 1;
  // Most bits of all ranks together are set for "and", and not for "or", so that one rank's alone
  // decide.
  if (op == ReduceOp::BitAnd)
    return static_cast<std::int64_t>(random | random >> 7 | random >> 19 | random << 11);
  if (op == ReduceOp::BitOr || op == ReduceOp::BitXor)
    return static_cast<std::int64_t>(random & (random >> 7 | random << 11));
  high /= 2 * ranks;
  low /= 2 * ranks;
  return low + static_cast<std::int64_t>(random % (static_cast<std::uint64_t>(high - low) + 1));
}

}  // namespace

const char* type_name(DataType dtype) { return facts(dtype).name; }
std::size_t type_bytes(DataType dtype) { return facts(dtype).bytes; }

const char* reduction_name(ReduceOp op) {
  switch (op) {
    case ReduceOp::Average: return "average";
    case ReduceOp::Sum: return "sum";
    case ReduceOp::Min: return "min";
    case ReduceOp::Max: return "max";
    case ReduceOp::Product: return "product";
    case ReduceOp::Adasum: return "adasum";
    case ReduceOp::BitAnd: return "bitand";
    case ReduceOp::BitOr: return "bitor";
    case ReduceOp::BitXor: return "bitxor";
  }
  throw std::logic_error("no such reduction");
}

std::string shape_text(const Shape& shape) {
  std::string text = "[";
  for (const auto size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

std::size_t count_of(const Shape& shape) {
  std::size_t count = 1;
  for (const auto size : shape) count *= static_cast<std::size_t>(size);
  return count;
}

bool is_whole(DataType dtype) {
  return dtype == DataType::UInt8 || dtype == DataType::Int8 || dtype == DataType::Int16 ||
         dtype == DataType::Int32 || dtype == DataType::Int64;
}
bool is_float(DataType dtype) {
  return dtype == DataType::Float16 || dtype == DataType::BFloat16 || dtype == DataType::Float32 ||
         dtype == DataType::Float64;
}
bool is_complex_type(DataType dtype) {
  return dtype == DataType::Complex64 || dtype == DataType::Complex128;
}

bool allreduce_is_defined(DataType dtype, ReduceOp op) {
  const bool bits = op == ReduceOp::BitAnd || op == ReduceOp::BitOr || op == ReduceOp::BitXor;
  if (dtype == DataType::Bool) return op == ReduceOp::Min || op == ReduceOp::Max || bits;
  if (bits) return is_whole(dtype);
  if (is_complex_type(dtype)) return op == ReduceOp::Sum || op == ReduceOp::Average;
  return op != ReduceOp::Adasum || is_float(dtype);
}

std::uint16_t narrow(double value, Small format) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const auto infinity =
      static_cast<std::uint16_t>((0x7fff >> format.fraction_bits) << format.fraction_bits);
  if (std::isnan(value))
    return static_cast<std::uint16_t>(infinity | 1U << (format.fraction_bits - 1));
  const double size = std::fabs(value);
  if (std::isinf(size)) return sign | infinity;
  if (size == 0) return sign;
  int exponent = std::max(std::ilogb(size), format.least_exponent);
  auto steps = static_cast<long>(std::nearbyint(std::ldexp(size, format.fraction_bits - exponent)));
  if (steps == 2L << format.fraction_bits) {
    steps /= 2;
    ++exponent;
  }
  if (exponent > -format.least_exponent + 1) return sign | infinity;
  // Subnormal numbers have fewer steps than 1 << fraction_bits, and the exponent 0.
  const long field = steps < 1L << format.fraction_bits ? 0 : exponent - format.least_exponent + 1;
  return static_cast<std::uint16_t>(sign | field << format.fraction_bits |
                                    (steps & ((1L << format.fraction_bits) - 1)));
}

double widened(std::uint16_t bits, Small format) {
  const int field = (bits & 0x7fff) >> format.fraction_bits;
  const int fraction = bits & ((1 << format.fraction_bits) - 1);
  const int last = 0x7fff >> format.fraction_bits;
  double value = 0;
  if (field == last) {
    value = fraction == 0 ? INFINITY : NAN;
  } else if (field == 0) {
    value = std::ldexp(fraction, format.least_exponent - format.fraction_bits);
  } else {
    value = std::ldexp(fraction + (1 << format.fraction_bits),
                       format.least_exponent + field - 1 - format.fraction_bits);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

Block make_values(DataType dtype, ReduceOp op, Values values, int rank, int ranks,
                  std::size_t count, std::uint64_t salt) {
  Block block(count * type_bytes(dtype));
  with_number(dtype, [&]<class N>(N) {
    for (std::size_t i = 0; i < count * N::kParts; ++i) {
      const std::uint64_t random = draw(rank, i, salt);
      // mostly what changes nothing, so that one rank decides
      if constexpr (N::kKind == Kind::Truth) {
        const bool odd = random % static_cast<std::uint64_t>(ranks + 1) == 0;
        N::put(block, i, (op == ReduceOp::Min) != odd);
      } else if constexpr (N::kKind == Kind::Whole) {
        using Limits = std::numeric_limits<typename N::Stored>;
        N::put(block, i,
               static_cast<typename N::Stored>(
                   whole_value(Limits::min(), Limits::max(), op, values, ranks, random)));
      } else {
        N::put(block, i,
               static_cast<typename N::Value>(real_value(dtype, op, values, rank, i, random)));
      }
    }
  });
  return block;
}

Block make_bytes(DataType dtype, int rank, std::size_t count, std::uint64_t salt) {
  Block block(count * type_bytes(dtype));
  for (std::size_t i = 0; i < block.size(); ++i)
    block[i] = static_cast<std::byte>(draw(rank, i, salt) & (dtype == DataType::Bool ? 1U : 255U));
  return block;
}

}  // namespace hvd::oracle
