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
/// - Where NCCL multiplies before it sums (ncclRedOpCreatePreMulSum), prescales are left to it, and
///   in Float32 and Float64 so are the other averages, unless ranks have joined: a pass over the
///   values less. In 16 bits it has the factor in 16 bits, so it is left to it only where it is
///   exact there: the bits are then those of the kernel, which scales in float and rounds once. 1/3
///   is not. In Float32 and Float64 a prescale has the kernel's bits, too; of an average (with its
///   prescale) each input is multiplied by a factor rounded to the type, where the kernel divides
///   the sum: the two differ by a few units in the last place.
/// - Where NCCL is to sum and no more (`NcclScales::Nothing`), the copy kernel does all of this:
///   neither NCCL's average nor an operation of one's own is there in switches (NVLS) or over
///   symmetric windows. What NCCL's average has, the kernel's division before the sum has, bit for
///   bit. A reducescatter is divided after the sum all the same, but for Float16: its input then
///   need not be packed.
/// - All else is done by the copy kernel, with a pass of its own where values are reduced in place:
///   Float16 is divided before the sum, which would overflow at 65504, other types after it.
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
  double premultiplied = 1;  ///< what NCCL multiplies each input by, before the sum
  Scaling before;
  Scaling after;
  /// Zeros change the result: each rank folds one into its own values first (which is the same as
  /// one more rank of zeros).
  bool zeros = false;
  bool operator==(const ReductionPlan&) const = default;
};

/// Returns whether NCCL can do this, with the help of the copy kernels.
bool reducible(DataType dtype, ReduceOp op);

/// NcclScales says what NCCL does besides sums.
enum class NcclScales : std::uint8_t {
  Nothing,   ///< all scaling is the copy kernel's
  Averages,  ///< its own average
  All,       ///< it premultiplies, too
};

/// `ranks`: those that take part. `scales`: depends on nothing that a rank does not share with the
/// others: what they do must fit together, and NCCL wants to be of one version on all of them.
/// Precondition: `reducible`.
ReductionPlan plan_reduction(const Reduction& reduction, int ranks,
                             NcclScales scales = NcclScales::Averages);

/// NCCL's name of a type that `plan_reduction` gave as `wire`.
NcclType nccl_type(DataType wire);

}  // namespace hvd::gpu
