#pragma once
/// A ReductionPlan says what an allreduce becomes on NCCL: the type it is summed in, NCCL's
/// operation, and the arithmetic before and after it. These are pure functions of their arguments.
///
/// Sums are NCCL's own, element by element in the type they travel in, in an order that depends on
/// the position in the buffer: results are the same on all ranks, but not bit for bit the same as
/// the host backends', nor for every way of fusing.
/// - Float16 and BFloat16 are summed in Float16 and BFloat16, rounded at every hop (the host sums
///   them in float).
/// - Average over a power of two of ranks is NCCL's, which multiplies every input by 1/n rounded to
///   the type: exactly, then, but for what becomes subnormal.
/// - Where NCCL is to sum and no more (`sums_only`), as there is no average in switches (NVLS) or
///   over symmetric windows, the copy kernel divides before the sum instead, which gives the same
///   bits. A reducescatter is divided after the sum all the same, but for Float16: its input then
///   need not be packed.
/// - All else, scales too, is done by the copy kernel, with a pass of its own where values are
///   reduced in place: Float16 is divided before the sum, which would overflow at 65504, other
///   types after it.
/// - Integers: the Average is the exact sum divided, truncating toward zero, as on the host.
///   Therefore 8-bit integers travel as Int32 and Int32 as Int64 when averaged; an average of Int64
///   wraps if the sum does not fit. Sums and products wrap in the type itself. Int16, which NCCL
///   does not have, always travels as Int32.
/// - Bool travels as bytes, 0 and 1: Min is "and", Max is "or". Scales are ignored, as on the host.
/// - Complex numbers are pairs of floats: Sum and Average only.
// Tested in tests/ops/gpu/nccl/nccl_backend_test.cc

#include <cstdint>

#include "hvd/types.h"
#include "ops/gpu/api/gpu_api.h"

namespace hvd::gpu {

/// A Reduction is what was asked for.
struct Reduction {
  DataType dtype = DataType::Float32;
  ReduceOp op = ReduceOp::Sum;
  double prescale = 1;
  double postscale = 1;
  int joined = 0;  ///< ranks that have joined, and count as zeros
};

/// dst = src / divisor * factor, as `CopyJob` does it.
struct Scaling {
  double factor = 1;
  std::int64_t divisor = 1;
  bool operator==(const Scaling&) const = default;
  bool none() const { return *this == Scaling{}; }
};

struct ReductionPlan {
  DataType type = DataType::Float32;  ///< of the tensors, taken apart into real numbers
  int lanes = 1;  ///< elements of `type` per element of the tensor: 2 for complex numbers
  DataType wire = DataType::Float32;  ///< what NCCL reduces
  NcclOp op = NcclOp::Sum;
  Scaling before;
  Scaling after;
  /// Zeros change the result: each rank folds one into its own values first (which is the same as
  /// one more rank of zeros).
  bool zeros = false;
  bool operator==(const ReductionPlan&) const = default;
};

/// `ranks`: those that take part. `sums_only`: NCCL sums, and scales nothing; the same on all
/// ranks, as what they do must fit together. Precondition: `reduce_supported`.
ReductionPlan plan_reduction(const Reduction& reduction, int ranks, bool sums_only = false);

/// NCCL's name of a type that `plan_reduction` gave as `wire`.
NcclType nccl_type(DataType wire);

}  // namespace hvd::gpu
