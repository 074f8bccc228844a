// One element at a time, written to be read: the oracle of the vector kernels, and the kernel of
// what is rare (products, complex products, scaled integers, integer averages). No intrinsics,
// nothing shared with reduce_impl.h.
//
// The accumulators of a block of elements stay in the first-level cache while the inputs pass by
// one after the other.
// Tested in tests/ops/kernels/reduce_test.cc

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "ops/kernels/reduce.h"
#include "ops/kernels/scalar_formats.h"

namespace hvd::kernels {
namespace {

using namespace scalar;

constexpr std::size_t kBlock = 512;  // elements; 8 KiB of the widest accumulator

template <class T>
constexpr bool kIsComplex =
    std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>;
template <class T>
constexpr bool kIsInteger = std::is_integral_v<T> && !std::is_same_v<T, bool>;

/// `value` * scale.
template <class T>
T scaled(T value, double scale) {
  if constexpr (std::is_same_v<T, bool>) {
    return value;
  } else if constexpr (kIsInteger<T>) {
    const double product = static_cast<double>(value) * scale;
    if (std::isnan(product)) return 0;
    // max() of int64 becomes its successor here, which is what must not be reached; the other
    // bounds are exact.
    if (product <= static_cast<double>(std::numeric_limits<T>::min()))
      return std::numeric_limits<T>::min();
    if (product >= static_cast<double>(std::numeric_limits<T>::max()))
      return std::numeric_limits<T>::max();
    return static_cast<T>(product);
  } else if constexpr (kIsComplex<T>) {
    using Real = typename T::value_type;
    return T(value.real() * static_cast<Real>(scale), value.imag() * static_cast<Real>(scale));
  } else {
    return value * static_cast<T>(scale);
  }
}

__extension__ using Int128 = __int128;

/// The accumulator: wide enough that an integer average is exact, and unsigned where the arithmetic
/// has to wrap.
template <class T, ReduceOp kOp>
struct AccumulatorOf {
  using Type = T;
};
template <class T>
requires kIsInteger<T>
struct AccumulatorOf<T, ReduceOp::Average> {
  using Type = std::conditional_t<sizeof(T) == 8, Int128, std::int64_t>;
};
template <class T, ReduceOp kOp>
requires(kIsInteger<T> &&
         (kOp == ReduceOp::Sum || kOp == ReduceOp::Product)) struct AccumulatorOf<T, kOp> {
  using Type = std::uint64_t;
};

template <ReduceOp kOp, class A>
A combined(A a, A b) {
  if constexpr (kOp == ReduceOp::Min || kOp == ReduceOp::Max) {
    if (b != b) return b;
    return (kOp == ReduceOp::Min ? b < a : b > a) ? b : a;
  } else if constexpr (kOp == ReduceOp::BitAnd) {
    return static_cast<A>(a & b);
  } else if constexpr (kOp == ReduceOp::BitOr) {
    return static_cast<A>(a | b);
  } else if constexpr (kOp == ReduceOp::BitXor) {
    return static_cast<A>(a ^ b);
  } else if constexpr (kOp == ReduceOp::Product && kIsComplex<A>) {
    return A(a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real());
  } else if constexpr (kOp == ReduceOp::Product) {
    return a * b;
  } else {
    return a + b;
  }
}

template <class T, class A>
T averaged(A sum, int divisor) {
  if constexpr (kIsInteger<T>) {
    if constexpr (sizeof(A) > 8) {
      const auto narrow = static_cast<std::int64_t>(sum);
      if (narrow == sum) return static_cast<T>(narrow / divisor);
    }
    return static_cast<T>(sum / divisor);
  } else if constexpr (kIsComplex<T>) {
    using Real = typename T::value_type;
    return T(sum.real() / static_cast<Real>(divisor), sum.imag() / static_cast<Real>(divisor));
  } else {
    return sum / static_cast<T>(divisor);
  }
}

template <class Format>
typename Format::Stored stored_at(const void* from, std::size_t i) {
  typename Format::Stored stored;
  std::memcpy(&stored, static_cast<const char*>(from) + i * sizeof stored, sizeof stored);
  return stored;
}

template <class Format, class Value>
void store_at(void* to, std::size_t i, Value value) {
  const typename Format::Stored stored = Format::store(value);
  std::memcpy(static_cast<char*>(to) + i * sizeof stored, &stored, sizeof stored);
}

using In = std::span<const void* const>;
using Out = std::span<void* const>;

template <class Format, class OutFormat, ReduceOp kOp>
void reduce_all(const Reduction& reduction, In in, Out out, std::size_t count) {
  using T = typename Format::Value;
  using A = typename AccumulatorOf<T, kOp>::Type;
  const auto load = [&](const void* from, std::size_t i) {
    const T value = Format::load(stored_at<Format>(from, i));
    return static_cast<A>(reduction.prescale == 1 ? value : scaled(value, reduction.prescale));
  };
  A block[kBlock];
  T results[kBlock];
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t length = std::min(kBlock, count - begin);
    for (std::size_t i = 0; i < length; ++i) block[i] = load(in[0], begin + i);
    for (std::size_t r = 1; r < in.size(); ++r) {
      for (std::size_t i = 0; i < length; ++i)
        block[i] = combined<kOp, A>(block[i], load(in[r], begin + i));
    }
    for (std::size_t i = 0; i < length; ++i) {
      if constexpr (kOp == ReduceOp::Average) {
        results[i] = averaged<T>(block[i], reduction.divisor);
      } else {
        results[i] = static_cast<T>(block[i]);
      }
      if (reduction.postscale != 1) results[i] = scaled(results[i], reduction.postscale);
    }
    for (void* to : out) {
      for (std::size_t i = 0; i < length; ++i) store_at<OutFormat>(to, begin + i, results[i]);
    }
  }
}

/// Requires `supported`.
template <class Format, class OutFormat = Format>
void reduce_as(const Reduction& reduction, In in, Out out, std::size_t count) {
  using T = typename Format::Value;
  if constexpr (!kIsComplex<T>) {
    if (reduction.op == ReduceOp::Min)
      return reduce_all<Format, OutFormat, ReduceOp::Min>(reduction, in, out, count);
    if (reduction.op == ReduceOp::Max)
      return reduce_all<Format, OutFormat, ReduceOp::Max>(reduction, in, out, count);
  }
  if constexpr (std::is_integral_v<T>) {
    if (reduction.op == ReduceOp::BitAnd)
      return reduce_all<Format, OutFormat, ReduceOp::BitAnd>(reduction, in, out, count);
    if (reduction.op == ReduceOp::BitOr)
      return reduce_all<Format, OutFormat, ReduceOp::BitOr>(reduction, in, out, count);
    if (reduction.op == ReduceOp::BitXor)
      return reduce_all<Format, OutFormat, ReduceOp::BitXor>(reduction, in, out, count);
  }
  if constexpr (!std::is_same_v<T, bool>) {
    if (reduction.op == ReduceOp::Sum)
      return reduce_all<Format, OutFormat, ReduceOp::Sum>(reduction, in, out, count);
    if (reduction.op == ReduceOp::Average)
      return reduce_all<Format, OutFormat, ReduceOp::Average>(reduction, in, out, count);
    if (reduction.op == ReduceOp::Product)
      return reduce_all<Format, OutFormat, ReduceOp::Product>(reduction, in, out, count);
  }
}

template <class From, class To>
void convert_as(void* dst, const void* src, std::size_t count, double scale) {
  constexpr bool kInDouble = std::is_same_v<From, Double> || std::is_same_v<To, Double>;
  using Value = std::conditional_t<kInDouble, double, float>;
  const auto factor = static_cast<Value>(scale);
  for (std::size_t i = 0; i < count; ++i)
    store_at<To>(dst, i, static_cast<Value>(From::load(stored_at<From>(src, i))) * factor);
}

[[noreturn]] void refuse(DataType from, std::string_view what) {
  throw std::invalid_argument("hvd kernels: " + std::string(name_of(from)) + " cannot be " +
                              std::string(what));
}

/// Calls `work` with the format of `dtype`.
template <class Work>
void with_format(DataType dtype, std::string_view what, const Work& work) {
  switch (dtype) {
    case DataType::Float16: return work(Half());
    case DataType::BFloat16: return work(BFloat());
    case DataType::Float32: return work(Single());
    case DataType::Float64: return work(Double());
    default: refuse(dtype, what);
  }
}

}  // namespace

void reduce_scalar(const Reduction& reduction, In in, Out out, std::size_t count) {
  if (!supported(reduction.dtype, reduction.op))
    refuse(reduction.dtype, "reduced by " + std::string(name_of(reduction.op)));
  const bool widened = reduction.output != reduction.dtype;
  if (widened && (reduction.output != DataType::Float32 || element_bytes(reduction.dtype) != 2 ||
                  is_integer(reduction.dtype))) {
    refuse(reduction.dtype, "reduced to " + std::string(name_of(reduction.output)));
  }
  if (in.empty()) {
    for (void* to : out) {
      if (count != 0) std::memset(to, 0, count * element_bytes(reduction.output));
    }
    return;
  }
  switch (reduction.dtype) {
    case DataType::UInt8: return reduce_as<Plain<std::uint8_t>>(reduction, in, out, count);
    case DataType::Int8: return reduce_as<Plain<std::int8_t>>(reduction, in, out, count);
    case DataType::Int16: return reduce_as<Plain<std::int16_t>>(reduction, in, out, count);
    case DataType::Int32: return reduce_as<Plain<std::int32_t>>(reduction, in, out, count);
    case DataType::Int64: return reduce_as<Plain<std::int64_t>>(reduction, in, out, count);
    case DataType::Float16:
      return widened ? reduce_as<Half, Single>(reduction, in, out, count)
                     : reduce_as<Half>(reduction, in, out, count);
    case DataType::BFloat16:
      return widened ? reduce_as<BFloat, Single>(reduction, in, out, count)
                     : reduce_as<BFloat>(reduction, in, out, count);
    case DataType::Float32: return reduce_as<Single>(reduction, in, out, count);
    case DataType::Float64: return reduce_as<Double>(reduction, in, out, count);
    case DataType::Bool: return reduce_as<Truth>(reduction, in, out, count);
    case DataType::Complex64:
      return reduce_as<Plain<std::complex<float>>>(reduction, in, out, count);
    case DataType::Complex128:
      return reduce_as<Plain<std::complex<double>>>(reduction, in, out, count);
  }
}

void convert_scalar(void* dst, DataType dst_type, const void* src, DataType src_type,
                    std::size_t count, double scale) {
  if (dst_type == src_type && scale == 1) {
    if (count != 0 && dst != src) std::memcpy(dst, src, count * element_bytes(dst_type));
    return;
  }
  with_format(src_type, "converted from", [&](auto from) {
    with_format(dst_type, "converted to",
                [&](auto to) { convert_as<decltype(from), decltype(to)>(dst, src, count, scale); });
  });
}

}  // namespace hvd::kernels
