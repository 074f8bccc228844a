#include "ops/gpu/nccl/reduction_plan.h"

#include <bit>

#include "hvd/errors.h"

namespace hvd::gpu {

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

}  // namespace

ReductionPlan plan_reduction(const Reduction& reduction, int ranks, bool sums_only) {
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
    if (exact && !sums_only) {
      plan.op = NcclOp::Avg;
    } else if (exact || plan.type == DataType::Float16) {
      plan.before.divisor = divisor;
    } else {
      plan.after.divisor = divisor;
    }
  }
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
