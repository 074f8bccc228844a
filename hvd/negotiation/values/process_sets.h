#pragma once
/// The process sets that a rank's table knows: which there are, who is in them, which have been
/// removed, and who has joined. Sets come and go by records of the log, so that all ranks of a
/// domain have the same. An id is never given again; the number, by which backends tell sets apart,
/// is. Any thread may ask whether there is a set, for it, and for its joins. All else is for the
/// thread that has the engine's mutex. Never blocks for long.
// Tested in tests/hvd/engine/engine_ops_test.cc, tests/system/forgetting_test.cc

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "hvd/backend.h"
#include "hvd/negotiation/values/rank_runs.h"
#include "hvd/topology.h"

namespace hvd {

/// A set within one domain is agreed and cut there; a set that spans domains is agreed and cut by
/// the root for all of them.
enum class Scope : std::uint8_t { Domain, World };

/// Returns the place in the set of a rank. Throws WireError if it is not in the set.
std::size_t place_in(const ProcessSetInfo& set, int rank);
/// Returns the places in the set of ranks that follow one another. Throws WireError if one of them
/// is not in the set.
Run places_in(const ProcessSetInfo& set, Run ranks);

class ProcessSets {
 public:
  /// `sets[0]` is the global set. Keeps a reference to the topology.
  ProcessSets(const Topology& topology, std::vector<ProcessSetInfo> sets);

  // ---- any thread
  /// Returns whether there is such a set, and it has not been removed.
  [[nodiscard]] bool has(int id) const;
  /// Returns the set; a removed one is there, and the reference valid, until it is buried. Throws
  /// WireError if it is not there.
  [[nodiscard]] const ProcessSetInfo& info(int id) const;
  /// Returns the set, or null if there is none, or none any more.
  [[nodiscard]] std::shared_ptr<const ProcessSetInfo> share(int id) const;
  /// Returns how often all ranks of the set have joined; 0 if there is none.
  [[nodiscard]] std::uint64_t joins(int id) const;

  // ---- under the engine's mutex; all but `ranks_unless_removed` throw WireError if the set is not
  // there
  /// Returns the ranks of the set, or null if it was removed. Throws WireError if there has never
  /// been such a set.
  [[nodiscard]] const std::vector<int>* ranks_unless_removed(int id) const;
  /// Returns how many ranks of the set live in this domain.
  [[nodiscard]] std::uint32_t local_members(int id) const { return at(id).local_members; }
  [[nodiscard]] Scope scope_of(int id) const;
  /// Returns the ranks of the set that have joined, ascending.
  [[nodiscard]] const std::vector<int>& joined(int id) const { return at(id).joined; }
  /// Returns, of this domain's ranks, the one that joined last; -1 if none has.
  [[nodiscard]] int last_joined(int id) const { return at(id).last_joined; }

  /// Records that a rank has joined, if it had not before.
  void join(int id, int rank);
  /// Records that all ranks have joined: they take part again.
  void end_join(int id) {
    at(id).joined.clear();
    ++at(id).joins;
  }
  /// Adds a set with these global ranks, which ascend, and returns its id.
  int add(std::vector<int> ranks);
  /// Records that the set is removed, by the record that ends at this position of the log.
  void remove(int id, std::uint64_t position);
  /// Returns where the record ends that removed the set; 0 if none has.
  [[nodiscard]] std::uint64_t removed_at(int id) const { return at(id).removed_at; }
  /// Returns those that were removed and are not buried yet.
  [[nodiscard]] std::vector<int> removed() const;
  /// Forgets removed sets that are not `in_use`.
  void bury(const std::function<bool(int id)>& in_use);
  [[nodiscard]] bool has_removed() const { return removed_ > 0; }
  /// Returns how many there are, removed ones among them.
  [[nodiscard]] std::size_t count() const { return sets_.size(); }

 private:
  struct Set {
    std::shared_ptr<const ProcessSetInfo> info;
    std::uint32_t local_members = 0;
    std::vector<int> joined;
    int last_joined = -1;
    std::atomic<std::uint64_t> joins{0};
    bool removed = false;
    std::uint64_t removed_at = 0;
  };
  void add(ProcessSetInfo info);
  [[nodiscard]] Set* find(int id) const;
  [[nodiscard]] const Set& at(int id) const;
  [[nodiscard]] Set& at(int id);

  const Topology& topology_;
  // guards the list and `removed`; the rest, but for `joins`, is for the engine's mutex
  mutable std::shared_mutex mutex_;
  std::vector<std::unique_ptr<Set>> sets_;  // by id, ascending
  int next_id_ = 0;
  std::size_t removed_ = 0;
};

}  // namespace hvd
