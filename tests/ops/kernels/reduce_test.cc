// The reduction kernels: hand-written expectations of the rules (for the scalar version and every
// instruction set), and every instruction set against the scalar version, bit by bit: types x
// operations x ranks x counts x scales x placements.

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "ops/kernels/reduce.h"
#include "tests/support/sanitized.h"

namespace {

using namespace hvd;
using kernels::Isa;
using kernels::Reduction;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr float kNanF = std::numeric_limits<float>::quiet_NaN();

std::vector<Isa> isas() {
  std::vector<Isa> result;
  for (const Isa isa : {Isa::Baseline, Isa::Avx2, Isa::Avx512}) {
    if (kernels::available(isa)) result.push_back(isa);
  }
  return result;
}

constexpr std::array kAllTypes = {DataType::UInt8,    DataType::Int8,      DataType::Int16,
                                  DataType::Int32,    DataType::Int64,     DataType::Float16,
                                  DataType::BFloat16, DataType::Float32,   DataType::Float64,
                                  DataType::Bool,     DataType::Complex64, DataType::Complex128};
constexpr std::array kFloatTypes = {DataType::Float16, DataType::BFloat16, DataType::Float32,
                                    DataType::Float64};
constexpr std::array kOps = {ReduceOp::Sum,   ReduceOp::Average, ReduceOp::Min,
                             ReduceOp::Max,   ReduceOp::Product, ReduceOp::BitAnd,
                             ReduceOp::BitOr, ReduceOp::BitXor};

/// One element per rank reduced by `run`; the element is repeated, so that it passes through full
/// vectors and the rest.
template <class Out, class T, class Run>
Out folded(const std::vector<T>& ranks, const Run& run) {
  constexpr std::size_t kCount = 131;
  std::vector<std::vector<T>> inputs;
  std::vector<const void*> in;
  for (const T& value : ranks) inputs.emplace_back(kCount, value);
  for (const auto& input : inputs) in.push_back(input.data());
  std::vector<Out> output(kCount);
  void* out = output.data();
  run(std::span<const void* const>(in), std::span<void* const>(&out, 1), kCount);
  for (const Out& value : output) REQUIRE(std::memcmp(&value, &output[0], sizeof value) == 0);
  return output[0];
}

/// The result of the scalar version, after checking that every instruction set has the same bits
/// (or a NaN for a NaN).
template <class T, class Out = T>
Out reduced(DataType dtype, ReduceOp op, const std::vector<T>& ranks, Reduction more = {}) {
  more.dtype = dtype;
  more.op = op;
  more.output = std::is_same_v<T, Out> ? dtype : DataType::Float32;
  if (more.divisor == 1) more.divisor = static_cast<int>(ranks.size());
  const Out expected = folded<Out>(ranks, [&](auto in, auto out, std::size_t count) {
    kernels::reduce_scalar(more, in, out, count);
  });
  for (const Isa isa : isas()) {
    const Out got = folded<Out>(ranks, [&](auto in, auto out, std::size_t count) {
      kernels::reduce(isa, more, in, out, count);
    });
    const bool same =
        std::memcmp(&got, &expected, sizeof got) == 0 || (got != got && expected != expected);
    CHECK_MESSAGE(same, kernels::name_of(isa));
  }
  return expected;
}

float sum32(const std::vector<float>& ranks) {
  return reduced(DataType::Float32, ReduceOp::Sum, ranks);
}

template <class To, class From>
To converted(DataType to_type, From value, DataType from_type, double scale = 1) {
  To result;
  kernels::convert_scalar(&result, to_type, &value, from_type, 1, scale);
  return result;
}
std::uint16_t half(float value) {
  return converted<std::uint16_t>(DataType::Float16, value, DataType::Float32);
}
std::uint16_t bfloat(float value) {
  return converted<std::uint16_t>(DataType::BFloat16, value, DataType::Float32);
}
float from_half(std::uint16_t bits) {
  return converted<float>(DataType::Float32, bits, DataType::Float16);
}

float reduced_half(ReduceOp op, const std::vector<float>& ranks, Reduction more = {}) {
  std::vector<std::uint16_t> halves;
  for (const float value : ranks) halves.push_back(half(value));
  return from_half(reduced(DataType::Float16, op, halves, more));
}
float reduced_bfloat(ReduceOp op, const std::vector<float>& ranks, Reduction more = {}) {
  std::vector<std::uint16_t> bfloats;
  for (const float value : ranks) bfloats.push_back(bfloat(value));
  return converted<float>(DataType::Float32, reduced(DataType::BFloat16, op, bfloats, more),
                          DataType::BFloat16);
}

/// `value` rounded to a format of `digits` binary digits, by arithmetic on doubles.
double rounded(double value, int digits, int least_exponent, double greatest) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), least_exponent);
  const double unit = std::ldexp(1.0, exponent - digits + 1);
  const double result = std::nearbyint(value / unit) * unit;
  return std::fabs(result) > greatest ? std::copysign(kInfinity, value) : result;
}

/// Bytes for `count` elements of a rank: ordinary values, and for floats also arbitrary bits, NaN,
/// infinities, zeros and denormals.
std::vector<unsigned char> data_of(DataType dtype, int rank, std::size_t count) {
  std::mt19937_64 random(static_cast<unsigned>(dtype) * 1000u + static_cast<unsigned>(rank));
  const std::size_t parts = is_complex(dtype) ? 2 * count : count;
  const DataType part = dtype == DataType::Complex64    ? DataType::Float32
                        : dtype == DataType::Complex128 ? DataType::Float64
                                                        : dtype;
  const std::size_t width = element_bytes(part);
  std::vector<unsigned char> bytes(parts * width);
  constexpr std::array kSpecial = {kNan,     kInfinity, -kInfinity, 0.0,   -0.0,  65504.0,
                                   -65504.0, 1e-7,      -3e-40,     1e300, 3.4e38};
  for (std::size_t i = 0; i < parts; ++i) {
    const std::uint64_t bits = random();
    unsigned char* to = &bytes[i * width];
    std::memcpy(to, &bits, width);
    if (is_integer(part) || bits % 5 == 0) continue;
    if (part == DataType::Bool) {
      *to = bits >> 8 & 1;
      continue;
    }
    const double value = bits % 16 == 1 ? kSpecial[(bits >> 8) % kSpecial.size()]
                                        : static_cast<double>(bits >> 40) * 0x1p-20 - 8;
    kernels::convert_scalar(to, part, &value, DataType::Float64, 1);
  }
  return bytes;
}

template <class T, class IsNan>
std::size_t differences(const unsigned char* a, const unsigned char* b, std::size_t count,
                        const IsNan& is_nan) {
  std::size_t result = 0;
  for (std::size_t i = 0; i < count; ++i) {
    T x, y;
    std::memcpy(&x, a + i * sizeof x, sizeof x);
    std::memcpy(&y, b + i * sizeof y, sizeof y);
    result += x != y && !(is_nan(x) && is_nan(y));
  }
  return result;
}

/// Elements whose bits differ and are not NaN in both.
std::size_t differences(DataType dtype, const unsigned char* a, const unsigned char* b,
                        std::size_t count) {
  if (count == 0 || std::memcmp(a, b, count * element_bytes(dtype)) == 0) return 0;
  const auto nan16 = [](std::uint32_t infinity) {
    return [=](std::uint16_t x) { return (x & 0x7fffu) > infinity; };
  };
  const auto nan32 = [](std::uint32_t x) { return (x & 0x7fffffffu) > 0x7f800000u; };
  const auto nan64 = [](std::uint64_t x) {
    return (x & ~(std::uint64_t{1} << 63)) > std::uint64_t{0x7ff} << 52;
  };
  switch (dtype) {
    case DataType::Float16: return differences<std::uint16_t>(a, b, count, nan16(0x7c00));
    case DataType::BFloat16: return differences<std::uint16_t>(a, b, count, nan16(0x7f80));
    case DataType::Float32: return differences<std::uint32_t>(a, b, count, nan32);
    case DataType::Complex64: return differences<std::uint32_t>(a, b, 2 * count, nan32);
    case DataType::Float64: return differences<std::uint64_t>(a, b, count, nan64);
    case DataType::Complex128: return differences<std::uint64_t>(a, b, 2 * count, nan64);
    default: return count;
  }
}

// one thread: there is nothing for ThreadSanitizer to find
constexpr std::size_t kMost = test::kThreadSanitizer ? 2049 : 65537;
constexpr std::array<std::size_t, 9> kCounts = {0, 1, 15, 16, 17, 63, 65, 1000, kMost};
constexpr std::size_t kMargin = 64;
enum class Placement { Apart, InPlace, Odd };

/// Memory for `bytes` bytes with a margin on both sides, that must not be written to.
struct Guarded {
  std::vector<unsigned char> memory;
  std::size_t offset = 0, bytes = 0;

  unsigned char* prepare(std::size_t size, std::size_t shift) {
    offset = kMargin + shift;
    bytes = size;
    memory.resize(std::max(memory.size(), bytes + 3 * kMargin));
    std::memset(memory.data(), 0xa5, offset);
    std::memset(memory.data() + offset + bytes, 0xa5, kMargin);
    return memory.data() + offset;
  }
  bool intact() const {
    bool result = true;
    for (std::size_t i = 0; i < offset; ++i) result &= memory[i] == 0xa5;
    for (std::size_t i = 0; i < kMargin; ++i) result &= memory[offset + bytes + i] == 0xa5;
    return result;
  }
};

/// One reduction by `isa` on fresh copies of the inputs, against what the oracle computed of all
/// elements.
void check_reduce(Isa isa, const Reduction& reduction,
                  const std::vector<std::vector<unsigned char>>& inputs, std::size_t ranks,
                  std::size_t count, Placement placement,
                  const std::vector<unsigned char>& expected) {
  static std::vector<Guarded> sources(9), targets(9);
  const bool apart = placement == Placement::Apart || reduction.output != reduction.dtype;
  const std::size_t bytes = count * element_bytes(reduction.dtype),
                    out_bytes = count * element_bytes(reduction.output);
  std::vector<const void*> in;
  std::vector<void*> out;
  for (std::size_t r = 0; r < ranks; ++r) {
    unsigned char* source = sources[r].prepare(bytes, placement == Placement::Odd ? 2 * r + 1 : 0);
    if (bytes != 0) std::memcpy(source, inputs[r].data(), bytes);
    in.push_back(source);
    if (!apart) out.push_back(source);
  }
  if (apart) {
    for (std::size_t j = 0; j < 2; ++j)
      out.push_back(targets[j].prepare(out_bytes, placement == Placement::Odd ? 3 + j : 0));
  } else if (placement == Placement::Odd && ranks > 1) {
    out.erase(out.begin());  // in place but for the first, with addresses in another order
    std::swap(out.front(), out.back());
  }
  kernels::reduce(isa, reduction, in, out, count);
  std::size_t wrong = 0;
  for (const void* one : out)
    wrong += differences(reduction.output, static_cast<const unsigned char*>(one), expected.data(),
                         count);
  bool intact = true;
  for (std::size_t r = 0; r < ranks; ++r) intact &= sources[r].intact();
  for (std::size_t j = 0; apart && j < 2; ++j) intact &= targets[j].intact();
  if (wrong != 0 || !intact) {
    FAIL_CHECK(kernels::name_of(isa)
               << " " << name_of(reduction.dtype) << " " << name_of(reduction.op) << " x" << ranks
               << " count " << count << " scales " << reduction.prescale << ", "
               << reduction.postscale << " placement " << static_cast<int>(placement) << ": "
               << wrong << " wrong" << (intact ? "" : ", wrote outside"));
  }
}

void check_type(DataType dtype) {
  std::vector<std::vector<unsigned char>> inputs;
  std::vector<const void*> in;
  for (int r = 0; r < 9; ++r) inputs.push_back(data_of(dtype, r, kMost));
  for (const auto& input : inputs) in.push_back(input.data());
  constexpr std::array<std::pair<double, double>, 4> kScales = {
      {{1, 1}, {0.3, 1}, {1, 0.7}, {1.5, -0.25}}};
  std::vector<DataType> outputs = {dtype};
  if (dtype == DataType::Float16 || dtype == DataType::BFloat16)
    outputs.push_back(DataType::Float32);

  for (const ReduceOp op : kOps) {
    if (!kernels::supported(dtype, op)) continue;
    for (const DataType output : outputs) {
      for (const std::size_t ranks : {1, 2, 3, 4, 5, 8, 9}) {
        for (const auto& [prescale, postscale] : kScales) {
          const Reduction reduction{dtype, op, prescale, postscale, static_cast<int>(ranks),
                                    output};
          const bool whole = ranks == 4 || ranks == 9;
          const std::size_t most = whole ? kMost : 1000;
          std::vector<unsigned char> expected(most * element_bytes(output));
          void* const out = expected.data();
          kernels::reduce_scalar(reduction, std::span(in).first(ranks), std::span(&out, 1), most);
          for (const Isa isa : isas()) {
            for (const Placement placement :
                 {Placement::Apart, Placement::InPlace, Placement::Odd}) {
              for (const std::size_t count : kCounts) {
                if (count > most || (count == kMost && placement == Placement::Apart)) continue;
                check_reduce(isa, reduction, inputs, ranks, count, placement, expected);
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("kernels: what exists") {
  CHECK(kernels::available(Isa::Baseline));
  CHECK(kernels::available(kernels::best_isa()));
  CHECK(kernels::name_of(Isa::Avx512) == "avx512");
  CHECK(kernels::supported(DataType::Int8, ReduceOp::Product));
  CHECK(kernels::supported(DataType::Bool, ReduceOp::Max));
  for (const ReduceOp op : {ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor}) {
    for (const DataType dtype : kFloatTypes) CHECK_FALSE(kernels::supported(dtype, op));
    CHECK_FALSE(kernels::supported(DataType::Complex64, op));
    CHECK(kernels::supported(DataType::Bool, op));
    CHECK(kernels::supported(DataType::Int16, op));
  }
  CHECK_FALSE(kernels::supported(DataType::Bool, ReduceOp::Sum));
  CHECK_FALSE(kernels::supported(DataType::Complex64, ReduceOp::Min));
  CHECK(kernels::supported(DataType::Complex128, ReduceOp::Product));
  float value = 1;
  const void* in = &value;
  void* out = &value;
  const auto run = [&](Reduction reduction) {
    kernels::reduce(reduction, std::span(&in, 1), std::span(&out, 1), 1);
  };
  for (const DataType dtype : kAllTypes) {
    CHECK_FALSE(kernels::supported(dtype, ReduceOp::Adasum));
    CHECK_THROWS_AS(run({.dtype = dtype, .op = ReduceOp::Adasum, .output = dtype}),
                    std::invalid_argument);
  }
  CHECK_THROWS_AS(
      run({.dtype = DataType::Float32, .op = ReduceOp::Sum, .output = DataType::Float64}),
      std::invalid_argument);
  CHECK_THROWS_AS(
      run({.dtype = DataType::Complex64, .op = ReduceOp::Sum, .output = DataType::Float32}),
      std::invalid_argument);
  CHECK_THROWS_AS(kernels::convert(&value, DataType::Int32, &value, DataType::Float32, 1),
                  std::invalid_argument);
  CHECK(value == 1);
}

TEST_CASE("kernels: floats are summed in rank order") {
  CHECK(sum32({1e8f, -1e8f, 1}) == 1);
  CHECK(sum32({1, 1e8f, -1e8f}) == 0);
  CHECK(std::isnan(sum32({1, kNanF, 2})));
  CHECK(sum32({3e38f, 3e38f}) == std::numeric_limits<float>::infinity());
  CHECK(reduced<double>(DataType::Float64, ReduceOp::Sum, {0.1, 0.2, 0.3}) == (0.1 + 0.2) + 0.3);
  CHECK(reduced<float>(DataType::Float32, ReduceOp::Average, {1, 1, 0}) == 2.0f / 3.0f);
  // 5 * (1 / 3.0f) would be 1.6666667 + 1 unit.
  CHECK(reduced<double>(DataType::Float64, ReduceOp::Average, {5, 0, 0}) == 5.0 / 3.0);
  // one rank has joined
  CHECK(reduced<float>(DataType::Float32, ReduceOp::Average, {1, 2, 3}, {.divisor = 4}) == 1.5f);
  CHECK(reduced<float>(DataType::Float32, ReduceOp::Sum, {1, 2},
                       {.prescale = 0.1, .postscale = 3}) == (1 * 0.1f + 2 * 0.1f) * 3);
  CHECK(reduced<float>(DataType::Float32, ReduceOp::Average, {1, 2, 4},
                       {.prescale = 0.5, .postscale = 7}) == (3.5f / 3) * 7);
  CHECK(reduced<float>(DataType::Float32, ReduceOp::Product, {2, 3, -0.5f}) == -3);
}

TEST_CASE("kernels: 16-bit floats are accumulated in float and rounded once") {
  CHECK(reduced_half(ReduceOp::Sum, {60000, 60000, -60000, -59008}) == 992);
  CHECK(reduced_half(ReduceOp::Sum, {2048, 1, 1}) == 2050);
  CHECK(reduced_half(ReduceOp::Sum, {2048, 1}) == 2048);
  CHECK(reduced_half(ReduceOp::Sum, {2050, 1}) == 2052);
  CHECK(reduced_half(ReduceOp::Sum, {65504, 65504}) == std::numeric_limits<float>::infinity());
  CHECK(reduced_half(ReduceOp::Average, {65504, 65504}) == 65504);
  CHECK(reduced_half(ReduceOp::Sum, {0x1p-24f, 0x1p-24f}) == 0x1p-23f);
  CHECK(reduced_half(ReduceOp::Sum, {0x1p-24f, 0}, {.postscale = 0.5}) == 0);
  CHECK(std::isnan(reduced_half(ReduceOp::Sum, {1, kNanF})));
  CHECK(reduced_bfloat(ReduceOp::Sum, {256, 1, 1}) == 258);
  CHECK(reduced_bfloat(ReduceOp::Sum, {256, 1}) == 256);
  CHECK(std::isnan(reduced_bfloat(ReduceOp::Sum, {kNanF, 1})));
  CHECK(reduced<std::uint16_t, float>(DataType::Float16, ReduceOp::Sum, {half(2048), half(1)}) ==
        2049);
  CHECK(reduced<std::uint16_t, float>(DataType::BFloat16, ReduceOp::Max,
                                      {bfloat(-2), bfloat(-1)}) == -1);
}

TEST_CASE("kernels: integers wrap, average exactly, scale by truncation") {
  CHECK(reduced<std::int8_t>(DataType::Int8, ReduceOp::Sum, {100, 100}) == -56);
  CHECK(reduced<std::uint8_t>(DataType::UInt8, ReduceOp::Sum, {200, 100}) == 44);
  CHECK(reduced<std::uint8_t>(DataType::UInt8, ReduceOp::Average, {200, 100}) == 150);
  CHECK(reduced<std::int32_t>(DataType::Int32, ReduceOp::Average, {-7, 0}) == -3);
  CHECK(reduced<std::int32_t>(DataType::Int32, ReduceOp::Average,
                              std::vector<std::int32_t>(49, 49)) == 49);
  constexpr auto kMax = std::numeric_limits<std::int64_t>::max(),
                 kMin = std::numeric_limits<std::int64_t>::min();
  CHECK(reduced<std::int64_t>(DataType::Int64, ReduceOp::Average, {kMax, kMax, kMax}) == kMax);
  CHECK(reduced<std::int64_t>(DataType::Int64, ReduceOp::Average, {kMin, kMin, kMin + 2}) ==
        kMin + 1);
  CHECK(reduced<std::int64_t>(DataType::Int64, ReduceOp::Sum, {kMax, 1}) == kMin);
  CHECK(reduced<std::int16_t>(DataType::Int16, ReduceOp::Product, {300, 300}) ==
        static_cast<std::int16_t>(90000));
  CHECK(reduced<std::int64_t>(DataType::Int64, ReduceOp::Max, {kMin, -1, kMax}) == kMax);
  CHECK(reduced<std::uint8_t>(DataType::UInt8, ReduceOp::Min, {200, 100}) == 100);
  CHECK(reduced<std::int8_t>(DataType::Int8, ReduceOp::Min, {100, -100}) == -100);
  CHECK(reduced<std::int32_t>(DataType::Int32, ReduceOp::Sum, {7, 7}, {.prescale = 0.5}) == 6);
  CHECK(reduced<std::int32_t>(DataType::Int32, ReduceOp::Sum, {-7, -7}, {.postscale = 0.25}) == -3);
  CHECK(reduced<std::uint8_t>(DataType::UInt8, ReduceOp::Max, {200, 1}, {.prescale = 2}) == 255);
  CHECK(reduced<std::uint8_t>(DataType::UInt8, ReduceOp::Max, {200, 1}, {.postscale = -1}) == 0);
  CHECK(reduced<std::int64_t>(DataType::Int64, ReduceOp::Sum, {kMax}, {.postscale = 2}) == kMax);
  CHECK(reduced<std::int64_t>(DataType::Int64, ReduceOp::Sum, {kMin}, {.postscale = 2}) == kMin);
  CHECK(reduced<std::int32_t>(DataType::Int32, ReduceOp::Sum, {5}, {.postscale = kNan}) == 0);
}

TEST_CASE("kernels: minimum, maximum, bool, complex") {
  for (const ReduceOp op : {ReduceOp::Min, ReduceOp::Max}) {
    for (std::size_t at = 0; at < 3; ++at) {
      std::vector<float> ranks = {1, 2, -3};
      ranks[at] = kNanF;
      CHECK(std::isnan(reduced(DataType::Float32, op, ranks)));
      CHECK(std::isnan(reduced_half(op, ranks)));
      CHECK(std::isnan(reduced_bfloat(op, ranks)));
    }
    CHECK(std::signbit(reduced<float>(DataType::Float32, op, {-0.0f, 0.0f})));
    CHECK_FALSE(std::signbit(reduced<double>(DataType::Float64, op, {0.0, -0.0})));
  }
  CHECK(reduced<double>(DataType::Float64, ReduceOp::Min, {2, -kInfinity, 1}, {.postscale = 2}) ==
        -kInfinity);
  CHECK(reduced<float>(DataType::Float32, ReduceOp::Max, {2, 5, 1}, {.prescale = -1}) == -1);
  CHECK(reduced<std::uint8_t>(DataType::Bool, ReduceOp::Min, {1, 2, 255}) == 1);
  CHECK(reduced<std::uint8_t>(DataType::Bool, ReduceOp::Min, {1, 0}) == 0);
  CHECK(reduced<std::uint8_t>(DataType::Bool, ReduceOp::Max, {0, 4}, {.prescale = 0.5}) == 1);
  CHECK(reduced<std::uint8_t>(DataType::Bool, ReduceOp::Max, {0, 0}) == 0);
  using C = std::complex<float>;
  CHECK(reduced<C>(DataType::Complex64, ReduceOp::Sum, {C(1, 2), C(3, -5)}, {.postscale = 2}) ==
        C(8, -6));
  CHECK(reduced<C>(DataType::Complex64, ReduceOp::Average, {C(1, 2), C(3, 4), C(5, 9)}) == C(3, 5));
  CHECK(reduced<C>(DataType::Complex64, ReduceOp::Product, {C(1, 2), C(3, 4)}) == C(-5, 10));
}

TEST_CASE("kernels: nothing in, nothing to do") {
  std::array<float, 3> values = {1, 2, 3};
  void* out = values.data();
  kernels::reduce({}, {}, std::span(&out, 1), 3);
  CHECK(values == std::array<float, 3>{0, 0, 0});
  const void* nowhere = nullptr;
  out = nullptr;
  kernels::reduce({}, std::span(&nowhere, 1), std::span(&out, 1), 0);
  kernels::convert(nullptr, DataType::Float16, nullptr, DataType::Float32, 0);
  kernels::convert(nullptr, DataType::Int8, nullptr, DataType::Int8, 0);
}

TEST_CASE("kernels: conversion rounds to nearest even, once") {
  CHECK(half(1) == 0x3c00);
  CHECK(half(-2) == 0xc000);
  CHECK(half(65519.996f) == 0x7bff);
  CHECK(half(65520) == 0x7c00);
  CHECK(half(0x1p-25f) == 0);
  CHECK(half(std::nextafter(0x1p-25f, 1.0f)) == 1);
  CHECK(half(-0.0f) == 0x8000);
  CHECK(bfloat(1) == 0x3f80);
  CHECK(bfloat(std::numeric_limits<float>::max()) == 0x7f80);
  // By way of a float this would be a tie, and round to 1.
  CHECK(converted<std::uint16_t>(DataType::Float16, 1 + 0x1p-11 + 0x1p-40, DataType::Float64) ==
        0x3c01);
  CHECK(converted<std::uint16_t>(DataType::BFloat16, 1 + 0x1p-8 + 0x1p-40, DataType::Float64) ==
        0x3f81);
  CHECK(converted<std::uint16_t>(DataType::Float16, 1e300, DataType::Float64) == 0x7c00);
  CHECK(converted<double>(DataType::Float64, 3.0f, DataType::Float32, 0.1) == 3.0 * 0.1);
  std::size_t wrong = 0;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = from_half(static_cast<std::uint16_t>(bits));
    wrong += std::isnan(value) ? (bits & 0x7fffu) <= 0x7c00u : half(value) != bits;
  }
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (std::isnan(value)) continue;
    const auto narrow =
        static_cast<float>(std::ldexp(value, static_cast<int>(random() % 64) - 32) * 0x1p-20);
    for (const float one : {value, narrow}) {
      wrong += from_half(half(one)) != rounded(one, 11, -14, 65504);
      wrong += std::bit_cast<float>(static_cast<std::uint32_t>(bfloat(one)) << 16) !=
               rounded(one, 8, -126, 0x1.fep127);
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("kernels: every conversion equals the scalar one") {
  for (const DataType from : kFloatTypes) {
    const auto source = data_of(from, 1, kMost);
    for (const DataType to : kFloatTypes) {
      for (const double scale : {1.0, 0.3, -1024.0}) {
        std::vector<unsigned char> expected(kMost * element_bytes(to));
        kernels::convert_scalar(expected.data(), to, source.data(), from, kMost, scale);
        for (const Isa isa : isas()) {
          for (const std::size_t count : kCounts) {
            for (const std::size_t shift : {0, 1}) {
              Guarded in, out;
              unsigned char* src = in.prepare(count * element_bytes(from), shift);
              if (count != 0) std::memcpy(src, source.data(), count * element_bytes(from));
              unsigned char* dst = from == to && shift != 0
                                       ? src
                                       : out.prepare(count * element_bytes(to), 2 * shift);
              kernels::convert(isa, dst, to, src, from, count, scale);
              CAPTURE(kernels::name_of(isa));
              CAPTURE(name_of(from));
              CAPTURE(name_of(to));
              CAPTURE(count);
              CHECK(differences(to, dst, expected.data(), count) == 0);
              CHECK(in.intact());
              CHECK((dst == src || out.intact()));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("kernels: every reduction equals the scalar one") {
  for (const DataType dtype : kAllTypes) check_type(dtype);
}
