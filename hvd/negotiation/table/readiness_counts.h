#pragma once
/// ReadinessCounts tell which parts of a leader's subtree are ready for what, until all are and it
/// is passed on; and which ranks of the subtree have joined, as those are waited for no more. A
/// leader with n neighbours below counts to n + 1: its own domain and the children's subtrees, each
/// by its first domain. A value without a lock, of the thread that drives the leader.
// Tested in tests/hvd/negotiation/leader_tree_test.cc

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hvd/negotiation/values/pledges.h"
#include "hvd/negotiation/values/records.h"

namespace hvd {

class ReadinessCounts {
 public:
  /// `subtree_of` returns the part of the subtree in which a rank is; -1 for a rank outside of it.
  explicit ReadinessCounts(std::function<int(int rank)> subtree_of)
      : subtree_of_(std::move(subtree_of)) {}

  [[nodiscard]] bool is_empty() const { return counts_.empty(); }
  [[nodiscard]] bool contains(std::uint32_t id) const { return counts_.contains(id); }
  /// Returns the numbers of what some part is ready for, ascending.
  [[nodiscard]] std::vector<std::uint32_t> waiting() const;
  /// Returns whether the part was said to be ready for the tensor, which is counted.
  [[nodiscard]] bool has_part(std::uint32_t id, int subtree) const {
    return counts_.at(id).subtrees.contains(subtree);
  }
  /// Returns whether the part was said to be ready for the tensor, and the rank takes part in that.
  [[nodiscard]] bool is_ready(std::uint32_t id, int subtree, int rank) const;
  /// Returns ranks in those parts that are not ready for what another part is ready for, of the
  /// set's `ranks`: some of them hold it up.
  [[nodiscard]] std::vector<int> awaited(std::uint32_t id, const UnitKey& key,
                                         const std::vector<int>& ranks) const;

  /// A part is ready. Throws WireError if it was before.
  void add(std::uint32_t id, int subtree, const Agreement& what);
  /// Returns what all parts together are ready for, and counts it no more, if those that are not
  /// ready have joined. `ranks`: those of the set, or null if it was removed.
  std::optional<Agreement> take_if_complete(std::uint32_t id, const UnitKey& key,
                                            const std::vector<int>* ranks);
  void erase(std::uint32_t id) { counts_.erase(id); }

  // ---- ranks that have joined
  void join(int process_set, int rank);
  /// A rank is known to have joined, although nobody has said so yet.
  void note_join(int process_set, int rank);
  [[nodiscard]] bool has_joined(int process_set, int rank) const;
  /// Returns the rank of which it became known last that it has joined. Throws WireError if it is
  /// known of none.
  [[nodiscard]] int last_joined(int process_set) const;
  /// All ranks of the set have joined: they take part again.
  void end_join(int process_set);

  void forget_set(int process_set);
  /// Returns how many process sets are remembered, for what is to stay bounded.
  [[nodiscard]] std::size_t sets_kept() const {
    return joined_.size() + join_order_.size() + subtrees_.size();
  }

 private:
  struct Count {
    std::set<int> subtrees;  ///< that are ready, by their first domain
    Agreement what;
  };
  const std::set<int>& subtrees_with(int process_set, const std::vector<int>* ranks);

  std::function<int(int rank)> subtree_of_;
  std::unordered_map<std::uint32_t, Count> counts_;
  std::map<int, std::set<int>> joined_;  ///< of the subtree, by process set
  std::map<int, std::vector<int>>
      join_order_;  ///< by process set: ranks that are known to have joined, as that became known
  std::map<int, std::set<int>> subtrees_;  ///< by process set: those with ranks of it
};

}  // namespace hvd
