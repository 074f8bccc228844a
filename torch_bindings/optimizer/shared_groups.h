#pragma once
/// The groups of a wrapper and of the optimizer that it wraps, kept alike: LibTorch lets either be
/// changed at any time (add_param_group(), param_groups()), and tells nobody. Here that is noticed,
/// named and taken over. Local: all ranks must make the same changes. Thread: the optimizer's.
/// Errors: InvalidArgument, naming the parameter: one without a name, in two groups, or added later
/// to an Adagrad. Refers to both optimizers' groups; holds the parameters.
// Tested in tests/torch_bindings/what_if/what_if_optimizer_test.cc

#include <torch/optim/optimizer.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torch_bindings/optimizer/shared_options.h"
#include "torch_bindings/parameters/replica_guard.h"

namespace hvd::detail {

class SharedGroups {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  using Words = std::vector<std::pair<std::string, std::string>>;

  /// `mine` are the wrapper's, as copied from `wrapped`. `names` must name every parameter, unless
  /// it is empty: then names are made up.
  SharedGroups(std::vector<torch::optim::OptimizerParamGroup>& mine,
               torch::optim::Optimizer& wrapped, const Named& names);

  /// Returns every parameter once, with its names joined, in the order in which they have come.
  [[nodiscard]] const Named& parameters() const { return parameters_; }
  /// Returns how many tensors each group has.
  [[nodiscard]] std::vector<std::int64_t> layout() const;

  /// The ranks have compared their groups: all have as many.
  void note_agreed() { agreed_ = options_.size(); }
  /// Returns a digest of the options, as they were at the last `reconcile()`, of the groups that
  /// all ranks have.
  [[nodiscard]] std::uint64_t digest_of_options() const;
  /// Returns them in words: {"lr of group 0", "0.1"}.
  [[nodiscard]] Words words_of_options() const;
  /// Returns both, for those who compare replicas, as long as this lives.
  [[nodiscard]] ReplicaComparer::Terms terms() const {
    return {.digest = [this] { return digest_of_options(); },
            .words = [this] { return words_of_options(); }};
  }

  /// Makes groups and options of both alike again. Returns whether there are other parameters in
  /// the groups than before; new ones are then at the end of `parameters()`. Throws InvalidArgument
  /// where both have been changed, in different ways.
  bool reconcile();
  /// Forgets the parameters from place `first` on, which could not be used: the next `reconcile()`
  /// finds those of them anew that are in the groups then.
  void forget_from(std::size_t first);
  /// The wrapper has been moved: its groups are `mine` now.
  void follow(std::vector<torch::optim::OptimizerParamGroup>& mine) noexcept { mine_ = &mine; }
  /// Gives the wrapper the wrapped optimizer's options, whatever the wrapper's are.
  void take_options();

 private:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  [[nodiscard]] bool differs(const Groups& groups) const;
  [[nodiscard]] Named newcomers(const Groups& groups) const;
  void copy(const Groups& from, Groups& to);

  Groups* mine_;
  torch::optim::Optimizer& wrapped_;
  std::unordered_map<const void*, std::pair<std::string, at::Tensor>> names_;  ///< by TensorImpl
  std::vector<std::vector<at::Tensor>> groups_;  ///< as both had them last
  std::vector<SharedOptions> options_;
  std::size_t agreed_ = 0;  ///< so many groups all ranks have
  Named parameters_;
  bool forgotten_ = false;  ///< parameters of the groups may be missing in `parameters_`
};

}  // namespace hvd::detail
