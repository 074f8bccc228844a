#pragma once
/// Names under which ranks wait long, each for an operation of its own. A domain tells the root
/// once all of its ranks in the set are stuck; when the ranks of all domains are, and their
/// operations differ, that is a conflict, and the root ends it. What is said may be out of date: it
/// counts as long as nothing under the name has been decided since. A value without a lock, of the
/// thread that drives the leader.
// Tested in tests/hvd/engine/leader_task_test.cc

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/negotiation/leaders/leader_messages.h"

namespace hvd {

class StuckNames {
 public:
  /// This domain is to say what `report` says. Returns false if it has, and nothing has been
  /// decided since.
  bool note_said(const StuckReport& report);
  /// Root: adds what a domain has said. Returns all ranks of the set (`ranks`), if all are stuck
  /// and for operations that differ.
  std::optional<std::vector<StuckRank>> add(const StuckReport& report,
                                            const std::vector<int>& ranks);

  /// Forgets who was stuck under the name: something under it has been decided.
  void decided(int process_set, const std::string& name);
  /// A tensor with the name is forgotten.
  void forget(int process_set, const std::string& name);
  void forget_set(int process_set);
  /// Returns how many names are remembered, for what is to stay bounded.
  [[nodiscard]] std::size_t count() const { return said_.size() + stuck_.size(); }

 private:
  using Name = std::pair<int, std::string>;  ///< process set and name
  std::map<Name, std::uint64_t>
      said_;  ///< this domain has said so, when this was the last decision about the name
  std::map<Name, std::map<int, OpKind>> stuck_;  ///< root: by rank, for what
};

}  // namespace hvd
