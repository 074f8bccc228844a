#include "tests/support/oracle_numbers.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "tests/support/random.h"

namespace hvd::test::oracle {

namespace {

__extension__ using Wide = __int128;

/// Of a binary floating-point format with a sign bit, an exponent and `fraction` bits below them.
struct Format {
  int fraction, lowest, highest;  // exponents of the normal numbers
};
constexpr Format kHalf{10, -14, 15};
constexpr Format kBrain{7, -126, 127};

double decode_small(const Format& format, std::uint16_t bits) {
  const int field = (bits & 0x7fff) >> format.fraction;
  const int fraction = bits & ((1 << format.fraction) - 1);
  const int all_ones = format.highest - format.lowest + 2;
  double value = 0;
  if (field == all_ones) {
    value = fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (field == 0) {
    value = std::ldexp(fraction, format.lowest - format.fraction);
  } else {
    value = std::ldexp((1 << format.fraction) + fraction, field - 1 + format.lowest - format.fraction);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

std::uint16_t encode_small(const Format& format, double value) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const int all_ones = format.highest - format.lowest + 2;
  const auto made = [&](int field, int fraction) { return static_cast<std::uint16_t>(sign | field << format.fraction | fraction); };
  if (std::isnan(value)) return made(all_ones, 1 << (format.fraction - 1));
  const double size = std::fabs(value);
  if (std::isinf(size)) return made(all_ones, 0);
  if (size == 0) return made(0, 0);
  int exponent = std::max(std::ilogb(size), format.lowest);
  auto steps = static_cast<int>(std::nearbyint(std::ldexp(size, format.fraction - exponent)));
  const int one = 1 << format.fraction;
  if (steps == 2 * one) {
    steps = one;
    ++exponent;
  }
  if (exponent > format.highest) return made(all_ones, 0);
  return steps < one ? made(0, steps) : made(exponent - format.lowest + 1, steps - one);
}

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class T>
void store(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

template <class T>
T scaled(T value, double factor) {
  if (factor == 1) return value;
  if constexpr (std::is_floating_point_v<T>) {
    return value * static_cast<T>(factor);
  } else {
    const double product = static_cast<double>(value) * factor;
    const auto low = static_cast<double>(std::numeric_limits<T>::min());
    const auto high = static_cast<double>(std::numeric_limits<T>::max());
    return product <= low ? std::numeric_limits<T>::min() : product >= high ? std::numeric_limits<T>::max() : static_cast<T>(product);
  }
}

/// `at(i)` is element i's value on each rank.
template <class T>
T fold_one(const Folding& folding, const std::vector<T>& values) {
  std::vector<T> in;
  for (const T value : values) in.push_back(scaled(value, folding.prescale));
  T result = in[0];
  if (folding.op == ReduceOp::Min || folding.op == ReduceOp::Max) {
    for (const T value : in) {
      if (value != value) return value;
      if (folding.op == ReduceOp::Min ? value < result : value > result) result = value;
    }
  } else if constexpr (std::is_floating_point_v<T>) {
    for (std::size_t i = 1; i < in.size(); ++i) result = folding.op == ReduceOp::Product ? result * in[i] : result + in[i];
    if (folding.op == ReduceOp::Average) result = result / static_cast<T>(folding.divisor);
  } else {
    Wide sum = 0;
    std::uint64_t product = 1;
    for (const T value : in) {
      sum += value;
      product *= static_cast<std::uint64_t>(value);
    }
    if (folding.op == ReduceOp::Average) sum /= folding.divisor;
    result = folding.op == ReduceOp::Product ? static_cast<T>(product) : static_cast<T>(static_cast<std::uint64_t>(sum));
  }
  return scaled(result, folding.postscale);
}

template <class T, class Load, class Store>
Data fold_as(const Folding& folding, const std::vector<Data>& inputs, std::size_t count, std::size_t bytes, const Load& from,
             const Store& to) {
  Data result(count * bytes);
  std::vector<T> values(inputs.size());
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t r = 0; r < inputs.size(); ++r) values[r] = from(inputs[r].data() + i * bytes);
    to(result.data() + i * bytes, fold_one(folding, values));
  }
  return result;
}

template <class T>
Data fold_plain(const Folding& folding, const std::vector<Data>& inputs, std::size_t count) {
  return fold_as<T>(folding, inputs, count, sizeof(T), load<T>, store<T>);
}

Data fold_truth(const Folding& folding, const std::vector<Data>& inputs, std::size_t count) {
  Data result(count);
  for (std::size_t i = 0; i < count; ++i) {
    bool all = true;
    bool any = false;
    for (const auto& input : inputs) {
      all = all && input[i] != std::byte{0};
      any = any || input[i] != std::byte{0};
    }
    result[i] = std::byte{static_cast<unsigned char>(folding.op == ReduceOp::Min ? all : any)};
  }
  return result;
}

using Vector = std::vector<double>;

double dot(const Vector& a, const Vector& b) {
  long double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<long double>(a[i]) * b[i];
  return static_cast<double>(sum);
}

}  // namespace

double decode(DataType dtype, const std::byte* from) {
  if (dtype == DataType::Float16) return decode_small(kHalf, load<std::uint16_t>(from));
  if (dtype == DataType::BFloat16) return decode_small(kBrain, load<std::uint16_t>(from));
  return dtype == DataType::Float32 ? static_cast<double>(load<float>(from)) : load<double>(from);
}

void encode(DataType dtype, double value, std::byte* to) {
  if (dtype == DataType::Float16) return store(to, encode_small(kHalf, value));
  if (dtype == DataType::BFloat16) return store(to, encode_small(kBrain, value));
  if (dtype == DataType::Float32) return store(to, static_cast<float>(value));
  store(to, value);
}

Data values(std::uint64_t seed, int rank, DataType dtype, std::size_t count) {
  Random random(Random::mixed(seed) + static_cast<std::uint64_t>(rank));
  const std::size_t bytes = element_bytes(dtype);
  const bool wild = Random::mixed(seed ^ 77) % 3 == 0;  // integers of all sizes, so that sums wrap
  Data data(count * bytes);
  for (std::size_t i = 0; i < count; ++i) {
    std::byte* const to = data.data() + i * bytes;
    const std::uint64_t drawn = random.next();
    const auto step = static_cast<std::int64_t>(drawn >> 20U & 0x7ffU) - 1023;
    if (dtype == DataType::Bool) {
      *to = std::byte{static_cast<unsigned char>(drawn % 3 == 0 ? 0 : wild ? drawn >> 8U & 0xffU : 1)};
    } else if (is_integer(dtype)) {
      const std::int64_t small = step / 20;
      std::memcpy(to, wild ? static_cast<const void*>(&drawn) : static_cast<const void*>(&small), bytes);  // the low bytes
    } else if (is_complex(dtype)) {
      const DataType part = dtype == DataType::Complex64 ? DataType::Float32 : DataType::Float64;
      encode(part, static_cast<double>(step) / 48.0, to);
      encode(part, static_cast<double>(drawn & 0x3ffU) / -96.0, to + bytes / 2);
    } else {
      encode(dtype, static_cast<double>(step) / (wild ? 3000.0 : 64.0), to);
    }
  }
  return data;
}

Data fold(const Folding& folding, const std::vector<Data>& inputs, std::size_t count) {
  const auto small = [&] {
    return fold_as<float>(
        folding, inputs, count, 2, [&](const std::byte* from) { return static_cast<float>(decode(folding.dtype, from)); },
        [&](std::byte* to, float value) { encode(folding.dtype, value, to); });
  };
  switch (folding.dtype) {
    case DataType::UInt8:
      return fold_plain<std::uint8_t>(folding, inputs, count);
    case DataType::Int8:
      return fold_plain<std::int8_t>(folding, inputs, count);
    case DataType::Int16:
      return fold_plain<std::int16_t>(folding, inputs, count);
    case DataType::Int32:
      return fold_plain<std::int32_t>(folding, inputs, count);
    case DataType::Int64:
      return fold_plain<std::int64_t>(folding, inputs, count);
    case DataType::Float16:
    case DataType::BFloat16:
      return small();
    case DataType::Float32:
      return fold_plain<float>(folding, inputs, count);
    case DataType::Float64:
      return fold_plain<double>(folding, inputs, count);
    case DataType::Bool:
      return fold_truth(folding, inputs, count);
    case DataType::Complex64:  // sums and averages: the parts by themselves
      return fold_plain<float>(folding, inputs, 2 * count);
    case DataType::Complex128:
      return fold_plain<double>(folding, inputs, 2 * count);
  }
  return {};
}

std::optional<Data> adasum(const Folding& folding, const std::vector<Data>& inputs, std::size_t count) {
  const std::size_t bytes = element_bytes(folding.dtype);
  std::vector<Vector> vectors;
  double size = 0;
  for (const auto& input : inputs) {
    auto& vector = vectors.emplace_back();
    for (std::size_t i = 0; i < count; ++i) vector.push_back(decode(folding.dtype, input.data() + i * bytes) * folding.prescale);
    size = std::max(size, dot(vector, vector));
  }
  while (vectors.size() > 1) {
    std::vector<Vector> next;
    for (std::size_t v = 0; v + 1 < vectors.size(); v += 2) {
      const Vector& a = vectors[v];
      const Vector& b = vectors[v + 1];
      const double common = dot(a, b);
      const auto share = [&](double square) { return square == 0 ? 1 : 1 - common / (2 * square); };
      const double of_a = share(dot(a, a));
      const double of_b = share(dot(b, b));
      for (const Vector& vector : {a, b})
        if (const double square = dot(vector, vector); square > 0 && square < 1e-4 * size) return std::nullopt;
      auto& sum = next.emplace_back();
      for (std::size_t i = 0; i < count; ++i) sum.push_back(of_a * a[i] + of_b * b[i]);
    }
    if (vectors.size() % 2 == 1) next.push_back(vectors.back());
    vectors = std::move(next);
  }
  Data result(count * bytes);
  for (std::size_t i = 0; i < count; ++i) encode(folding.dtype, vectors[0][i] * folding.postscale, result.data() + i * bytes);
  return result;
}

}  // namespace hvd::test::oracle
