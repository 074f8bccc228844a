#pragma once
/// Ranks that have left the world, as its root knows them, and what they still take part in: their
/// reservations, in rounds that are not decided yet. Tells which tensors can never be complete. A
/// value without a lock, of the thread that drives the leader.
// Tested in tests/hvd/engine/leavers_test.cc

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "hvd/negotiation/values/pledges.h"

namespace hvd {

class DepartedRanks {
 public:
  void add(int rank, const Pledges& pledges) {
    ranks_.push_back(rank);
    for (const auto& [key, rounds] : pledges) pledged_.add(key, rank, rounds);
  }
  [[nodiscard]] bool is_empty() const { return ranks_.empty(); }
  [[nodiscard]] std::size_t count() const { return ranks_.size(); }
  /// Returns a rank without which the tensor can never be complete, if there is one: of the set's
  /// `ranks` (ascending) the first to have left that takes part in no later round of it, and is not
  /// excused by having joined. The others may have left because of it.
  [[nodiscard]] std::optional<int> blocker_of(
      const UnitKey& key, const std::vector<int>& ranks,
      const std::function<bool(int rank)>& has_joined) const {
    for (const int rank : ranks_) {
      if (!std::binary_search(ranks.begin(), ranks.end(), rank) || pledged_.contains(key, rank))
        continue;
      if (key.kind != OpKind::Join && has_joined(rank)) continue;
      return rank;
    }
    return std::nullopt;
  }

  /// A round of the tensor has been decided.
  void decided(const UnitKey& key) { pledged_.consume(key); }
  void forget(const UnitKey& key) { pledged_.forget(key); }
  void forget_set(int process_set) { pledged_.forget_set(process_set); }

 private:
  std::vector<int> ranks_;  // in the order of their leaving
  PledgeTable pledged_;
};

}  // namespace hvd
