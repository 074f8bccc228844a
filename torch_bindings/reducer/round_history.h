#pragma once
/// The history of a rank's rounds of gradients: which one it is in, and what it compares there with
/// the other ranks, so that those that are in another one get a Mismatch, which says what is
/// unusual on which rank, and not each other's gradients. Pure. Thread: the reducer's, under its
/// lock.

#include <cstddef>
#include <string>
#include <utility>

#include "hvd/types.h"

namespace hvd {

/// The rounds between two steps. Those of a step are counted, and so is whether there was a step
/// after the round before.
class RoundHistory {
 public:
  /// `name`: of what has the gradients, the same on all ranks.
  explicit RoundHistory(std::string name) : name_(std::move(name)) {}

  /// Returns how many dimensions of 1 are put in front of a shape, to tell rounds apart: none in
  /// the first round after a step.
  [[nodiscard]] std::size_t kind() const;
  void end_round() { ++rounds_; }
  /// Takes the last round back, which no rank could take for its next one.
  void undo_round() { --rounds_; }
  /// Makes the next round the first again, with a step or without one.
  void begin_anew() { rounds_ = 0; }
  /// Notes that gradients are thrown away, where there were rounds without a step.
  void throw_away();
  void begin_step();
  /// Sets whether the round is one of a backward pass that has thrown: it is like no other.
  void fail(bool failing) { failing_ = failing; }
  [[nodiscard]] bool is_failing() const { return failing_; }
  /// Notes that the step cannot be made, as this parameter's gradient was changed on its way.
  void refuse(std::string parameter) { refused_ = std::move(parameter); }

  /// Has the next round compare the layout. `said`: of this rank, where it differs; empty: that
  /// parameters or groups have changed.
  void announce(Shape layout, std::string said);
  void drop_announcement() { announced_.clear(); }
  /// Returns the layout; empty: there is none to compare.
  [[nodiscard]] const Shape& announced() const { return announced_; }
  /// Returns what messages call it.
  [[nodiscard]] std::string words() const;
  void submit_announcement() { announcing_ = announced_; }
  /// Drops what was on its way and is compared, unless another has been announced since.
  void end_announcement();

  /// Returns what is unusual about this rank's round, so that other ranks may be in another one;
  /// empty: nothing is.
  [[nodiscard]] std::string peculiarities(bool has_weight) const;

 private:
  const std::string name_;
  std::size_t rounds_ = 0;  ///< since the last step or zero_grad()
  bool unstepped_ = false;  ///< rounds came before the last zero_grad(), and no step after them
  bool failing_ = false;
  std::string refused_;  ///< empty: no step was
  Shape announced_;
  std::string said_;
  Shape announcing_;
};

}  // namespace hvd
