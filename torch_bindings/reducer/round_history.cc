#include "torch_bindings/reducer/round_history.h"

#include <algorithm>
#include <vector>

#include "hvd/base/text.h"

namespace hvd {

namespace {

/// The most rounds between two steps that are told apart.
constexpr std::size_t kMostRoundsTold = 8;

}  // namespace

std::size_t RoundHistory::kind() const {
  if (failing_) return 2 * (kMostRoundsTold + 1);
  return std::min(rounds_, kMostRoundsTold) + (unstepped_ ? kMostRoundsTold + 1 : 0);
}

void RoundHistory::throw_away() {
  unstepped_ = unstepped_ || rounds_ > 0;
  rounds_ = 0;
}

void RoundHistory::begin_step() {
  rounds_ = 0;
  unstepped_ = false;
  refused_.clear();
}

void RoundHistory::announce(Shape layout, std::string said) {
  announced_ = std::move(layout);
  said_ = std::move(said);
}

std::string RoundHistory::words() const {
  return formatted("{} {} has",
                   said_.empty() ? "how many parameters each group of" : "a digest of what", name_);
}

void RoundHistory::end_announcement() {
  if (!announcing_.empty() && std::exchange(announcing_, {}) == announced_) announced_.clear();
}

std::string RoundHistory::peculiarities(bool has_weight) const {
  std::vector<std::string> said;
  if (failing_) said.emplace_back("has left a backward pass by an exception");
  if (!announced_.empty()) {
    said.push_back(said_.empty() ? formatted("has changed the parameters or groups of {}", name_)
                                 : said_);
  } else if (rounds_ > 0) {
    said.emplace_back("has reduced gradients since its last step() or zero_grad()");
  }
  if (has_weight) said.emplace_back("has called set_weight() for this step");
  if (!refused_.empty()) {
    said.push_back(formatted(
        "has not made its last step, as the gradient of '{}' was changed while on its way",
        refused_));
  } else if (unstepped_) {
    said.emplace_back("has thrown its last gradients away without a step()");
  }
  return joined(said, ", and ");
}

}  // namespace hvd
