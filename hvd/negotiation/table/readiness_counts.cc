#include "hvd/negotiation/table/readiness_counts.h"

#include <algorithm>

#include "hvd/base/wire.h"

namespace hvd {

namespace {

void merge(std::vector<bool>& into, const std::vector<bool>& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) into[i] = into[i] || from[i];
}

void add_absent(Agreement& what, const std::vector<int>& absent) {
  what.absent.insert(what.absent.end(), absent.begin(), absent.end());
  std::sort(what.absent.begin(), what.absent.end());
}

void merge(Agreement& into, const Agreement& from) {
  merge(into.present, from.present);
  add_absent(into, from.absent);
  into.last = from.last;  // the part that comes later has the last word
}

}  // namespace

std::vector<std::uint32_t> ReadinessCounts::waiting() const {
  std::vector<std::uint32_t> ids;
  for (const auto& [id, count] : counts_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  return ids;
}

bool ReadinessCounts::is_ready(std::uint32_t id, int subtree, int rank) const {
  const auto count = counts_.find(id);
  if (count == counts_.end() || !count->second.subtrees.contains(subtree)) return false;
  const auto& absent = count->second.what.absent;
  return !std::binary_search(absent.begin(), absent.end(), rank);
}

std::vector<int> ReadinessCounts::awaited(std::uint32_t id, const UnitKey& key,
                                          const std::vector<int>& ranks) const {
  std::vector<int> awaited;
  const auto count = counts_.find(id);
  if (count == counts_.end()) return awaited;
  for (const int rank : ranks) {
    const int subtree = subtree_of_(rank);
    const bool excused = key.kind != OpKind::Join && has_joined(key.process_set, rank);
    if (subtree >= 0 && !count->second.subtrees.contains(subtree) && !excused)
      awaited.push_back(rank);
  }
  return awaited;
}

const std::set<int>& ReadinessCounts::subtrees_with(int process_set,
                                                    const std::vector<int>* ranks) {
  const auto [known, fresh] = subtrees_.try_emplace(process_set);
  if (fresh && ranks != nullptr)
    for (const int rank : *ranks)
      if (const int subtree = subtree_of_(rank); subtree >= 0) known->second.insert(subtree);
  return known->second;
}

void ReadinessCounts::add(std::uint32_t id, int subtree, const Agreement& what) {
  Count& count = counts_[id];
  if (!count.subtrees.insert(subtree).second) throw WireError("readiness twice in one round");
  merge(count.what, what);
}

std::optional<Agreement> ReadinessCounts::take_if_complete(std::uint32_t id, const UnitKey& key,
                                                           const std::vector<int>* ranks) {
  const auto count = counts_.find(id);
  if (count == counts_.end()) return std::nullopt;
  const auto& ready = count->second.subtrees;
  std::vector<int> absent;
  if (ready.size() < subtrees_with(key.process_set, ranks).size()) {
    const auto joined = joined_.find(key.process_set);
    if (key.kind == OpKind::Join || joined == joined_.end() || ranks == nullptr)
      return std::nullopt;
    for (const int rank : *ranks) {
      const int subtree = subtree_of_(rank);
      if (subtree < 0 || ready.contains(subtree)) continue;
      if (!joined->second.contains(rank)) return std::nullopt;
      absent.push_back(rank);
    }
  }
  Agreement all = std::move(count->second.what);
  counts_.erase(count);
  add_absent(all, absent);
  return all;
}

void ReadinessCounts::join(int process_set, int rank) {
  note_join(process_set, rank);
  joined_[process_set].insert(rank);
}

void ReadinessCounts::note_join(int process_set, int rank) {
  auto& order = join_order_[process_set];
  if (std::find(order.begin(), order.end(), rank) == order.end()) order.push_back(rank);
}

bool ReadinessCounts::has_joined(int process_set, int rank) const {
  const auto joined = joined_.find(process_set);
  return joined != joined_.end() && joined->second.contains(rank);
}

int ReadinessCounts::last_joined(int process_set) const {
  const auto order = join_order_.find(process_set);
  if (order == join_order_.end()) throw WireError("a join of nobody");
  return order->second.back();
}

void ReadinessCounts::end_join(int process_set) {
  joined_.erase(process_set);
  join_order_.erase(process_set);
}

void ReadinessCounts::forget_set(int process_set) {
  end_join(process_set);
  subtrees_.erase(process_set);
}

}  // namespace hvd
