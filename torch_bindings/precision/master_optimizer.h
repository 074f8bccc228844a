#pragma once
/// What a MasterWeights (torch_bindings/optimizer/master_weights.h) is to those that it works with. Not for users.
/// Thread: the optimizer's; `around` any. Owns nothing. Throws what MasterWeights does.

#include <torch/optim/optimizer.h>

#pragma GCC visibility push(default)
namespace hvd::detail {

class MasterCopies;

/// An optimizer of 16-bit parameters around one that steps their masters.
class MasterOptimizer : public torch::optim::Optimizer {
 public:
  using Optimizer::Optimizer;
  /// Returns the one that is around `optimizer`, also if that is itself; null if there is none.
  static MasterOptimizer* around(torch::optim::Optimizer& optimizer);

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
