#pragma once
/// This is the code of the reduction kernel (shared_reduce.cu), written so that tests can run it
/// thread by thread on the host. Before it must stand what CUDA's headers or the test's stand-ins
/// give (__half, __nv_bfloat16, uint2, uint4, their loads and stores), HVD_DEVICE, HVD_UNROLL,
/// HVD_ROLL.
///
/// Each block reduces one chunk of one item, found by a binary search over the items' first chunks.
/// Within it a thread folds 16 bytes of every rank at a time (of integers a word of 4 or 8), in
/// registers, and stores the result to every output: each element is read once and written once per
/// rank. Where an address of the item is not on a 16-byte boundary, its elements go one by one. An
/// element is read and written by the same thread, so that in place is safe.
// Tested in tests/ops/gpu/kernels/shared_reduce_test.cc, tests/gpu/shared_reduce_gpu_test.cc

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

#include "ops/gpu/kernels/device_parts.h"
#include "ops/gpu/kernels/kernels.h"

namespace hvd::gpu::reduction {

inline constexpr int kThreads = 256;
inline constexpr int kPointers = 1024;
inline constexpr int kItems = 256;
inline constexpr std::int64_t kChunkBytes = 16 * 1024;  // of each rank

struct Table {
  const void* in[kPointers];  ///< of outputs too, where they are others
  std::int64_t count[kItems];
  std::uint32_t first_chunk[kItems];
  int items;
  int ins, outs;
  bool in_place;  ///< the outputs are the inputs
};
static_assert(sizeof(Table) + 64 <= 32764, "kernel parameters end there");

/// The scales of a `kernels::Reduction`, for the device.
struct Scales {
  double prescale;
  double postscale;
  int divisor;  ///< 1 unless an average
  bool zeros;
};

enum class Fold : int { Sum, Average, Min, Max, Product };

using device::clamped_product, device::narrowed, device::widened;

/// Returns the extreme: of equal values the first; a NaN wins.
template <class A>
HVD_DEVICE A lesser(A a, A b) {
  if (b != b) return b;
  return b < a ? b : a;
}
template <class A>
HVD_DEVICE A greater(A a, A b) {
  if (b != b) return b;
  return b > a ? b : a;
}

/// Floats: Sum (and Average, by the divisor), Min, Max, Product.
template <class T, Fold kFold>
struct FoldFloats {
  Scales scales;
  using Wide = decltype(widened(T()));

  static constexpr int kGroup = 16 / sizeof(T);  ///< elements of an access
  static constexpr int kAhead = 3;               ///< loads in flight

  HVD_DEVICE Wide first(T value) const {
    const Wide wide = widened(value);
    return scales.prescale == 1 ? wide : wide * static_cast<Wide>(scales.prescale);
  }
  HVD_DEVICE Wide next(Wide so_far, T value) const {
    const Wide wide = first(value);
    if constexpr (kFold == Fold::Min) {
      return lesser(so_far, wide);
    } else if constexpr (kFold == Fold::Max) {
      return greater(so_far, wide);
    } else if constexpr (kFold == Fold::Product) {
      return so_far * wide;
    } else {
      return so_far + wide;
    }
  }
  HVD_DEVICE T last(Wide value) const {
    if (scales.zeros) value = next(value, narrowed<T>(Wide(0)));
    if (scales.divisor != 1) value /= static_cast<Wide>(scales.divisor);
    if (scales.postscale != 1) value *= static_cast<Wide>(scales.postscale);
    return narrowed<T>(value);
  }
};

__extension__ using Int128 = __int128;

/// Integers. Rare, and long, as they are scaled in double: what to do is asked at run time, and few
/// of them are folded at a time.
template <class T>
struct FoldIntegers {
  Scales scales;
  Fold fold;
  /// Wide enough for the exact sum; sums and products that wrap are those of its low bits.
  using Wide = std::conditional_t<sizeof(T) == 8, Int128,
                                  std::conditional_t<sizeof(T) == 4, std::int64_t, std::int32_t>>;
  static constexpr int kGroup = sizeof(T) < 4 ? 4 / sizeof(T) : 1;
  static constexpr int kAhead = 1;

  HVD_DEVICE Wide first(T value) const {
    return scales.prescale == 1 ? value : clamped_product(value, scales.prescale);
  }
  HVD_DEVICE Wide next(Wide so_far, T value) const {
    const Wide wide = first(value);
    switch (fold) {
      case Fold::Min: return lesser(so_far, wide);
      case Fold::Max: return greater(so_far, wide);
      case Fold::Product:
        return static_cast<Wide>(static_cast<std::int64_t>(static_cast<std::uint64_t>(so_far) *
                                                           static_cast<std::uint64_t>(wide)));
      default: return so_far + wide;
    }
  }
  HVD_DEVICE T last(Wide value) const {
    if (scales.zeros) value = next(value, 0);
    if (scales.divisor != 1) {
      using Narrow = std::conditional_t<sizeof(T) == 8, std::int64_t, Wide>;  // divides faster
      const auto narrow = static_cast<Narrow>(value);
      value = narrow == value ? static_cast<Wide>(narrow / scales.divisor) : value / scales.divisor;
    }
    const T result = static_cast<T>(value);
    return scales.postscale == 1 ? result : clamped_product(result, scales.postscale);
  }
};

/// Bool: any byte but 0 is true.
struct FoldTruths {
  Scales scales;
  Fold fold;
  using Wide = bool;
  static constexpr int kGroup = 4, kAhead = 1;

  HVD_DEVICE static bool first(std::uint8_t value) { return value != 0; }
  HVD_DEVICE bool next(bool so_far, std::uint8_t value) const {
    return fold == Fold::Min ? so_far && value != 0 : so_far || value != 0;
  }
  HVD_DEVICE std::uint8_t last(bool value) const {
    if (scales.zeros) value = next(value, 0);
    return value ? 1 : 0;
  }
};

/// The place at which the chunk begins for one of the item's addresses.
template <class T>
struct Place {
  const void* const* addresses;  ///< of the item
  std::int64_t start;

  HVD_DEVICE const T* from(int rank) const {
    return static_cast<const T*>(addresses[rank]) + start;
  }
  HVD_DEVICE T* to(int output, int ins, bool in_place) const {
    return static_cast<T*>(const_cast<void*>(addresses[in_place ? output : ins + output])) + start;
  }
};

template <class T, class F>
HVD_DEVICE void reduce_one(const Table& table, const F& fold, const Place<T>& place, int index) {
  typename F::Wide value = fold.first(place.from(0)[index]);
  for (int rank = 1; rank < table.ins; ++rank) value = fold.next(value, place.from(rank)[index]);
  const T result = fold.last(value);
  for (int output = 0; output < table.outs; ++output)
    place.to(output, table.ins, table.in_place)[index] = result;
}

template <class T, class F>
HVD_DEVICE void reduce_group(const Table& table, const F& fold, const Place<T>& place, int group) {
  using Loaded = device::Group<T, F::kGroup>;
  const auto load = [&](int rank) {
    Loaded loaded;
    loaded.word = __ldcs(reinterpret_cast<const decltype(loaded.word)*>(place.from(rank)) + group);
    return loaded;
  };
  typename F::Wide values[F::kGroup];
  const Loaded in = load(0);
  HVD_UNROLL
  for (int i = 0; i < F::kGroup; ++i) values[i] = fold.first(in.values[i]);
  int rank = 1;
  HVD_ROLL
  for (; rank + F::kAhead <= table.ins; rank += F::kAhead) {
    Loaded some[F::kAhead];
    HVD_UNROLL
    for (int k = 0; k < F::kAhead; ++k) some[k] = load(rank + k);
    HVD_UNROLL
    for (int k = 0; k < F::kAhead; ++k) {
      HVD_UNROLL
      for (int i = 0; i < F::kGroup; ++i) values[i] = fold.next(values[i], some[k].values[i]);
    }
  }
  if constexpr (F::kAhead > 1) {
    HVD_ROLL
    for (; rank < table.ins; ++rank) {
      const Loaded last = load(rank);
      HVD_UNROLL
      for (int i = 0; i < F::kGroup; ++i) values[i] = fold.next(values[i], last.values[i]);
    }
  }
  Loaded out;
  HVD_UNROLL
  for (int i = 0; i < F::kGroup; ++i) out.values[i] = fold.last(values[i]);
  for (int output = 0; output < table.outs; ++output)
    __stwb(
        reinterpret_cast<decltype(out.word)*>(place.to(output, table.ins, table.in_place)) + group,
        out.word);
}

template <class T>
constexpr std::int64_t kChunkElements = kChunkBytes / static_cast<std::int64_t>(sizeof(T));

/// Does what the thread `thread` of the block `block` does.
template <class T, class F>
HVD_DEVICE void reduce_block(const Table& table, const F& fold, std::uint32_t block, int thread) {
  const int item = device::item_of(table, block);
  const int addresses = table.in_place ? table.ins : table.ins + table.outs;
  const Place<T> place{
      table.in + item * addresses,
      static_cast<std::int64_t>(block - table.first_chunk[item]) * kChunkElements<T>};
  const std::int64_t left = table.count[item] - place.start;
  const int count = static_cast<int>(left < kChunkElements<T> ? left : kChunkElements<T>);
  std::uintptr_t bits = 0;  // chunks are whole groups, so all of an item's are aligned, or none
  for (int i = 0; i < addresses; ++i) bits |= reinterpret_cast<std::uintptr_t>(place.addresses[i]);
  constexpr int kGroup = F::kGroup;
  const int groups = bits % 16 == 0 ? count / kGroup : 0;
  for (int group = thread; group < groups; group += kThreads)
    reduce_group<T>(table, fold, place, group);
  for (int index = groups * kGroup + thread; index < count; index += kThreads)
    reduce_one<T>(table, fold, place, index);
}

// ---- the launches of a job. `Launcher::launch<T>(table, fold, chunks)` returns a CudaCode and is
// called once per kernel launch.

/// `lanes`: elements of T per element of an item.
template <class T, class F, class Launcher>
CudaCode launch_all(const ReduceJob& job, const F& fold, const Launcher& launcher, int lanes = 1) {
  Table table;
  table.ins = job.ins;
  table.outs = job.outs;
  table.in_place = job.ins == job.outs;
  for (std::size_t i = 0; table.in_place && i < job.inputs.size(); ++i)
    table.in_place = job.inputs[i] == job.outputs[i];
  const int addresses = table.in_place ? job.ins : job.ins + job.outs;
  const int room = kPointers / addresses < kItems ? kPointers / addresses : kItems;
  std::uint64_t chunks = 0;
  table.items = 0;
  const auto flush = [&] {
    if (table.items == 0) return CudaCode::Success;
    if (chunks > static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max()))
      return CudaCode::InvalidValue;
    const CudaCode code =
        launcher.template launch<T>(table, fold, static_cast<std::uint32_t>(chunks));
    table.items = 0;
    chunks = 0;
    return code;
  };
  for (std::size_t item = 0; item < job.counts.size(); ++item) {
    const std::int64_t count = job.counts[item] * lanes;
    if (count <= 0) continue;
    const void** to = table.in + table.items * addresses;
    for (int rank = 0; rank < job.ins; ++rank)
      *to++ = job.inputs[item * static_cast<std::size_t>(job.ins) + static_cast<std::size_t>(rank)];
    for (int output = 0; !table.in_place && output < job.outs; ++output)
      *to++ =
          job.outputs[item * static_cast<std::size_t>(job.outs) + static_cast<std::size_t>(output)];
    table.count[table.items] = count;
    table.first_chunk[table.items] = static_cast<std::uint32_t>(chunks);
    chunks += static_cast<std::uint64_t>((count + kChunkElements<T> - 1) / kChunkElements<T>);
    if (++table.items < room) continue;
    if (const CudaCode code = flush(); code != CudaCode::Success) return code;
  }
  return flush();
}

template <class T, class Launcher>
CudaCode reduce_floats(const ReduceJob& job, const Scales& scales, const Launcher& launcher) {
  switch (job.op) {
    case ReduceOp::Min: return launch_all<T>(job, FoldFloats<T, Fold::Min>{scales}, launcher);
    case ReduceOp::Max: return launch_all<T>(job, FoldFloats<T, Fold::Max>{scales}, launcher);
    case ReduceOp::Product:
      return launch_all<T>(job, FoldFloats<T, Fold::Product>{scales}, launcher);
    default: return launch_all<T>(job, FoldFloats<T, Fold::Sum>{scales}, launcher);
  }
}

inline Fold fold_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::Average: return Fold::Average;
    case ReduceOp::Min: return Fold::Min;
    case ReduceOp::Max: return Fold::Max;
    case ReduceOp::Product: return Fold::Product;
    default: return Fold::Sum;
  }
}

template <class Launcher>
CudaCode reduce_job(const ReduceJob& job, const Launcher& launcher) {
  if (!reduce_supported(job.dtype, job.op) || job.ins < 1 || job.ins > kMostSharers ||
      job.outs < 1 || job.outs > kMostSharers)
    return CudaCode::InvalidValue;
  const Scales scales{job.prescale, job.postscale, job.op == ReduceOp::Average ? job.divisor : 1,
                      job.zeros};
  const Fold fold = fold_of(job.op);
  switch (job.dtype) {
    case DataType::Float16: return reduce_floats<__half>(job, scales, launcher);
    case DataType::BFloat16: return reduce_floats<__nv_bfloat16>(job, scales, launcher);
    case DataType::Float32: return reduce_floats<float>(job, scales, launcher);
    case DataType::Float64: return reduce_floats<double>(job, scales, launcher);
    case DataType::Complex64:
      return launch_all<float>(job, FoldFloats<float, Fold::Sum>{scales}, launcher, 2);
    case DataType::Complex128:
      return launch_all<double>(job, FoldFloats<double, Fold::Sum>{scales}, launcher, 2);
    case DataType::UInt8:
      return launch_all<std::uint8_t>(job, FoldIntegers<std::uint8_t>{scales, fold}, launcher);
    case DataType::Int8:
      return launch_all<std::int8_t>(job, FoldIntegers<std::int8_t>{scales, fold}, launcher);
    case DataType::Int16:
      return launch_all<std::int16_t>(job, FoldIntegers<std::int16_t>{scales, fold}, launcher);
    case DataType::Int32:
      return launch_all<std::int32_t>(job, FoldIntegers<std::int32_t>{scales, fold}, launcher);
    case DataType::Int64:
      return launch_all<std::int64_t>(job, FoldIntegers<std::int64_t>{scales, fold}, launcher);
    case DataType::Bool: return launch_all<std::uint8_t>(job, FoldTruths{scales, fold}, launcher);
    default: return CudaCode::InvalidValue;
  }
}

}  // namespace hvd::gpu::reduction
