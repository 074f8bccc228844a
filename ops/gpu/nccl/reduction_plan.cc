#include "ops/gpu/nccl/reduction_plan.h"

#include <bit>

#include "hvd/errors.h"
#include "ops/kernels/scalar_formats.h"

namespace hvd::gpu {

bool reducible(DataType dtype, ReduceOp op) {
  if (op == ReduceOp::Adasum || is_bitwise(op)) return false;
  if (dtype == DataType::Bool) return op == ReduceOp::Min || op == ReduceOp::Max;
  if (is_complex(dtype)) return op == ReduceOp::Sum || op == ReduceOp::Average;
  return true;
}

namespace {

DataType real_type(DataType dtype) {
  if (dtype == DataType::Complex64) return DataType::Float32;
  if (dtype == DataType::Complex128) return DataType::Float64;
  return dtype;
}

DataType wire_type(DataType type, bool average) {
  if (type == DataType::Int16) return DataType::Int32;
  if (!average) return type;
  if (type == DataType::UInt8 || type == DataType::Int8) return DataType::Int32;
  if (type == DataType::Int32) return DataType::Int64;
  return type;
}

NcclOp nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::Min: return NcclOp::Min;
    case ReduceOp::Max: return NcclOp::Max;
    case ReduceOp::Product: return NcclOp::Prod;
    default: return NcclOp::Sum;
  }
}

bool is_wide(DataType type) { return type == DataType::Float32 || type == DataType::Float64; }

/// Returns whether a number of the type has this value.
bool holds(DataType type, double value) {
  namespace scalar = kernels::scalar;
  const auto single = static_cast<float>(value);
  if (type == DataType::Float16)
    return static_cast<double>(scalar::half_to_float(scalar::float_to_half(single))) == value;
  return static_cast<double>(scalar::bfloat_to_float(scalar::float_to_bfloat(single))) == value;
}

/// Leaves to NCCL what it does while it sums.
void premultiply(ReductionPlan& plan, int divisor, bool all_are_there) {
  const bool sums = plan.op == NcclOp::Sum || plan.op == NcclOp::Avg;
  if (!sums || is_integer(plan.type) || plan.before.divisor > 1 ||
      (plan.op == NcclOp::Avg && plan.before.none()))
    return;
  const bool divides =
      plan.op == NcclOp::Avg || (plan.after.divisor > 1 && is_wide(plan.type) && all_are_there);
  const double factor = divides ? plan.before.factor / divisor : plan.before.factor;
  if (factor == 1 || (!is_wide(plan.type) && !holds(plan.type, factor))) return;
  plan.premultiplied = factor;
  plan.before.factor = 1;
  if (!divides) return;
  plan.op = NcclOp::Sum;
  plan.after.divisor = 1;
}

}  // namespace

ReductionPlan plan_reduction(const Reduction& reduction, int ranks, NcclScales scales) {
  const bool average = reduction.op == ReduceOp::Average;
  ReductionPlan plan;
  plan.type = real_type(reduction.dtype);
  plan.lanes = is_complex(reduction.dtype) ? 2 : 1;
  plan.wire = wire_type(plan.type, average);
  plan.op = nccl_op(reduction.op);
  plan.zeros = reduction.joined > 0 && plan.op != NcclOp::Sum;
  if (reduction.dtype == DataType::Bool) return plan;
  plan.before.factor = reduction.prescale;
  plan.after.factor = reduction.postscale;
  const int divisor = ranks + reduction.joined;
  const bool exact = !is_integer(plan.type) && std::has_single_bit(static_cast<unsigned>(ranks)) &&
                     reduction.joined == 0;
  if (average && divisor > 1) {
    if (exact && scales != NcclScales::Nothing) {
      plan.op = NcclOp::Avg;
    } else if (exact || plan.type == DataType::Float16) {
      plan.before.divisor = divisor;
    } else {
      plan.after.divisor = divisor;
    }
  }
  // By itself a rank multiplies in hvd's kernels: NCCL 2.28.9 leaves out the last of an odd number
  // of float64 then.
  if (scales == NcclScales::All && ranks > 1) premultiply(plan, divisor, reduction.joined == 0);
  return plan;
}

NcclType nccl_type(DataType wire) {
  switch (wire) {
    case DataType::UInt8:
    case DataType::Bool: return NcclType::Uint8;
    case DataType::Int8: return NcclType::Int8;
    case DataType::Int32: return NcclType::Int32;
    case DataType::Int64: return NcclType::Int64;
    case DataType::Float16: return NcclType::Float16;
    case DataType::BFloat16: return NcclType::Bfloat16;
    case DataType::Float32: return NcclType::Float32;
    case DataType::Float64: return NcclType::Float64;
    default: throw InvalidArgument("NCCL cannot reduce " + std::string(name_of(wire)));
  }
}

}  // namespace hvd::gpu
