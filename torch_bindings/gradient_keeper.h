#pragma once
/// Where reduced gradients go that a GradientReducer does not leave in `.grad`: each rank keeps its share of them, and the rest of their
/// memory is free again (ZeRO stage 2). Called in autograd's threads and the optimizer's, one at a time for each parameter. Errors: none
/// of its own.

#include <ATen/core/Tensor.h>

namespace hvd {

class GradientKeeper {
 public:
  GradientKeeper() = default;
  GradientKeeper(const GradientKeeper&) = delete;
  GradientKeeper& operator=(const GradientKeeper&) = delete;
  virtual ~GradientKeeper() = default;
  /// Adds this rank's share of `reduced`, the gradient of all ranks, to what is kept of the parameter's. `reduced` may be of another type,
  /// and its memory ends with the call.
  virtual void keep(const at::Tensor& parameter, const at::Tensor& reduced) = 0;
  /// Forgets what is kept of it.
  virtual void drop(const at::Tensor& parameter) = 0;
};

}  // namespace hvd
