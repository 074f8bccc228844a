#pragma once
/// AgreedQueues hold what is agreed and waits to be cut into batches: a queue for each process set.
/// They change with the log's records, alike on all ranks of a domain. Under the engine's mutex.
// Tested in tests/hvd/negotiation/negotiator_test.cc

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "hvd/negotiation/table/planner.h"
#include "hvd/negotiation/values/process_sets.h"
#include "hvd/topology.h"

namespace hvd {

class AgreedQueues {
 public:
  /// Keeps references to the topology and the sets. `groups_alone`: as in `cut`.
  AgreedQueues(const Topology& topology, const ProcessSets& sets,
               std::uint64_t fusion_threshold_bytes, bool groups_alone)
      : topology_(topology),
        sets_(sets),
        fusion_threshold_bytes_(fusion_threshold_bytes),
        groups_alone_(groups_alone) {}

  void add(AgreedUnit unit) { queues_[unit.process_set].push_back(std::move(unit)); }
  /// Returns whether a cut of the set would bring anything; of any set of the scope.
  [[nodiscard]] bool has(int process_set) const { return queues_.contains(process_set); }
  [[nodiscard]] bool has(Scope scope) const;
  /// Returns the sets of the scope of which that is so, ascending.
  [[nodiscard]] std::vector<int> sets(Scope scope) const;

  // ---- the next cut of a set; there must be one
  /// Returns whether ranks of this domain take part in it.
  [[nodiscard]] bool takes_part_next(int process_set) const;
  /// Returns the domains whose ranks take part in it, ascending.
  [[nodiscard]] std::vector<int> domains_of_next_cut(int process_set) const;
  /// Returns how many batches it makes.
  [[nodiscard]] std::size_t batches_of_next_cut(int process_set) const;
  /// Makes it: takes the batches out. Throws WireError where nothing is agreed.
  std::vector<PlannedBatch> cut_next(int process_set);
  /// Returns the next batch's place in the order of the set's batches, equal on all of its ranks.
  std::uint64_t next_order(int process_set);

  /// Returns how many ranks of this domain take part in a batch.
  [[nodiscard]] std::uint32_t local_participants(const PlannedBatch& plan) const {
    return local_participants(plan.process_set, plan.absent);
  }

 private:
  [[nodiscard]] std::uint32_t local_participants(int process_set,
                                                 const std::vector<int>& absent) const;

  const Topology& topology_;
  const ProcessSets& sets_;
  const std::uint64_t fusion_threshold_bytes_;
  const bool groups_alone_;
  std::map<int, std::deque<AgreedUnit>> queues_;           ///< by process set; none is empty
  std::map<std::pair<Scope, int>, std::uint64_t> orders_;  ///< by process set: batches cut so far
};

}  // namespace hvd
