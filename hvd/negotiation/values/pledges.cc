#include "hvd/negotiation/values/pledges.h"

#include <iterator>

namespace hvd {

void PledgeTable::add(const UnitKey& key, int rank, std::uint32_t rounds) {
  if (rounds > 0) rounds_[key][rank] += rounds;
}

bool PledgeTable::contains(const UnitKey& key, int rank) const {
  const auto of_unit = rounds_.find(key);
  return of_unit != rounds_.end() && of_unit->second.contains(rank);
}

void PledgeTable::consume(const UnitKey& key) {
  const auto of_unit = rounds_.find(key);
  if (of_unit == rounds_.end()) return;
  auto& by_rank = of_unit->second;
  for (auto of_rank = by_rank.begin(); of_rank != by_rank.end();)
    of_rank = --of_rank->second == 0 ? by_rank.erase(of_rank) : std::next(of_rank);
  if (by_rank.empty()) rounds_.erase(of_unit);
}

void PledgeTable::forget_set(int process_set) {
  const auto first = rounds_.lower_bound(UnitKey{process_set, OpKind{}, {}});
  rounds_.erase(first, rounds_.lower_bound(UnitKey{process_set + 1, OpKind{}, {}}));
}

}  // namespace hvd
