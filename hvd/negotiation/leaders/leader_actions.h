#pragma once
/// LeaderTreeActions are what the leader tree asks of its engine: a value of functions, each called
/// by the thread that drives the leader.
// Tested in tests/hvd/negotiation/leader_tree_test.cc

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hvd/errors.h"
#include "hvd/negotiation/values/records.h"
#include "hvd/negotiation/values/signature.h"

namespace hvd {

/// LeaderTreeActions are what the leader tree asks of its engine.
struct LeaderTreeActions {
  /// Introduces a tensor to this domain's log for ranks that say the same of it. Of those that are
  /// this domain's own the log knows already.
  std::function<void(const UnitKey&, const Runs& ranks, const Signature&)> introduce;
  std::function<void(const UnitKey&, const Agreement&)> agree;
  /// Cuts the next batches of the set here. False, and nothing has happened, if this domain has no
  /// room for them yet: it is asked again later.
  std::function<bool(int process_set)> cut;
  /// Root: so many cuts of the set are over in the domain.
  std::function<void(int process_set, int domain, std::uint64_t over)> credit;
  /// A tensor can never be complete, because the rank has left: whoever waits for it is told.
  /// Or as `text` says, if there is one.
  std::function<void(const UnitKey&, int rank, const std::string& text)> refuse;
  std::function<void(int rank)> leave;
  std::function<void()> end;
  /// All ranks of the set wait under the name, for different operations.
  std::function<void(int process_set, const std::string& name, const std::vector<StuckRank>&)>
      conflict;
  std::function<void(const Status&)> fail;
  /// Forgets the tensor in this domain's table, unless it is in use there: then returns false.
  std::function<bool(const UnitKey&)> drop;
  /// Returns the ranks of a process set, ascending; null if it was removed. Throws WireError if
  /// there never was such a set.
  std::function<const std::vector<int>*(int process_set)> ranks_of;
  std::function<int(int rank)> domain_of;
  /// Returns the ranks of this domain that have not submitted what others wait for.
  std::function<std::vector<int>(const UnitKey&)> missing_here = {};

  // ---- of rounds that the leaders may end among themselves
  // (hvd/negotiation/leaders/direct_rounds.h); may be empty
  /// This domain has said in the tree that it is ready.
  std::function<void(std::uint32_t number)> said_ready = {};
  /// The tensor's round is over, by a decision in the tree.
  std::function<void(std::uint32_t number)> over = {};
  /// The number is given up.
  std::function<void(std::uint32_t number)> forgotten = {};
  /// Returns whether this domain has contributed to the tensor's round among the leaders: nothing
  /// is said against it meanwhile.
  std::function<bool(std::uint32_t number)> is_promised = {};
  /// Returns how many of its rounds are over.
  std::function<std::uint64_t(std::uint32_t number)> rounds_over = {};
};

}  // namespace hvd
