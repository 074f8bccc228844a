#pragma once
/// This kernel copies, scales and converts many tensors in one launch: it is how a batch gets into the fusion buffer and out again.
/// `launch_batched_copy` (batched_copy.cu) enqueues on a stream and returns. Any thread may call it; it keeps no state and fails by its
/// return value. It needs no CUDA header, so that the backend and its tests build anywhere.

#include <cstdint>
#include <span>

#include "hvd/types.h"
#include "ops/gpu/cuda_types.h"

namespace hvd::gpu {

/// `count` elements from `src` to `dst`. Both are aligned to their element; nothing more is required, 16 bytes are fastest.
struct CopyItem {
  const void* src = nullptr;
  void* dst = nullptr;
  std::int64_t count = 0;
};

/// dst[i] = src[i] / divisor * factor, in this order:
/// Floats: Float16 and BFloat16 in float, rounded once, to nearest even; Float32 in float, Float64 in double; `factor` and `divisor` are
///   rounded to the type of the arithmetic first.
/// Integers: the division is exact and truncates toward zero; the factor multiplies in double in the narrower of the two types, truncates
///   toward zero and clamps to that type's range (NaN gives 0). A conversion to a narrower integer wraps.
/// With `from == to`, factor 1 and divisor 1 the bits are copied, whatever the type.
/// `dst` may equal `src` where the types are equal; no other overlap, within an item or between items.
struct CopyJob {
  std::span<const CopyItem> items;
  DataType from = DataType::Float32;
  DataType to = DataType::Float32;
  double factor = 1;
  std::int64_t divisor = 1;
};

/// Returns whether a copy of the bits is all there is to do.
constexpr bool is_plain(const CopyJob& job) { return job.from == job.to && job.factor == 1 && job.divisor == 1; }

/// Returns whether `job.from` can become `job.to`: equal types for all (Bool and complex numbers as plain copies only), Float32 to and from
/// Float16 and BFloat16, and an integer to and from the one that the backend sums it in.
constexpr bool copy_supported(const CopyJob& job) {
  if (job.divisor < 1) return false;
  if (is_plain(job)) return true;
  if (job.from == job.to) return job.from != DataType::Bool && !is_complex(job.from);
  const auto pair = [&](DataType a, DataType b) { return (job.from == a && job.to == b) || (job.from == b && job.to == a); };
  using enum DataType;
  return pair(Float32, Float16) || pair(Float32, BFloat16) || pair(UInt8, Int32) || pair(Int8, Int32) || pair(Int16, Int32) ||
         pair(Int32, Int64);
}

/// Tensors per launch: a longer list takes several launches (the table of tensors travels as the kernel's parameter, which ends at 32 KiB).
inline constexpr int kItemsPerLaunch = 1024;

/// Enqueues the job on `stream` of the current device. The items are read before it returns, their memory when the stream gets there.
/// Items without elements are skipped; a job without elements launches nothing. InvalidValue for what `copy_supported` refuses.
CudaCode launch_batched_copy(const CopyJob& job, CudaStream* stream);

}  // namespace hvd::gpu
