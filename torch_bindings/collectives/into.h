#pragma once
/// The common part of `allgather_into`, `alltoall_into` and `reducescatter_into`: an operation
/// whose result goes into a tensor of the caller's, and what autograd is told of that tensor. Any
/// thread. Errors: InvalidArgument at the call, for an output that cannot fit, that has elements
/// which share memory, or that autograd would have refused as the output of an operation in place.

#include <memory>
#include <string>
#include <vector>

#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/history.h"
#include "torch_bindings/collectives/operation.h"
#include "torch_bindings/collectives/small_calls.h"

namespace hvd::detail {

/// The tensor that a result goes to; it knows whether gradients follow.
class Target {
 public:
  /// Throws InvalidArgument for an undefined tensor, and for leaves that require a gradient where
  /// grad mode is on.
  Target(at::Tensor output, const at::Tensor& input, OpKind kind, const std::string& name);
  [[nodiscard]] const at::Tensor& output() const { return output_; }
  /// Returns the operation that reads `input` and writes the output. `splits`: of an alltoall.
  [[nodiscard]] std::shared_ptr<Operation> operation(
      const ProcessSet& set, const std::vector<std::int64_t>& splits = {}) const;
  /// Starts the operation; from then on gradients of the output go by `rule` to the input, where
  /// grad mode is on and one is required.
  [[nodiscard]] Handle<std::vector<at::Tensor>> start(const std::shared_ptr<Operation>& operation,
                                                      After after, GradientRule rule) const;

  /// Returns whether it has been done as a small repeated operation.
  template <class Options>
  [[nodiscard]] bool run_small(const Options& options) const {
    if (connects_ || !fits_small_calls()) return false;
    SmallCall call = small_call(kind_, input_, options);
    call.output_rows = output_.size(0);
    return run_small_in_place(call, output_);
  }

 private:
  [[nodiscard]] bool fits_small_calls() const;
  at::Tensor output_, input_;
  OpKind kind_;
  std::string name_;
  bool connects_;  ///< gradients follow
};

/// Returns the rows for each rank of an alltoall of `tensor`, as the options give them or evenly.
/// Throws InvalidArgument. Blocks where the splits are on a device.
std::vector<std::int64_t> splits_of(const at::Tensor& tensor, const AlltoallOptions& options);
/// Returns `dense` as the core sees it. Throws InvalidArgument, which begins with `what`, for a
/// type that is not carried.
Buffer buffer_of(const at::Tensor& dense, const std::string& what);

}  // namespace hvd::detail
