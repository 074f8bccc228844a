#include "hvd/negotiation/values/process_sets.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "hvd/base/wire.h"

namespace hvd {

std::size_t place_in(const ProcessSetInfo& set, int rank) {
  return static_cast<std::size_t>(places_in(set, {rank, 1}).first);
}

Run places_in(const ProcessSetInfo& set, Run ranks) {
  const auto places = find_run(set.ranks, ranks);
  if (!places) throw WireError("a rank outside its process set");
  return *places;
}

ProcessSets::ProcessSets(const Topology& topology, std::vector<ProcessSetInfo> sets)
    : topology_(topology) {
  for (auto& set : sets) add(std::move(set));
}

void ProcessSets::add(ProcessSetInfo info) {
  const auto here = std::count_if(info.ranks.begin(), info.ranks.end(), [&](int rank) {
    return topology_.domain_of_rank[static_cast<std::size_t>(rank)] == topology_.domain;
  });
  while (std::any_of(sets_.begin(), sets_.end(), [&](const auto& other) {
    return !other->removed && other->info->number == info.number;
  }))
    ++info.number;
  auto fresh = std::make_unique<Set>();
  fresh->info = std::make_shared<const ProcessSetInfo>(std::move(info));
  fresh->local_members = static_cast<std::uint32_t>(here);
  const std::lock_guard lock(mutex_);
  next_id_ = std::max(next_id_, fresh->info->id + 1);
  sets_.push_back(std::move(fresh));
}

int ProcessSets::add(std::vector<int> ranks) {
  ProcessSetInfo info{next_id_, std::move(ranks), -1};
  const auto self = std::lower_bound(info.ranks.begin(), info.ranks.end(), topology_.rank);
  if (self != info.ranks.end() && *self == topology_.rank)
    info.rank = static_cast<int>(self - info.ranks.begin());
  const int id = info.id;
  add(std::move(info));
  return id;
}

void ProcessSets::remove(int id, std::uint64_t position) {
  const std::lock_guard lock(mutex_);
  Set& set = at(id);
  set.removed = true;
  set.removed_at = position;
  ++removed_;
}

std::vector<int> ProcessSets::removed() const {
  std::vector<int> ids;
  for (const auto& set : sets_)
    if (set->removed) ids.push_back(set->info->id);
  return ids;
}

void ProcessSets::bury(const std::function<bool(int id)>& in_use) {
  const std::lock_guard lock(mutex_);
  removed_ -= std::erase_if(sets_, [&](const std::unique_ptr<Set>& set) {
    return set->removed && !in_use(set->info->id);
  });
}

ProcessSets::Set* ProcessSets::find(int id) const {
  const auto below = [](const std::unique_ptr<Set>& known, int wanted) {
    return known->info->id < wanted;
  };
  const auto place = std::lower_bound(sets_.begin(), sets_.end(), id, below);
  return place != sets_.end() && (*place)->info->id == id ? place->get() : nullptr;
}

const ProcessSets::Set& ProcessSets::at(int id) const {
  const Set* const found = find(id);
  if (found == nullptr) throw WireError("unknown process set");
  return *found;
}
ProcessSets::Set& ProcessSets::at(int id) { return const_cast<Set&>(std::as_const(*this).at(id)); }

bool ProcessSets::has(int id) const {
  const std::shared_lock lock(mutex_);
  const Set* const found = find(id);
  return found != nullptr && !found->removed;
}

const ProcessSetInfo& ProcessSets::info(int id) const {
  const std::shared_lock lock(mutex_);
  return *at(id).info;
}

std::shared_ptr<const ProcessSetInfo> ProcessSets::share(int id) const {
  const std::shared_lock lock(mutex_);
  const Set* const found = find(id);
  return found == nullptr || found->removed ? nullptr : found->info;
}

std::uint64_t ProcessSets::joins(int id) const {
  const std::shared_lock lock(mutex_);
  const Set* const found = find(id);
  return found == nullptr ? 0 : found->joins.load();
}

const std::vector<int>* ProcessSets::ranks_unless_removed(int id) const {
  if (id < 0 || id >= next_id_) throw WireError("unknown process set");
  const Set* const found = find(id);
  return found == nullptr || found->removed ? nullptr : &found->info->ranks;
}

Scope ProcessSets::scope_of(int id) const {
  const Set& set = at(id);
  return set.local_members == set.info->ranks.size() ? Scope::Domain : Scope::World;
}

void ProcessSets::join(int id, int rank) {
  Set& set = at(id);
  const auto place = std::lower_bound(set.joined.begin(), set.joined.end(), rank);
  if (place != set.joined.end() && *place == rank) return;
  set.joined.insert(place, rank);
  set.last_joined = rank;
}

}  // namespace hvd
