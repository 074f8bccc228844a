#pragma once
/// These functions are what backends have in common: they say which operations a backend does,
/// given the reductions that it has kernels for, which those are of the backends of host memory,
/// and how a batch's traits become arithmetic. They are pure.
// Tested in tests/ops/p2p/reduce_execution_test.cc, tests/ops/p2p/direct_memory_test.cc,
// tests/ops/gpu/gpu_operations_test.cc

#include <numeric>

#include "hvd/backend.h"
#include "ops/kernels/adasum.h"
#include "ops/kernels/reduce.h"

namespace hvd {

/// Returns whether a backend does the operation: allreduce where `reducible(dtype, op)`;
/// reducescatter likewise, as Sum and Average only; what merely moves bytes, of every type.
template <class Reducible>
bool moves_or_reduces(const BatchTraits& traits, const Reducible& reducible) {
  switch (traits.kind) {
    case OpKind::Allreduce: return reducible(traits.dtype, traits.op);
    case OpKind::Reducescatter:
      return (traits.op == ReduceOp::Sum || traits.op == ReduceOp::Average) &&
             reducible(traits.dtype, traits.op);
    case OpKind::Broadcast:
    case OpKind::Allgather:
    case OpKind::Alltoall: return true;
    default: return false;
  }
}

/// Returns whether the host's kernels do what the traits ask, by kind, dtype and reduce op alone.
inline bool host_supports(const BatchTraits& traits) {
  return moves_or_reduces(traits, [](DataType dtype, ReduceOp op) {
    if (is_complex(dtype) && op == ReduceOp::Product) return false;
    return op == ReduceOp::Adasum ? kernels::adasum_supported(dtype)
                                  : kernels::supported(dtype, op);
  });
}

/// Operations of which each rank takes its part out of the others' inputs, which stay as they are.
constexpr bool is_pulled(OpKind kind) {
  return kind == OpKind::Allgather || kind == OpKind::Alltoall || kind == OpKind::Reducescatter;
}

/// Returns the elements of a member's output, on whatever memory.
inline std::int64_t output_count(const BatchTraits& traits, const BatchMember& member) {
  if (traits.kind == OpKind::Reducescatter)
    return member.counts.at(static_cast<std::size_t>(traits.set->rank));
  if (is_pulled(traits.kind))
    return std::accumulate(member.counts.begin(), member.counts.end(), std::int64_t{0});
  return member.count;
}

inline kernels::Reduction reduction_of(const BatchTraits& traits) {
  const int divisor =
      traits.op == ReduceOp::Average ? static_cast<int>(traits.set->ranks.size()) : 1;
  return {traits.dtype, traits.op,   traits.prescale_factor, traits.postscale_factor,
          divisor,      traits.dtype};
}

/// Returns whether the zeros of ranks that have joined may be left out.
constexpr bool zeros_change_nothing(ReduceOp op) {
  return op == ReduceOp::Sum || op == ReduceOp::Average || op == ReduceOp::Adasum ||
         op == ReduceOp::BitOr || op == ReduceOp::BitXor;
}

}  // namespace hvd
