#pragma once
/// The order in which backward gives gradients, and how the ranks of a set come to know one order:
/// it is that of the set's first rank, and travels beside a round of gradients. Thread: the
/// reducer's, under its lock. Errors: what the sum in which it travels throws.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd {

/// The order of one reducer's gradients.
class GradientArrivals {
 public:
  /// Until it is followed there is no order. `name`: of the gradients' owner, equal on all ranks.
  GradientArrivals(std::string name, ProcessSet process_set)
      : name_(std::move(name)), process_set_(std::move(process_set)) {}

  /// From now on an order of as many gradients is looked for.
  void follow(std::size_t gradients) { gradients_ = gradients; }
  [[nodiscard]] bool is_followed() const { return gradients_ > 0; }
  void note(std::size_t place) {
    if (is_followed() && order_.empty()) arrivals_.push_back(place);
  }
  /// Returns the order, the same on all ranks; empty: not known yet.
  [[nodiscard]] const std::vector<std::size_t>& order() const { return order_; }
  /// Begins to tell the other ranks, beside a round that is under way, until the order is known:
  /// ranks are in the same rounds, whatever they make of them. `are_kept`: what has come counts. Of
  /// a round that failed here, it waits for the next.
  void submit(bool are_kept);
  /// Ends a round: waits for what the ranks have told. Returns whether there is an order now that
  /// is another than the last one first.
  bool learn();
  void forget() { arrivals_.clear(); }

 private:
  const std::string name_;
  const ProcessSet process_set_;
  std::size_t gradients_ = 0;
  std::vector<std::size_t> arrivals_;  ///< in this round
  std::vector<std::size_t> order_;
  std::optional<Handle<at::Tensor>> ordering_;  ///< what tells it, under way
};

}  // namespace hvd
