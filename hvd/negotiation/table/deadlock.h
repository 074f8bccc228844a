#pragma once
/// Tells ranks that wait for one another for ever from ranks that are late. A rank is blocked while
/// all threads of it that use the library are inside `wait()`, each for an operation that is not
/// agreed: it submits nothing until one of them ends. Blocked ranks are deadlocked if each
/// operation that they wait for lacks one of them. So neither a clock nor a guess says so, and a
/// rank that computes, however long, is never taken for one that is lost. Values and pure
/// functions; BlockedDomains is of the thread that drives the leader.

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "hvd/base/wire.h"
#include "hvd/negotiation/values/pledges.h"

namespace hvd {

struct BlockedRank {
  int rank = 0;
  std::vector<UnitKey> waits;   ///< what its threads wait for
  std::set<UnitKey> submitted;  ///< what it has submitted and is not agreed, those included
  bool operator==(const BlockedRank&) const = default;
};

/// Returns the ranks of a process set, ascending; null if it was removed.
using RanksOf = std::function<const std::vector<int>*(int process_set)>;

/// An operation that can never end.
struct Deadlocked {
  UnitKey key;
  int missing = -1;  ///< a rank that would have to submit it, and waits for another one of these
  std::string text;  ///< which ranks wait for what, the same for all
};
/// Returns the operations that deadlocked ranks wait for, and those that they have submitted
/// besides and another one of them has not: these would wait for a step that is over. But no joins,
/// which may still end when those have; none where no ranks are.
std::vector<Deadlocked> find_deadlock(std::vector<BlockedRank> blocked, const RanksOf& ranks_of);

/// The report of a domain about its ranks that are blocked in operations of several domains.
struct BlockedReport {
  int domain = 0;
  std::vector<BlockedRank> ranks;
  std::map<UnitKey, std::uint64_t> last_decisions;  ///< of what they have submitted: the last under
                                                    ///< the name that the domain knew
  bool operator==(const BlockedReport&) const = default;
};
/// Writes its fields in order: numbers as they are, lists and the map with their count u32 first.
void encode(Writer& writer, const BlockedReport& report);
/// Throws WireError on malformed input.
BlockedReport decode_blocked_report(Reader& reader);

/// The last reports of the domains. The root decides all that their ranks wait for: a report holds
/// until it decides something.
class BlockedDomains {
 public:
  /// This domain is to say what `report` says. Returns false if it has, or never had anything.
  bool note_said(const BlockedReport& report);
  /// Root: a domain has said this.
  void add(BlockedReport report);
  /// Root: returns the operations that can never end. `last_decision` as in a report, of the root.
  [[nodiscard]] std::vector<Deadlocked> find(
      const RanksOf& ranks_of,
      const std::function<std::uint64_t(const UnitKey&)>& last_decision) const;

 private:
  BlockedReport said_;
  std::map<int, BlockedReport> reports_;  ///< by domain; none is without ranks
};

}  // namespace hvd
