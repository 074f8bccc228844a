#pragma once
/// The kernels, and the words of CUDA that their launches take, for files that include no CUDA
/// header: so the backends and their tests build anywhere. A launch enqueues on a stream and
/// returns. Any thread may call it; it keeps no state and fails by its return value.
///   batched_copy    copies, scales and converts many tensors: how a batch gets into the fusion
///                   buffer and out again
///   shared_reduce   reduces tensors of several ranks that lie on one GPU, into all of them at once
///   poison          makes results unusable that an abort may have left half done
// Tested in tests/ops/gpu/kernels/batched_copy_test.cc,
// tests/ops/gpu/kernels/shared_reduce_test.cc, tests/ops/gpu/kernels/poison_test.cc

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "hvd/types.h"

namespace hvd::gpu {

// ---- CUDA's handles and return codes

struct CudaStream;  ///< what a cudaStream_t points to; never defined
struct CudaEvent;   ///< what a cudaEvent_t points to; never defined

/// cudaError_t: the numbers that the backend tells apart. Any other number is a failure.
enum class CudaCode : int { Success = 0, InvalidValue = 1, OutOfMemory = 2, NotReady = 600 };

/// cudaStreamCaptureMode says which calls of a thread are refused, and end the capture, while a
/// CUDA graph is being captured.
enum class CaptureMode : int { Global = 0, ThreadLocal = 1, Relaxed = 2 };

/// CUDA hands out memory for sharing in pieces of this size, bytes.
inline constexpr std::size_t kDeviceGranularity = std::size_t{2} << 20;
constexpr std::size_t in_whole_granules(std::size_t bytes) {
  return (bytes + kDeviceGranularity - 1) / kDeviceGranularity * kDeviceGranularity;
}

/// A cudaIpcMemHandle_t or cudaIpcEventHandle_t: what another process of the host opens memory or
/// an event by.
struct IpcHandle {
  std::array<std::byte, 64> bytes{};
};

// ---- copies

/// `count` elements from `src` to `dst`. Both are aligned to their element; nothing more is
/// required, 16 bytes are fastest.
struct CopyItem {
  const void* src = nullptr;
  void* dst = nullptr;
  std::int64_t count = 0;
};

/// dst[i] = src[i] / divisor * factor, in this order:
/// Floats: Float16 and BFloat16 in float, rounded once, to nearest even; Float32 in float, Float64
/// in double; `factor` and `divisor` are
///   rounded to the type of the arithmetic first.
/// Integers: the division is exact and truncates toward zero; the factor multiplies in double in
/// the narrower of the two types, truncates
///   toward zero and clamps to that type's range (NaN gives 0). A conversion to a narrower integer
///   wraps.
/// With `from == to`, factor 1 and divisor 1 the bits are copied, whatever the type.
/// `dst` may equal `src` where the types are equal; no other overlap, within an item or between
/// items.
struct CopyJob {
  std::span<const CopyItem> items;
  DataType from = DataType::Float32;
  DataType to = DataType::Float32;
  double factor = 1;
  std::int64_t divisor = 1;
};

/// Returns whether a copy of the bits is all there is to do.
constexpr bool is_plain(const CopyJob& job) {
  return job.from == job.to && job.factor == 1 && job.divisor == 1;
}

/// Returns whether `job.from` can become `job.to`: equal types for all (Bool and complex numbers as
/// plain copies only), Float32 to and from Float16 and BFloat16, and an integer to and from the one
/// that the backend sums it in.
constexpr bool copy_supported(const CopyJob& job) {
  if (job.divisor < 1) return false;
  if (is_plain(job)) return true;
  if (job.from == job.to) return job.from != DataType::Bool && !is_complex(job.from);
  const auto pair = [&](DataType a, DataType b) {
    return (job.from == a && job.to == b) || (job.from == b && job.to == a);
  };
  using enum DataType;
  return pair(Float32, Float16) || pair(Float32, BFloat16) || pair(UInt8, Int32) ||
         pair(Int8, Int32) || pair(Int16, Int32) || pair(Int32, Int64);
}

/// Tensors per launch: a longer list takes several launches (the table of tensors travels as the
/// kernel's parameter, which ends at 32 KiB).
inline constexpr int kItemsPerLaunch = 1024;

/// Enqueues the job on `stream` of the current device. The items are read before it returns, their
/// memory when the stream gets there. Items without elements are skipped; a job without elements
/// launches nothing. InvalidValue for what `copy_supported` refuses.
CudaCode launch_batched_copy(const CopyJob& job, CudaStream* stream);

// ---- reductions

/// A ReduceJob is what `kernels::reduce` (ops/kernels/reduce.h) does on the host, bit for bit (but
/// for the payloads of NaNs): every element is folded in the order of the inputs; Float16 and
/// BFloat16 in float, rounded once; averages of integers exactly.
struct ReduceJob {
  /// The input of item `i` and rank `r` is inputs[i * ins + r]. It is aligned to the element; 16
  /// bytes everywhere are fastest.
  std::span<const void* const> inputs;
  /// The outputs of item `i` are outputs[i * outs + j]. Each may be the same as an input; no other
  /// overlap.
  std::span<void* const> outputs;
  std::span<const std::int64_t> counts;  ///< elements of each item
  int ins = 1;                           ///< at most kMostSharers, as is `outs`
  int outs = 1;
  DataType dtype = DataType::Float32;
  ReduceOp op = ReduceOp::Sum;
  double prescale = 1;
  double postscale = 1;
  int divisor = 1;     ///< Average only
  bool zeros = false;  ///< one more input, behind the others, that is nothing but zeros
};

/// Inputs and outputs per item.
inline constexpr int kMostSharers = 64;

constexpr bool reduce_supported(DataType dtype, ReduceOp op) {
  if (op == ReduceOp::Adasum || is_bitwise(op)) return false;
  if (dtype == DataType::Bool) return op == ReduceOp::Min || op == ReduceOp::Max;
  if (is_complex(dtype)) return op == ReduceOp::Sum || op == ReduceOp::Average;
  return true;
}

/// Enqueues the job on `stream` of the current device; the lists are read before it returns. Items
/// without elements are skipped. Launches: one for each 256 items, or fewer where 1024 addresses
/// are not enough for them. InvalidValue for what is not supported.
CudaCode launch_shared_reduce(const ReduceJob& job, CudaStream* stream);

// ---- results of what was aborted

/// `bytes` from `begin`; no alignment is required.
struct PoisonItem {
  void* begin = nullptr;
  std::size_t bytes = 0;
};

/// If `*mark` is not zero when the stream gets there, every byte of the items becomes that of
/// `poison_byte`; otherwise nothing happens.
struct PoisonJob {
  std::span<const PoisonItem> items;
  const std::uint32_t* mark = nullptr;  ///< host memory that the device reads
  DataType dtype = DataType::Float32;
};

/// Returns what every byte of a poisoned value is. Floats and complex numbers: all bits, which is
/// NaN in every format. Integers: 0x80, which is a large negative number where there is a sign, and
/// 128 in UInt8. Bool: 1, as no other byte but 0 is a truth value.
constexpr std::uint8_t poison_byte(DataType dtype) {
  if (dtype == DataType::Bool) return 1;
  return is_integer(dtype) ? 0x80 : 0xff;
}

/// Enqueues the job on `stream` of the current device; the list is read before it returns. Launches
/// one kernel for each 128 items that have bytes.
CudaCode launch_poison(const PoisonJob& job, CudaStream* stream);

}  // namespace hvd::gpu
