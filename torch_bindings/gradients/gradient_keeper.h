#pragma once
/// The port to which a GradientReducer gives reduced gradients that it does not leave in `.grad`:
/// each rank keeps its share of them, and the rest of their memory is free again (ZeRO stage 2).
/// Nobody is sent what it does not keep. Called in autograd's threads and the optimizer's, one at a
/// time for each parameter. Errors: none of its own.
// Tested in tests/torch_bindings/sharding/shard_gradients_test.cc

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace hvd {

/// The keeper of this rank's shares of the gradients.
class GradientKeeper {
 public:
  GradientKeeper() = default;
  GradientKeeper(const GradientKeeper&) = delete;
  GradientKeeper& operator=(const GradientKeeper&) = delete;
  virtual ~GradientKeeper() = default;
  /// Returns how many elements of the parameter's gradient each rank of the process set keeps, in
  /// the order of the ranks and of the parameter's memory. It is the same on all ranks.
  [[nodiscard]] virtual const std::vector<std::int64_t>& parts(
      const at::Tensor& parameter) const = 0;
  /// Adds this rank's part of `reduced`, the gradient of all ranks, to what is kept of the
  /// parameter's; the rest of it is not read. `reduced` may be of another type, and its memory ends
  /// with the call.
  virtual void keep(const at::Tensor& parameter, const at::Tensor& reduced) = 0;
  /// Forgets what is kept of it.
  virtual void drop(const at::Tensor& parameter) = 0;
};

}  // namespace hvd
