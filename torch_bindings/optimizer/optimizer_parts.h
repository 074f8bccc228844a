#pragma once
/// All that is behind a DistributedOptimizer (torch_bindings/optimizer/optimizer.h): it stays where
/// it is when that is moved, and its guards refer to it. Thread: the optimizer's. Owns the wrapped
/// optimizer where the wrapper does. Errors: InvalidArgument for options that are wrong, and for
/// changes of the groups that cannot be taken over; what reducers, shards and Adasum throw.
// Tested in tests/torch_bindings/optimizer/one_name_test.cc,
// tests/torch_bindings/optimizer/optimizer_test.cc

#include <torch/optim/optimizer.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/optimizer/adasum_deltas.h"
#include "torch_bindings/optimizer/optimizer_reducers.h"
#include "torch_bindings/optimizer/shared_groups.h"
#include "torch_bindings/precision/master_copies.h"
#include "torch_bindings/precision/master_optimizer.h"
#include "torch_bindings/reducer/distributed_options.h"
#include "torch_bindings/reducer/step_watch.h"
#include "torch_bindings/sharding/optimizer_shards.h"

namespace hvd::detail {

struct OptimizerParts {
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  /// `of`: the wrapper, whose groups are `mine`; `around`: the optimizer to wrap, and `inner` the
  /// one in that which is stepped, or the same.
  OptimizerParts(torch::optim::Optimizer& of, Groups& mine, MasterOptimizer* around,
                 torch::optim::Optimizer& inner, const Named& named,
                 DistributedOptimizerOptions given);
  /// Ends all of it, the wrapped optimizer last.
  ~OptimizerParts();

  void follow(torch::optim::Optimizer& now, Groups& mine) noexcept;
  /// Takes over what has been changed through the other optimizer, and returns this. What it throws
  /// it throws again each time, until the cause has gone.
  OptimizerParts& reconciled();
  /// Returns whether nothing is exchanged with other ranks.
  [[nodiscard]] bool is_local() const { return reducers.is_empty() && !deltas; }
  [[nodiscard]] bool shards_gradients() const {
    return shards && options.shard_gradients && options.process_set.size() > 1;
  }
  [[nodiscard]] bool shares_parameters() const { return shards && shards->shares_parameters(); }
  [[nodiscard]] MasterCopies* master_copies() const {
    return masters != nullptr ? &masters->copies() : nullptr;
  }
  /// Notes that parameters and state are as they should be.
  void note_state() const;
  /// Throws InvalidArgument where the optimizer was stepped by itself since the last call. The
  /// ranks have done together what they had to.
  void refuse_own_step() const;
  /// Ends a step: what comes next is new.
  void begin_step();

  const World world = World::current();            ///< the one that it was made in
  std::unique_ptr<torch::optim::Optimizer> owned;  ///< null where the user has it
  torch::optim::Optimizer* wrapper;                ///< where it is now
  MasterOptimizer* const masters;  ///< around the optimizer that is wrapped; null if there is none
  torch::optim::Optimizer& wrapped;  ///< in that, if there is one
  DistributedOptimizerOptions options;
  const std::shared_ptr<StepWatch> watch;  ///< null where nothing is reduced
  SharedGroups groups;
  OptimizerReducers reducers;
  std::unique_ptr<AdasumDeltas> deltas;                         ///< null unless Adasum
  std::unique_ptr<OptimizerShards> shards;                      ///< null unless sharded
  const std::shared_ptr<int> skips = std::make_shared<int>(0);  ///< guards of skip_synchronize()

 private:
  void begin();
  void take_in(std::size_t first);
  void take_over_changes(std::size_t known);

  int number_ = 0;  ///< among the optimizers on these ranks
};

}  // namespace hvd::detail
