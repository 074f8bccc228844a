#pragma once
/// The call of the fast path that does what a submission of one tensor, or of none, would.

#include "hvd/engine/persistent_op.h"

namespace hvd::test {

/// Refers to the submission, which must stay; of an alltoall the caller adds where the received splits go.
inline SmallCall small_call_of(const Submission& submission) {
  SmallCall call;
  call.kind = submission.kind;
  call.process_set = submission.process_set;
  call.name = submission.name;
  call.op = submission.op;
  call.prescale_factor = submission.prescale_factor;
  call.postscale_factor = submission.postscale_factor;
  call.root = submission.root;
  if (submission.tensors.empty()) return call;
  const TensorArgument& tensor = submission.tensors.front();
  call.dtype = tensor.dtype;
  call.shape = tensor.shape;
  call.input = tensor.input;
  call.output = tensor.output;
  call.splits = tensor.splits;
  return call;
}

}  // namespace hvd::test
