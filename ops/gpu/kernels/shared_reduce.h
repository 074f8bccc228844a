#pragma once
/// This kernel reduces tensors of several ranks that lie on one GPU, into all of them at once. `launch_shared_reduce` (shared_reduce.cu)
/// enqueues on a stream and returns. Any thread may call it; it keeps no state and fails by its return value. It needs no CUDA header, so
/// that the backend and its tests build anywhere.

#include <cstdint>
#include <span>

#include "hvd/types.h"
#include "ops/gpu/cuda_types.h"

namespace hvd::gpu {

/// A ReduceJob is what `kernels::reduce` (ops/kernels/reduce.h) does on the host, bit for bit (but for the payloads of NaNs): every element
/// is folded in the order of the inputs; Float16 and BFloat16 in float, rounded once; averages of integers exactly.
struct ReduceJob {
  /// The input of item `i` and rank `r` is inputs[i * ins + r]. Aligned to the element; 16 bytes everywhere are fastest.
  std::span<const void* const> inputs;
  /// The outputs of item `i` are outputs[i * outs + j]. They may be the same as an input; no other overlap.
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

/// Enqueues the job on `stream` of the current device; the lists are read before it returns. Items without elements are skipped.
/// Launches: one for each 256 items, or fewer where 1024 addresses are not enough for them. InvalidValue for what is not supported.
CudaCode launch_shared_reduce(const ReduceJob& job, CudaStream* stream);

}  // namespace hvd::gpu
