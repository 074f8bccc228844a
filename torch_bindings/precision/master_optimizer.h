#pragma once
/// The interface of a MasterWeights (torch_bindings/optimizer/master_weights.h) for wrappers and
/// scalers that work with it. Not for users. They include this and not that, which includes one of
/// them. Thread: the optimizer's. Owns nothing. Throws what MasterWeights does. `Wrappers::around`
/// (torch_bindings/parameters/wrappers.h) finds the one around an optimizer.
// Tested in tests/torch_bindings/optimizer/master_weights_test.cc

#include <torch/optim/optimizer.h>

#pragma GCC visibility push(default)
namespace hvd::detail {

class MasterCopies;

/// An optimizer of 16-bit parameters around one that steps their masters.
class MasterOptimizer : public torch::optim::Optimizer {
 public:
  using Optimizer::Optimizer;
  /// Returns the optimizer that this is around.
  virtual torch::optim::Optimizer& wrapped() = 0;
  /// Returns the masters.
  [[nodiscard]] virtual MasterCopies& copies() const = 0;
  /// Takes over groups and options that have been changed through this or through the optimizer.
  virtual void share_changes() = 0;
  /// Ends a step that is not made, instead of `step()`.
  virtual void leave_out_step() = 0;
};

}  // namespace hvd::detail
#pragma GCC visibility pop
