#pragma once
/// The reducers of a DistributedOptimizer: one for the parameters from the start, and one for each
/// time that others came. Other ranks may not have the last of them yet, so the groups are compared
/// before it is used. Thread: the optimizer's. Refers to the groups. Errors: those of a
/// GradientReducer; where the optimizer was stepped by itself, InvalidArgument says so.
// Tested in tests/torch_bindings/optimizer/optimizer_test.cc,
// tests/torch_bindings/what_if/what_if_optimizer_test.cc

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/parameters/replica_guard.h"

namespace hvd {
class GradientReducer;
}  // namespace hvd

namespace hvd::detail {

class SharedGroups;
class StepWatch;

/// The reducers of one optimizer, in the order in which their parameters came. There are none with
/// Adasum, and none outside the process set.
class OptimizerReducers {
 public:
  /// `watch`: notices steps of the wrapped optimizer; null where nothing is reduced.
  OptimizerReducers(SharedGroups& groups, std::shared_ptr<StepWatch> watch);

  [[nodiscard]] bool is_empty() const { return reducers_.empty(); }
  [[nodiscard]] std::size_t size() const { return reducers_.size(); }
  [[nodiscard]] GradientReducer& first() const { return *reducers_.front(); }
  [[nodiscard]] const std::vector<std::shared_ptr<GradientReducer>>& all() const {
    return reducers_;
  }

  /// Takes in a reducer and puts its hooks on. All but the first listen to no gradient until all
  /// ranks are known to have them.
  void add(std::shared_ptr<GradientReducer> reducer);
  /// Notes that the parameters are others than the ranks have compared.
  void note_change() { changed_ = unannounced_ = true; }

  /// Reduces with all of them, also after one that has failed, but for those that other ranks may
  /// not have. An InvalidArgument is this rank's alone: the others go on to them. Those that are
  /// reduced already are left out unless `also_synchronized`.
  void reduce(bool also_synchronized);
  /// Waits for what is under way before gradients are thrown away.
  void settle();
  /// Sets what this rank's gradients count. Throws InvalidArgument where they are reduced already
  /// or on their way.
  void set_weight(double weight);
  [[nodiscard]] std::vector<at::Tensor> compression_memory() const;

 private:
  bool announce_changes();
  void take_up(std::size_t reducer);
  [[nodiscard]] std::exception_ptr cause_of(const Mismatch& error);

  SharedGroups& groups_;
  const std::shared_ptr<StepWatch> watch_;
  std::vector<std::shared_ptr<GradientReducer>> reducers_;
  std::size_t agreed_ = 0;    ///< reducers that all ranks are known to have
  bool changed_ = false;      ///< there are other parameters than the ranks have compared
  bool unannounced_ = false;  ///< the next round does not compare them yet
};

}  // namespace hvd::detail
