#include "hvd/negotiation/table/departed_ranks.h"

#include <algorithm>

namespace hvd {

void DepartedRanks::add(int rank, const Pledges& pledges) {
  ranks_.push_back(rank);
  for (const auto& [key, rounds] : pledges) pledged_.add(key, rank, rounds);
}

std::optional<int> DepartedRanks::blocker_of(const UnitKey& key, const std::vector<int>& ranks,
                                             const std::function<bool(int rank)>& has_joined) const {
  for (const int rank : ranks_) {
    if (!std::binary_search(ranks.begin(), ranks.end(), rank) || pledged_.contains(key, rank)) continue;
    if (key.kind != OpKind::Join && has_joined(rank)) continue;
    return rank;
  }
  return std::nullopt;
}

}  // namespace hvd
