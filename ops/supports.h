#pragma once
/// This function says which operations a backend does, given the reductions that it has kernels for. It is pure.
// Tested in tests/ops/gpu/gpu_operations_test.cc

#include "hvd/backend.h"

namespace hvd {

/// Allreduce where `reducible(dtype, op)`; reducescatter likewise, as Sum and Average only; what merely moves bytes, of every type.
template <class Reducible>
bool moves_or_reduces(const BatchTraits& traits, const Reducible& reducible) {
  switch (traits.kind) {
    case OpKind::Allreduce:
      return reducible(traits.dtype, traits.op);
    case OpKind::Reducescatter:
      return (traits.op == ReduceOp::Sum || traits.op == ReduceOp::Average) && reducible(traits.dtype, traits.op);
    case OpKind::Broadcast:
    case OpKind::Allgather:
    case OpKind::Alltoall:
      return true;
    default:
      return false;
  }
}

}  // namespace hvd
