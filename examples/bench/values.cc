#include "examples/bench/values.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>

namespace bench {

namespace {

/// Inputs repeat after so many elements: a prime, so that no chunk boundary of the library falls in step with it.
constexpr std::size_t kPeriod = 1009;

struct Half {
  std::uint16_t bits;
};
struct BFloat {
  std::uint16_t bits;
};

double to_double(Half half) {
  const int exponent = half.bits >> 10 & 31;
  const double mantissa = half.bits & 1023;
  const double sign = (half.bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 31) return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}
double to_double(BFloat value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16); }
template <class T>
double to_double(T value) {
  return static_cast<double>(value);
}

template <class T>
T from_small(int value) {
  if constexpr (std::is_same_v<T, Half>) {
    if (value == 0) return {0};
    const int exponent = std::ilogb(value);
    return {static_cast<std::uint16_t>((exponent + 15) << 10 | ((value << (10 - exponent)) & 1023))};
  } else if constexpr (std::is_same_v<T, BFloat>) {
    return {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16)};
  } else {
    return static_cast<T>(value);
  }
}

/// Relative rounding of one operation in the type.
template <class T>
double rounding() {
  if constexpr (std::is_same_v<T, Half>) return 0x1p-10;
  if constexpr (std::is_same_v<T, BFloat>) return 0x1p-7;
  if constexpr (std::is_floating_point_v<T>) return std::numeric_limits<T>::epsilon();
  return 0;
}

int input(const Question& question, int rank, std::size_t tensor, std::size_t place) {
  const std::size_t mixed = place % kPeriod + tensor * 7 + static_cast<std::size_t>(rank) * 5;
  if (question.op == hvd::ReduceOp::Product) return mixed % 11 == 0 ? 2 : 1;
  return static_cast<int>(mixed * 3 % 11);
}

double reduced(const Question& question, std::size_t tensor, std::size_t place) {
  double result = input(question, 0, tensor, place);
  for (int rank = 1; rank < question.ranks; ++rank) {
    const double next = input(question, rank, tensor, place);
    switch (question.op) {
      case hvd::ReduceOp::Min:
        result = std::min(result, next);
        break;
      case hvd::ReduceOp::Max:
        result = std::max(result, next);
        break;
      case hvd::ReduceOp::Product:
        result *= next;
        break;
      default:
        result += next;
    }
  }
  if (question.op != hvd::ReduceOp::Average) return result;
  result /= question.ranks;
  return hvd::is_integer(question.dtype) ? std::trunc(result) : result;
}

template <class Work>
auto with_type(hvd::DataType dtype, const Work& work) {
  switch (dtype) {
    case hvd::DataType::UInt8:
      return work(std::uint8_t{});
    case hvd::DataType::Int8:
      return work(std::int8_t{});
    case hvd::DataType::Int16:
      return work(std::int16_t{});
    case hvd::DataType::Int32:
      return work(std::int32_t{});
    case hvd::DataType::Int64:
      return work(std::int64_t{});
    case hvd::DataType::Float16:
      return work(Half{});
    case hvd::DataType::BFloat16:
      return work(BFloat{});
    case hvd::DataType::Float64:
      return work(double{});
    default:
      return work(float{});
  }
}

std::size_t count_wrong(const Question& question, std::span<const std::byte> got, const std::function<double(std::size_t)>& expected) {
  return with_type(question.dtype, [&](auto type) {
    using T = decltype(type);
    std::vector<double> tile(kPeriod);
    for (std::size_t place = 0; place < kPeriod; ++place) tile[place] = expected(place);
    const double allowed = question.op == hvd::ReduceOp::Average ? rounding<T>() : 0;
    const std::size_t count = got.size() / sizeof(T);
    std::size_t wrong = 0;
    for (std::size_t begin = 0; begin < count; begin += kPeriod) {
      const std::size_t end = std::min(count, begin + kPeriod);
      for (std::size_t i = begin; i < end; ++i) {
        T value;
        std::memcpy(&value, got.data() + i * sizeof(T), sizeof(T));
        const double want = tile[i - begin];
        wrong += !(std::abs(to_double(value) - want) <= allowed * want);  // written so that NaN is wrong
      }
    }
    return wrong;
  });
}

}  // namespace

void fill(const Question& question, int rank, std::size_t tensor, std::span<std::byte> to) {
  with_type(question.dtype, [&](auto type) {
    using T = decltype(type);
    std::vector<T> tile(kPeriod);
    for (std::size_t place = 0; place < kPeriod; ++place) tile[place] = from_small<T>(input(question, rank, tensor, place));
    for (std::size_t begin = 0; begin < to.size(); begin += kPeriod * sizeof(T))
      std::memcpy(to.data() + begin, tile.data(), std::min(kPeriod * sizeof(T), to.size() - begin));
  });
}

std::size_t count_wrong_reduced(const Question& question, std::size_t tensor, std::span<const std::byte> got, std::size_t first) {
  return count_wrong(question, got, [&](std::size_t place) { return reduced(question, tensor, first + place); });
}

std::size_t count_wrong_copied(const Question& question, int rank, std::size_t tensor, std::span<const std::byte> got, std::size_t first) {
  return count_wrong(question, got, [&](std::size_t place) { return input(question, rank, tensor, first + place); });
}

}  // namespace bench
