#pragma once
/// An optimizer's state and options on their way into an archive and out of it, for broadcasts and
/// checkpoints. By the optimizer's own `save` and `load`, and, for one of the user's own, by its
/// parts as well: the virtual functions that LibTorch's OptimizerOptions (serialize, get_lr,
/// set_lr) and OptimizerParamState (serialize, clone) have, for those that override neither `save`
/// nor `load`. A parameter that the optimizer's groups have twice (tied weights) is written and
/// read once. One thread at a time. Errors: InvalidArgument, or LibTorch's c10::Error, of what
/// cannot be written or read; nothing is left half done after `undo`. Refers to the optimizer,
/// which must outlive it.
// Tested in tests/torch_bindings/optimizer/parameters_test.cc,
// tests/torch_bindings/what_if/what_if_state_test.cc

#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/optimizer/shared_options.h"

namespace hvd::detail {

/// The parts of an optimizer that cannot be written.
struct UnsavedParts {
  std::vector<std::string> states;   ///< one text for each kind
  std::vector<std::string> options;  ///< of groups of which nothing is written, not even the rate
  std::vector<std::string> rates;  ///< of groups of which nothing but the learning rate is written
  std::string type;                ///< of the optimizer
  bool own = true;                 ///< whether the optimizer's own `save` writes something
};

/// Returns the optimizer with the state: what a DistributedOptimizer wraps, unless it shares it.
torch::optim::Optimizer& holder_of(torch::optim::Optimizer& optimizer);
bool is_sharded(const torch::optim::Optimizer& optimizer);

/// The names of the parameters of each group, each once, in the group's order.
using NamesByGroup = std::vector<std::vector<std::string>>;
/// Returns the names that an optimizer has for its parameters; nothing for one without a
/// DistributedOptimizer, and a sharded one.
NamesByGroup names_of(torch::optim::Optimizer& optimizer);

/// Returns what must be the same on all ranks for a state to go from one to another: groups,
/// parameters, whether it is shared out.
Statements outline_of(torch::optim::Optimizer& optimizer);

/// Writes what `save` writes into `own`, and the parts into `parts` unless the optimizer is
/// LibTorch's. Collective if it is shared out; then with `only`, a rank, that one alone gets
/// something.
UnsavedParts save_optimizer(torch::optim::Optimizer& optimizer,
                            torch::serialize::OutputArchive& own,
                            torch::serialize::OutputArchive& parts, std::optional<int> only = {});

class CheckpointReader;

/// The load of a state into one optimizer, which can be undone.
class OptimizerLoad {
 public:
  explicit OptimizerLoad(torch::optim::Optimizer& optimizer);
  /// Makes state and options those in the archives; throws if it cannot. `parts` may be null. The
  /// optimizer's options stay unless `with_options`. Options change in place, as users hold
  /// references to them, but for types that cannot be serialized. `names`: of the optimizer that
  /// has written them, in its order; states then go by name, and not by place. Empty: by place.
  /// `reader`: of tensors in `own` whose values are in a file still, if takes_unread(); its next
  /// read() brings them.
  void load(torch::serialize::InputArchive& own, torch::serialize::InputArchive* parts,
            bool with_options, const NamesByGroup& names = {}, CheckpointReader* reader = nullptr);
  /// Returns whether load() looks at no tensor's values: LibTorch's own optimizers keep the tensors
  /// as they are.
  [[nodiscard]] bool takes_unread() const;
  void undo();

 private:
  using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

  bool has_states(torch::serialize::InputArchive& parts);
  void load_parts(torch::serialize::InputArchive& parts, bool with_options, bool by_itself);
  void load_options(torch::serialize::InputArchive& parts, torch::serialize::InputArchive& mine,
                    bool by_itself);
  void load_states(torch::serialize::InputArchive& parts, torch::serialize::InputArchive& mine);
  void keep_states();
  [[nodiscard]] std::unique_ptr<torch::optim::OptimizerParamState> blank_state(void* key);
  void show_options();

  torch::optim::Optimizer& optimizer_;
  torch::optim::Optimizer& holder_;
  bool begun_ = false;
  States before_;
  std::map<void*, std::string> kept_;   ///< by key: the states as written; empty if they cannot be
  std::optional<KeptOptions> options_;  ///< as they were
  std::function<void()> bring_masters_back_;  ///< null without fp32 masters
};

}  // namespace hvd::detail
