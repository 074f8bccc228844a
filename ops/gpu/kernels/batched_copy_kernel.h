#pragma once
/// This is the code of the copy kernel and of its launch, but for the launch itself:
/// batched_copy.cu compiles it for the device, and tests/ops/gpu/kernels/batched_copy_test.cc,
/// thread by thread, for the host. Before it must stand what CUDA's headers or the test's stand-ins
/// give (__half, __nv_bfloat16, uint2, uint4, their loads and stores), HVD_DEVICE and HVD_UNROLL.
///
/// One launch copies many tensors. Each block copies one chunk of one tensor; which one it finds by
/// a binary search over the tensors' first chunks, in the table that came as the kernel's
/// parameter. So the work is spread by bytes, whatever the sizes of the tensors.
///
/// Within a chunk, elements are accessed in groups of 16 bytes of the wider type (in a conversion,
/// the narrower side has 8 or 4), so that a warp touches consecutive bytes on both sides. The
/// elements before the destination's first boundary and after its last go one by one. Groups are
/// read by one load where the source is aligned there too, which is the rule: the fusion buffer and
/// PyTorch's allocations are; otherwise element by element, from cache lines that the first read
/// brought in. An element is read and written by the same thread, so that in-place jobs are safe.
// Tested in tests/ops/gpu/kernels/batched_copy_test.cc, tests/gpu/batched_copy_gpu_test.cc

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

#include "ops/gpu/kernels/device_parts.h"
#include "ops/gpu/kernels/kernels.h"

namespace hvd::gpu::device {

inline constexpr int kThreads = 256;
inline constexpr int kUnroll = 4;                       // loads in flight per thread
inline constexpr std::int64_t kChunkBytes = 32 * 1024;  // of the wider side

/// The tensors of a launch. 128 of them fit in 4 KiB, which every launch can afford; 1024 in the 32
/// KiB that CUDA 12.1 allows.
template <int kCapacity>
struct Table {
  const void* src[kCapacity];
  void* dst[kCapacity];
  std::int64_t count[kCapacity];
  std::uint32_t first_chunk[kCapacity];
  int items;
};
inline constexpr int kSmall = 128;
static_assert(sizeof(Table<kItemsPerLaunch>) + 64 <= 32764, "kernel parameters end there");

// ---- one element

/// Copies bits.
struct Plain {
  template <class D, class S>
  HVD_DEVICE D apply(S value) const {
    return value;
  }
};

/// value / divisor * factor, as CopyJob says. The comparisons are the same for all threads and cost
/// nothing next to the memory accesses.
struct Scaled {
  double factor;
  std::int64_t divisor;

  template <class D, class S>
  HVD_DEVICE D apply(S value) const {
    if constexpr (kFloating<S>) {
      auto wide = widened(value);
      using Wide = decltype(wide);
      if (divisor != 1) wide /= static_cast<Wide>(divisor);
      if (factor != 1) wide *= static_cast<Wide>(factor);
      return narrowed<D>(wide);
    } else {
      using Quotient = std::conditional_t<sizeof(S) == 8, std::int64_t, std::int32_t>;
      if (divisor != 1)
        value = static_cast<S>(static_cast<Quotient>(value) / static_cast<Quotient>(divisor));
      if constexpr (sizeof(D) > sizeof(S)) {
        return static_cast<D>(factor == 1 ? value : clamped_product(value, factor));
      } else {
        const D narrow = static_cast<D>(value);
        return factor == 1 ? narrow : clamped_product(narrow, factor);
      }
    }
  }
};

// ---- one chunk

template <class T, int kElements, bool kAligned>
HVD_DEVICE Group<T, kElements> load(const T* from) {
  Group<T, kElements> group;
  if constexpr (kAligned) {
    group.word = __ldcs(reinterpret_cast<const decltype(group.word)*>(from));
  } else {
    HVD_UNROLL
    for (int i = 0; i < kElements; ++i) group.values[i] = from[i];
  }
  return group;
}

/// `groups` groups of kGroup elements; `dst` starts on a boundary, and `src` too if kAligned.
template <int kGroup, bool kAligned, class S, class D, class Op>
HVD_DEVICE void copy_groups(const S* src, D* dst, int groups, int thread, const Op& op) {
  const auto finish = [&](int index, const Group<S, kGroup>& in) {
    Group<D, kGroup> out;
    HVD_UNROLL
    for (int i = 0; i < kGroup; ++i) out.values[i] = op.template apply<D>(in.values[i]);
    // an assignment would be taken apart again
    __stwb(reinterpret_cast<decltype(out.word)*>(dst + index * kGroup), out.word);
  };
  // Scaled integers, which are rare, are long: divided, and multiplied in double.
  constexpr int kAhead = std::is_integral_v<S> && !std::is_same_v<Op, Plain> ? 1 : kUnroll;
  int index = thread;
  for (; index + (kAhead - 1) * kThreads < groups; index += kAhead * kThreads) {
    Group<S, kGroup> in[kAhead];
    HVD_UNROLL
    for (int u = 0; u < kAhead; ++u)
      in[u] = load<S, kGroup, kAligned>(src + (index + u * kThreads) * kGroup);
    HVD_UNROLL
    for (int u = 0; u < kAhead; ++u) finish(index + u * kThreads, in[u]);
  }
  for (; index < groups; index += kThreads)
    finish(index, load<S, kGroup, kAligned>(src + index * kGroup));
}

template <class S, class D, class Op>
HVD_DEVICE void copy_chunk(const S* src, D* dst, int count, int thread, const Op& op) {
  constexpr int kGroup = 16 / (sizeof(S) > sizeof(D) ? sizeof(S) : sizeof(D));
  constexpr std::size_t kIn = kGroup * sizeof(S), kOut = kGroup * sizeof(D);

  const int to_boundary =
      static_cast<int>((kOut - reinterpret_cast<std::uintptr_t>(dst) % kOut) % kOut / sizeof(D));
  const int head = to_boundary < count ? to_boundary : count;
  const int groups = (count - head) / kGroup;
  const int tail = head + groups * kGroup;
  if (thread < head) dst[thread] = op.template apply<D>(src[thread]);
  if (tail + thread < count) dst[tail + thread] = op.template apply<D>(src[tail + thread]);

  if (reinterpret_cast<std::uintptr_t>(src + head) % kIn == 0) {
    copy_groups<kGroup, true>(src + head, dst + head, groups, thread, op);
  } else {
    copy_groups<kGroup, false>(src + head, dst + head, groups, thread, op);
  }
}

template <class S, class D>
constexpr std::int64_t kChunkElements = kChunkBytes /
                                        (sizeof(S) > sizeof(D) ? sizeof(S) : sizeof(D));

/// Does what the thread `thread` of the block `block` does.
template <class S, class D, class Op, int kCapacity>
HVD_DEVICE void copy_block(const Table<kCapacity>& table, const Op& op, std::uint32_t block,
                           int thread) {
  const int item = item_of(table, block);
  const std::int64_t start =
      static_cast<std::int64_t>(block - table.first_chunk[item]) * kChunkElements<S, D>;
  const std::int64_t left = table.count[item] - start;
  const int count = static_cast<int>(left < kChunkElements<S, D> ? left : kChunkElements<S, D>);
  copy_chunk(static_cast<const S*>(table.src[item]) + start,
             static_cast<D*>(table.dst[item]) + start, count, thread, op);
}

// ---- the launches of a job. `Launcher::launch<S, D>(table, op, chunks)` returns a CudaCode and is
// called once per kernel launch.

template <class S, class D, int kCapacity, class Op, class Launcher>
CudaCode launch(std::span<const CopyItem> items, const Op& op, const Launcher& launcher) {
  Table<kCapacity> table;
  table.items = 0;
  std::uint64_t chunks = 0;
  for (const CopyItem& item : items) {
    table.src[table.items] = item.src;
    table.dst[table.items] = item.dst;
    table.count[table.items] = item.count;
    table.first_chunk[table.items] = static_cast<std::uint32_t>(chunks);
    ++table.items;
    chunks +=
        static_cast<std::uint64_t>((item.count + kChunkElements<S, D> - 1) / kChunkElements<S, D>);
  }
  // 64 TiB
  if (chunks > static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max()))
    return CudaCode::InvalidValue;
  return launcher.template launch<S, D>(table, op, static_cast<std::uint32_t>(chunks));
}

/// `lanes`: elements of S per element of an item.
template <class S, class D, class Op, class Launcher>
CudaCode launch_all(std::span<const CopyItem> items, const Op& op, const Launcher& launcher,
                    int lanes = 1) {
  CopyItem filled[kItemsPerLaunch];
  int count = 0;
  const auto flush = [&] {
    const std::span<const CopyItem> batch(filled, static_cast<std::size_t>(count));
    if (count == 0) return CudaCode::Success;
    return count <= kSmall ? launch<S, D, kSmall>(batch, op, launcher)
                           : launch<S, D, kItemsPerLaunch>(batch, op, launcher);
  };
  for (const CopyItem& item : items) {
    if (item.count <= 0) continue;
    filled[count++] = {item.src, item.dst, item.count * lanes};
    if (count < kItemsPerLaunch) continue;
    if (const CudaCode code = flush(); code != CudaCode::Success) return code;
    count = 0;
  }
  return flush();
}

template <class Launcher>
CudaCode copy_bits(std::span<const CopyItem> items, std::size_t element, const Launcher& launcher) {
  switch (element) {
    case 1: return launch_all<std::uint8_t, std::uint8_t>(items, Plain{}, launcher);
    case 2: return launch_all<std::uint16_t, std::uint16_t>(items, Plain{}, launcher);
    case 4: return launch_all<std::uint32_t, std::uint32_t>(items, Plain{}, launcher);
    case 8: return launch_all<std::uint64_t, std::uint64_t>(items, Plain{}, launcher);
    case 16:  // Complex128: aligned to 8 bytes
      return launch_all<std::uint64_t, std::uint64_t>(items, Plain{}, launcher, 2);
    default: return CudaCode::InvalidValue;
  }
}

template <class T>
struct Type {
  using Native = T;
};

/// Calls `use` with the Type of a real dtype.
template <class Use>
CudaCode with_type(DataType dtype, const Use& use) {
  switch (dtype) {
    case DataType::UInt8: return use(Type<std::uint8_t>());
    case DataType::Int8: return use(Type<std::int8_t>());
    case DataType::Int16: return use(Type<std::int16_t>());
    case DataType::Int32: return use(Type<std::int32_t>());
    case DataType::Int64: return use(Type<std::int64_t>());
    case DataType::Float16: return use(Type<__half>());
    case DataType::BFloat16: return use(Type<__nv_bfloat16>());
    case DataType::Float32: return use(Type<float>());
    case DataType::Float64: return use(Type<double>());
    default: return CudaCode::InvalidValue;
  }
}

/// Lists the pairs of `copy_supported`, for the compiler.
template <class A, class B>
constexpr bool kPair = (std::is_same_v<A, float> &&
                        (std::is_same_v<B, __half> || std::is_same_v<B, __nv_bfloat16>)) ||
                       (std::is_same_v<A, std::int32_t> && std::is_integral_v<B> &&
                        sizeof(B) < 4) ||
                       (std::is_same_v<A, std::int64_t> && std::is_same_v<B, std::int32_t>);

template <class Launcher>
CudaCode copy_scaled(const CopyJob& job, const Launcher& launcher) {
  return with_type(job.from, [&](auto from) {
    using S = typename decltype(from)::Native;
    return with_type(job.to, [&](auto to) {
      using D = typename decltype(to)::Native;
      if constexpr (std::is_same_v<S, D> || kPair<S, D> || kPair<D, S>) {
        return launch_all<S, D>(job.items, Scaled{job.factor, job.divisor}, launcher);
      } else {
        return CudaCode::InvalidValue;
      }
    });
  });
}

template <class Launcher>
CudaCode copy_job(const CopyJob& job, const Launcher& launcher) {
  if (!copy_supported(job)) return CudaCode::InvalidValue;
  return is_plain(job) ? copy_bits(job.items, element_bytes(job.from), launcher)
                       : copy_scaled(job, launcher);
}

}  // namespace hvd::gpu::device
