#pragma once
/// The weights of the ranks' gradients in the averages of a step. The sum of all ranks' weights is
/// known before the first gradients leave, so that a gradient is multiplied by its share once, and
/// all that follows (compression, shares, joined ranks) is an ordinary average. Thread: the
/// reducer's, under its lock. Errors: what the sum throws, but for a Mismatch.
// Tested in tests/torch_bindings/reducer/reducer_weights_test.cc

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hvd/hvd.h"
#include "hvd/submission.h"

namespace hvd {

namespace detail {
/// Throws InvalidArgument for what is no weight of a rank's gradients.
void check_weight(double weight);

/// A PresentWeight is what gradients of this rank count at present.
struct PresentWeight {
  double value = 1;
  bool is_clear = true;  ///< false where reducers have different ones
};
/// Returns what is set in this thread's world, by whichever reducer: for who adds up gradients of
/// the ranks within a backward pass, before they are weighed.
PresentWeight present_weight();
}  // namespace detail

class GradientWeights {
 public:
  explicit GradientWeights(ProcessSet process_set);
  ~GradientWeights() { set({}); }
  GradientWeights(const GradientWeights&) = delete;
  GradientWeights& operator=(const GradientWeights&) = delete;

  /// Until end_step(): what this rank's gradients count; none: as much as the others'.
  void set(std::optional<double> weight);
  [[nodiscard]] const std::optional<double>& own() const { return own_; }
  void end_step() {
    set({});
    factor_ = 1;
  }

  /// Starts the sum of a round, unless gradients have no weights: an operation of the kind and name
  /// that other ranks' gradients have which have none, as only such ones meet; but those are
  /// averages or have scales, so that none of them can be taken for it.
  void ask(const std::string& name, bool scattered);
  [[nodiscard]] bool are_asked() const { return round_ != nullptr; }
  /// Returns whether learn() would not wait.
  [[nodiscard]] bool is_known() const { return !round_ || round_->pending->done.load(); }
  /// Returns the sum under way; null where there is none.
  [[nodiscard]] std::shared_ptr<HandleState> pending() const {
    return round_ ? round_->pending : nullptr;
  }
  /// Waits for the sum, where there is one. Returns false where others' gradients have no weights.
  bool learn();
  void end_round() { round_.reset(); }

  /// Returns what this rank's gradients are multiplied by before they are averaged.
  [[nodiscard]] double factor() const { return factor_; }
  /// Returns `values` so multiplied. What counts 0 is zeros: the mean of no rows is not a number.
  [[nodiscard]] at::Tensor weighed(const at::Tensor& values) const;

 private:
  struct Round {
    std::vector<double> own;  ///< the same once or for each rank
    double all = 0;
    std::shared_ptr<HandleState> pending;
  };
  const ProcessSet process_set_;
  const std::uint64_t world_;
  std::optional<double> own_;
  std::shared_ptr<Round> round_;
  double factor_ = 1;
};

}  // namespace hvd
