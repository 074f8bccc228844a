#include "hvd/negotiation/table/agreed_queues.h"

#include <algorithm>
#include <set>

#include "hvd/base/wire.h"

namespace hvd {

bool AgreedQueues::has(Scope scope) const {
  return std::any_of(queues_.begin(), queues_.end(),
                     [&](const auto& queue) { return sets_.scope_of(queue.first) == scope; });
}

std::vector<int> AgreedQueues::sets(Scope scope) const {
  std::vector<int> sets;
  for (const auto& [set, queue] : queues_)
    if (sets_.scope_of(set) == scope) sets.push_back(set);
  return sets;
}

bool AgreedQueues::takes_part_next(int process_set) const {
  return local_participants(process_set, queues_.at(process_set).front().absent) > 0;
}

std::vector<int> AgreedQueues::domains_of_next_cut(int process_set) const {
  const auto& absent = queues_.at(process_set).front().absent;
  std::set<int> domains;
  for (const int rank : sets_.info(process_set).ranks)
    if (!std::binary_search(absent.begin(), absent.end(), rank))
      domains.insert(topology_.domain_of_rank[static_cast<std::size_t>(rank)]);
  return {domains.begin(), domains.end()};
}

std::size_t AgreedQueues::batches_of_next_cut(int process_set) const {
  return count_batches(queues_.at(process_set), fusion_threshold_bytes_, groups_alone_);
}

std::uint32_t AgreedQueues::local_participants(int process_set,
                                               const std::vector<int>& absent) const {
  const auto here = [&](int rank) {
    return topology_.domain_of_rank[static_cast<std::size_t>(rank)] == topology_.domain;
  };
  return sets_.local_members(process_set) -
         static_cast<std::uint32_t>(std::count_if(absent.begin(), absent.end(), here));
}

std::vector<PlannedBatch> AgreedQueues::cut_next(int process_set) {
  const auto queue = queues_.find(process_set);
  if (queue == queues_.end()) throw WireError("a cut of nothing");
  auto plans = cut(queue->second, fusion_threshold_bytes_, groups_alone_);
  if (queue->second.empty()) queues_.erase(queue);
  return plans;
}

std::uint64_t AgreedQueues::next_order(int process_set) {
  return ++orders_[{sets_.scope_of(process_set), sets_.info(process_set).number}];
}

}  // namespace hvd
