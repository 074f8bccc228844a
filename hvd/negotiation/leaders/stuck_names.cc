#include "hvd/negotiation/leaders/stuck_names.h"

#include <algorithm>

namespace hvd {

bool StuckNames::note_said(const StuckReport& report) {
  const auto [said, fresh] =
      said_.try_emplace({report.process_set, report.name}, report.last_decision);
  if (!fresh && said->second == report.last_decision) return false;
  said->second = report.last_decision;
  return true;
}

std::optional<std::vector<StuckRank>> StuckNames::add(const StuckReport& report,
                                                      const std::vector<int>& ranks) {
  auto& by_rank = stuck_[{report.process_set, report.name}];
  for (const auto& stuck_rank : report.ranks) by_rank[stuck_rank.rank] = stuck_rank.kind;
  std::vector<StuckRank> all;
  for (const int rank : ranks) {
    const auto of_rank = by_rank.find(rank);
    if (of_rank == by_rank.end()) return std::nullopt;
    all.push_back({rank, of_rank->second});
  }
  const auto differs = [&](const StuckRank& stuck_rank) {
    return stuck_rank.kind != all.front().kind;
  };
  if (std::none_of(all.begin(), all.end(), differs)) return std::nullopt;
  return all;
}

void StuckNames::decided(int process_set, const std::string& name) {
  if (!stuck_.empty()) stuck_.erase({process_set, name});
}

void StuckNames::forget(int process_set, const std::string& name) {
  if (!said_.empty()) said_.erase({process_set, name});
}

void StuckNames::forget_set(int process_set) {
  const auto of_set = [&](const auto& name) { return name.first.first == process_set; };
  std::erase_if(said_, of_set);
  std::erase_if(stuck_, of_set);
}

}  // namespace hvd
