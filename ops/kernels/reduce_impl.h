#pragma once
/// This file has the vector kernels; one file per instruction set includes it. The width follows
/// from the compiler's flags; everything is in an unnamed namespace, and nothing from the library
/// is instantiated, so that no function compiled with these flags can be linked into code that runs
/// on a lesser processor.
///
/// A step takes `kSteps` vectors through all inputs in rank order, in registers, and stores them to
/// all outputs: every cache line is read once and written once, whatever the number of ranks, and
/// in place costs no extra traffic.
///
/// Tried in place with AVX-512 on Zen 4, 64 MiB per rank: two or four vectors a step are no faster
/// in cache, and up to 30% slower from memory for single combinations (fp32 x4: 53 instead of 74
/// GB/s; bf16 x4: 44 instead of 71), depending on how the compiler happens to order the accesses;
/// prefetching 0.5 to 4 KiB ahead gains nothing. So one vector a step, unless the number of ranks
/// is unknown.
// Tested in tests/ops/kernels/reduce_test.cc

#include "ops/kernels/kernel_table.h"
#include "ops/kernels/simd.h"

namespace hvd::kernels::detail {
namespace {

/// All lanes, or the first `lanes` through a buffer: the same arithmetic for the last elements as
/// for all others.
template <class Format, bool kPart>
[[gnu::always_inline]] inline typename Format::Value load_at(const void* base, std::size_t i,
                                                             std::size_t lanes) {
  const char* from = static_cast<const char*>(base) + i * Format::kBytes;
  typename Format::Stored stored = {};
  __builtin_memcpy(&stored, from, kPart ? lanes * Format::kBytes : sizeof stored);
  return Format::unpack(stored);
}

template <class Format, bool kPart>
[[gnu::always_inline]] inline void store_at(void* base, std::size_t i, std::size_t lanes,
                                            typename Format::Stored stored) {
  char* to = static_cast<char*>(base) + i * Format::kBytes;
  __builtin_memcpy(to, &stored, kPart ? lanes * Format::kBytes : sizeof stored);
}

/// Division by a power of two is exactly multiplication with its inverse.
template <class Scalar>
struct Finish {
  Scalar divisor, inverse, postscale;
  bool divides, multiplies, scales;

  explicit Finish(const ReduceJob& job)
      : divisor(static_cast<Scalar>(job.divisor)),
        inverse(static_cast<Scalar>(1 / job.divisor)),
        postscale(static_cast<Scalar>(job.postscale)) {
    const auto whole = static_cast<std::uint64_t>(job.divisor);
    multiplies = whole > 1 && (whole & (whole - 1)) == 0;
    divides = whole > 1 && !multiplies;
    scales = job.postscale != 1;
  }
};

/// body(r) for r in [begin, end), unrolled where `kRanks` says at compile time how many there are.
template <std::size_t kRanks, class Body>
[[gnu::always_inline]] inline void each_rank(std::size_t begin, [[maybe_unused]] std::size_t end,
                                             const Body& body) {
  if constexpr (kRanks != 0) {
#pragma GCC unroll 8
    for (std::size_t r = begin; r < kRanks; ++r) body(r);
  } else {
    for (std::size_t r = begin; r < end; ++r) body(r);
  }
}

template <class From, class To, class Op, bool kPrescaled>
struct Reducer {
  using Value = typename From::Value;
  using Scalar = typename From::Scalar;
  static constexpr bool kScalable = static_cast<Scalar>(0.5) != 0;
  static constexpr std::size_t kLanes = From::kLanes;

  /// `kRanks` inputs that are the outputs too, their addresses in registers; or any number, where
  /// it is 0.
  template <std::size_t kRanks, std::size_t kSteps, bool kPart = false>
  [[gnu::always_inline]] static inline void step(const ReduceJob& job, const void* const* in,
                                                 const Finish<Scalar>& finish, Scalar prescale,
                                                 std::size_t i, std::size_t lanes = kLanes) {
    Value sums[kSteps];
    for (std::size_t k = 0; k < kSteps; ++k) {
      sums[k] = load_at<From, kPart>(in[0], i + k * kLanes, lanes);
      if constexpr (kPrescaled) sums[k] *= prescale;
    }
    each_rank<kRanks>(
        1, job.ins, [&](std::size_t r) __attribute__((always_inline)) {
          for (std::size_t k = 0; k < kSteps; ++k) {
            Value value = load_at<From, kPart>(in[r], i + k * kLanes, lanes);
            if constexpr (kPrescaled) value *= prescale;
            sums[k] = Op::combine(sums[k], value);
          }
        });
    if constexpr (kScalable) {
      if (finish.divides) {
        for (Value& sum : sums) sum /= finish.divisor;
      }
      if (finish.multiplies) {
        for (Value& sum : sums) sum *= finish.inverse;
      }
      if (finish.scales) {
        for (Value& sum : sums) sum *= finish.postscale;
      }
    }
    typename To::Stored packed[kSteps];
    for (std::size_t k = 0; k < kSteps; ++k) packed[k] = To::pack(sums[k]);
    each_rank<kRanks>(
        0, job.outs, [&](std::size_t r) __attribute__((always_inline)) {
          void* out = kRanks == 0 ? job.out[r] : const_cast<void*>(in[r]);
          for (std::size_t k = 0; k < kSteps; ++k)
            store_at<To, kPart>(out, i + k * kLanes, lanes, packed[k]);
        });
  }

  /// Fewer elements than a vector has.
  [[gnu::noinline]] static void rest(const ReduceJob& job, const Finish<Scalar>& finish,
                                     Scalar prescale, std::size_t i) {
    step<0, 1, true>(job, job.in, finish, prescale, i, job.count - i);
  }

  template <std::size_t kRanks>
  static void run(const ReduceJob& job) {
    constexpr std::size_t kSteps = kRanks == 0 ? 4 : 1;
    const Finish<Scalar> finish(job);
    const auto prescale = static_cast<Scalar>(kPrescaled ? job.prescale : 1);
    const void* here[kRanks + 1];
    for (std::size_t r = 0; r < kRanks; ++r) here[r] = job.in[r];
    const void* const* in = kRanks == 0 ? job.in : here;
    const std::size_t count = job.count;
    std::size_t i = 0;
    if constexpr (kSteps > 1) {
      for (; i + kSteps * kLanes <= count; i += kSteps * kLanes)
        step<kRanks, kSteps>(job, in, finish, prescale, i);
    }
    for (; i + kLanes <= count; i += kLanes) step<kRanks, 1>(job, in, finish, prescale, i);
    if (i < count) rest(job, finish, prescale, i);
  }

  static bool in_place(const ReduceJob& job) {
    bool equal = job.ins == job.outs;
    for (std::size_t r = 0; equal && r < job.ins; ++r) equal = job.in[r] == job.out[r];
    return equal;
  }

  static void run_any(const ReduceJob& job) {
    constexpr ReduceKernel kRuns[] = {run<0>, run<0>, run<2>, run<3>, run<4>,
                                      run<5>, run<6>, run<7>, run<8>};
    return (in_place(job) && job.ins < sizeof kRuns / sizeof *kRuns ? kRuns[job.ins] : run<0>)(job);
  }
};

template <class From, class To>
void run_convert(const ConvertJob& job) {
  using Scalar = typename From::Scalar;
  constexpr std::size_t kLanes = From::kLanes;
  const auto scale = static_cast<Scalar>(job.scale);
  std::size_t i = 0;
  for (; i + kLanes <= job.count; i += kLanes) {
    store_at<To, false>(job.dst, i, kLanes,
                        To::pack(load_at<From, false>(job.src, i, kLanes) * scale));
  }
  const std::size_t rest = job.count - i;
  if (rest != 0)
    store_at<To, true>(job.dst, i, rest, To::pack(load_at<From, true>(job.src, i, rest) * scale));
}

template <class From, class To = From>
ReduceKernel find_float(ReduceOp op, bool prescaled) {
  if (op == ReduceOp::Sum)
    return prescaled ? Reducer<From, To, Sum, true>::template run<0>
                     : Reducer<From, To, Sum, false>::run_any;
  if (op == ReduceOp::Min)
    return prescaled ? Reducer<From, To, Min, true>::template run<0>
                     : Reducer<From, To, Min, false>::template run<0>;
  if (op == ReduceOp::Max)
    return prescaled ? Reducer<From, To, Max, true>::template run<0>
                     : Reducer<From, To, Max, false>::template run<0>;
  return nullptr;
}

template <class Format>
ReduceKernel find_order(ReduceOp op) {
  if (op == ReduceOp::Min) return Reducer<Format, Format, Min, false>::template run<0>;
  return op == ReduceOp::Max ? Reducer<Format, Format, Max, false>::template run<0> : nullptr;
}

/// Sums of unsigned numbers have the bits of sums of signed ones, and may wrap.
template <class Integer, class Unsigned>
ReduceKernel find_integer(ReduceOp op) {
  using Bits = Plain<Unsigned>;
  if (op == ReduceOp::Sum) return Reducer<Bits, Bits, Sum, false>::run_any;
  if (op == ReduceOp::BitAnd) return Reducer<Bits, Bits, And, false>::template run<0>;
  if (op == ReduceOp::BitOr) return Reducer<Bits, Bits, Or, false>::template run<0>;
  if (op == ReduceOp::BitXor) return Reducer<Bits, Bits, Xor, false>::template run<0>;
  return find_order<Plain<Integer>>(op);
}

ReduceKernel find_reduce(DataType dtype, DataType output, ReduceOp op, bool prescaled) {
  const bool widens = output != dtype;
  if (widens && output != DataType::Float32) return nullptr;
  if (dtype == DataType::Float16)
    return widens ? find_float<Half, Plain<float>>(op, prescaled) : find_float<Half>(op, prescaled);
  if (dtype == DataType::BFloat16)
    return widens ? find_float<BFloat, Plain<float>>(op, prescaled)
                  : find_float<BFloat>(op, prescaled);
  if (widens) return nullptr;
  switch (dtype) {
    case DataType::Float32: return find_float<Plain<float>>(op, prescaled);
    case DataType::Float64: return find_float<Plain<double>>(op, prescaled);
    case DataType::UInt8: return find_integer<std::uint8_t, std::uint8_t>(op);
    case DataType::Int8: return find_integer<std::int8_t, std::uint8_t>(op);
    case DataType::Int16: return find_integer<std::int16_t, std::uint16_t>(op);
    case DataType::Int32: return find_integer<std::int32_t, std::uint32_t>(op);
    case DataType::Int64: return find_integer<std::int64_t, std::uint64_t>(op);
    case DataType::Bool: return find_order<Truth>(op);
    default: return nullptr;
  }
}

template <class From>
ConvertKernel find_convert_from(DataType dst) {
  if (dst == DataType::Float16) return run_convert<From, Half>;
  if (dst == DataType::BFloat16) return run_convert<From, BFloat>;
  return dst == DataType::Float32 ? run_convert<From, Plain<float>> : nullptr;
}

ConvertKernel find_convert(DataType dst, DataType src) {
  if (src == DataType::Float16) return find_convert_from<Half>(dst);
  if (src == DataType::BFloat16) return find_convert_from<BFloat>(dst);
  if (src == DataType::Float32) return find_convert_from<Plain<float>>(dst);
  return src == DataType::Float64 && dst == src ? run_convert<Plain<double>, Plain<double>>
                                                : nullptr;
}

constexpr KernelTable kTable = {.reduce = find_reduce, .convert = find_convert};

}  // namespace
}  // namespace hvd::kernels::detail
