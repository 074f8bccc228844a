#pragma once
/// The options of one group (learning rate, momentum...), which a wrapper and the optimizer that it
/// wraps each have a copy of, kept alike. LibTorch's own types are compared field by field. A type
/// of the user's, also one that derives from those, is compared by what its `serialize()` writes,
/// which takes some tens of microseconds; one that does not override that, by its bytes, so that
/// what it keeps elsewhere (the elements of a std::vector) does not count. Local. Thread: the
/// optimizer's. Owns copies; throws what the user's `clone()` and `serialize()` throw.
// Tested in tests/torch_bindings/what_if/what_if_optimizer_test.cc

#include <torch/optim/optimizer.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace hvd::detail {

/// Gives `to` what `from` has. Returns false, and does nothing, where that takes a clone: types
/// that differ, or one of the user's without a `serialize()` of its own.
bool assign_in_place(torch::optim::OptimizerOptions& to,
                     const torch::optim::OptimizerOptions& from);
/// Gives the group these options, in place if that can be.
void assign(torch::optim::OptimizerParamGroup& group, const torch::optim::OptimizerOptions& from);

/// KeptOptions are the options of an optimizer's groups, as they were when this was made.
class KeptOptions {
 public:
  /// `optimizer` outlives it.
  explicit KeptOptions(torch::optim::Optimizer& optimizer);
  /// Gives the groups what they had.
  void restore() const;

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_;  ///< by group
};

class SharedOptions {
 public:
  /// Requires that both groups have the same options now.
  SharedOptions(const torch::optim::OptimizerParamGroup& mine,
                const torch::optim::OptimizerParamGroup& theirs);

  /// Gives both groups what one of them has been given since the last call. In place, since users
  /// hold references to options, but for a user's type without `serialize()` in which more than the
  /// learning rate has changed: that is cloned. Throws InvalidArgument, naming the options, where
  /// both have been given something, and not the same: one of two schedulers would be in vain.
  /// `group`: which group it is.
  void reconcile(torch::optim::OptimizerParamGroup& mine, torch::optim::OptimizerParamGroup& theirs,
                 std::size_t group);
  /// Gives `mine` what `theirs` has, whatever it has been given itself.
  void take(torch::optim::OptimizerParamGroup& mine, torch::optim::OptimizerParamGroup& theirs);

  /// Returns a digest of the options as both have them: of what `words()` says.
  [[nodiscard]] std::uint64_t digest() const { return mine_.digest; }
  /// Returns each option in words, by name. Of a type of the user's: the learning rate, and a
  /// digest of what its `serialize()` writes.
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> words() const;

 private:
  /// One of the two copies, as it was last.
  struct Seen {
    std::unique_ptr<torch::optim::OptimizerOptions> options;
    std::string text;  ///< what serialize() writes, of a type of the user's that overrides it
    std::vector<std::byte> bytes;  ///< of one that does not
    const void* place = nullptr;   ///< where these bytes were
    std::uint64_t digest = 0;
  };
  static Seen look(const torch::optim::OptimizerOptions& options);
  static void refuse_difference(const torch::optim::OptimizerOptions& mine,
                                const torch::optim::OptimizerOptions& theirs, std::size_t group);
  static bool has_changed(const Seen& before, const torch::optim::OptimizerOptions& now);
  void hand_over(const Seen& before, torch::optim::OptimizerParamGroup& from,
                 torch::optim::OptimizerParamGroup& to);

  Seen mine_, theirs_;
  /// The options that have been replaced, first and last: somebody may still refer to them.
  std::array<std::unique_ptr<torch::optim::OptimizerOptions>, 2> retired_;
};

}  // namespace hvd::detail
