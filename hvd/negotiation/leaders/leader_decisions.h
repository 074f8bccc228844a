#pragma once
/// The decisions of a leader tree: what is complete, and passed on or decided; what can never be,
/// and is refused; and which numbers are given up. The root decides; other leaders count for their
/// subtree, and do what the root says. Part of a LeaderTree, which owns what it refers to. Run by
/// the thread that drives the leader.
// Tested in tests/hvd/negotiation/leader_tree_test.cc

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "hvd/negotiation/board/local_events.h"
#include "hvd/negotiation/leaders/leader_actions.h"
#include "hvd/negotiation/leaders/leader_inbox.h"
#include "hvd/negotiation/leaders/leader_links.h"
#include "hvd/negotiation/leaders/leader_messages.h"
#include "hvd/negotiation/leaders/stuck_names.h"
#include "hvd/negotiation/leaders/tensor_numbers.h"
#include "hvd/negotiation/table/deadlock.h"
#include "hvd/negotiation/table/departed_ranks.h"
#include "hvd/negotiation/table/readiness_counts.h"

namespace hvd {

class LeaderDecisions {
 public:
  LeaderDecisions(LeaderLinks& links, LeaderInbox& inbox, UnsaidEvents& unsaid,
                  TensorNumbers& numbers, ReadinessCounts& counts, const LeaderTreeActions& actions)
      : links_(links),
        inbox_(inbox),
        unsaid_(unsaid),
        numbers_(numbers),
        counts_(counts),
        actions_(actions) {}

  // ---- readiness
  /// Counts that a subtree is ready; passes that on, or decides, where all of this leader's are.
  void count_ready(std::uint32_t id, int subtree, const Agreement& what);
  /// Acts on the root's decision.
  void decided(std::uint32_t id);
  void learn_joined(int process_set, int rank);
  /// Returns what changes with each end of a round under the name.
  [[nodiscard]] std::uint64_t last_decision(int process_set, const std::string& name) const;

  // ---- what can never be complete
  void left(int rank, Pledges pledges, int subtree);
  void spread_leaving(int rank, int from);
  /// Returns how many ranks have left, at the root.
  [[nodiscard]] std::size_t departed() const { return departed_.count(); }
  void doubted(const UnitKey& key);
  void refuse(const UnitKey& key, int rank, const std::string& text = {});
  /// Root: looks again at what may never be complete, and was prepared.
  void refuse_put_off();
  [[nodiscard]] bool is_promised(const UnitKey& key) const;

  // ---- ranks that wait for one another
  /// These do what LeaderTree::stuck and LeaderTree::blocked do.
  void stuck(int process_set, const std::string& name, const std::vector<StuckRank>& stuck_ranks);
  void blocked(BlockedReport report);
  /// Root: takes note of what another domain says.
  void note_blocked(BlockedReport report) { blocked_.add(std::move(report)); }
  void note_stuck(const StuckReport& report);
  void end_conflict(const StuckReport& report);

  // ---- deadlines
  /// Does what LeaderTree::late does, for a report of `subtree`.
  void late(LateReport report, int subtree);

  // ---- numbers
  void retire(std::vector<std::uint32_t> ids);
  void answer_if_complete();
  void end_retiring(const std::vector<std::uint32_t>& given_up);
  /// Forgets all of a set that was removed: nobody waits any more for what was to happen in it.
  void removed(int process_set);
  /// Returns how many names it remembers something of, for what is to stay bounded.
  [[nodiscard]] std::size_t names_kept() const { return stuck_names_.count(); }

 private:
  void pass_on_if_complete(std::uint32_t id);
  void decide(std::uint32_t id, Agreement what);
  void refuse_if_hopeless(const UnitKey& key);
  void end_deadlocks();
  void forget(const UnitKey& key);
  void over(std::uint32_t id);
  void add_missing(LateReport& report, int subtree, const std::vector<int>& ranks) const;

  LeaderLinks& links_;
  LeaderInbox& inbox_;
  UnsaidEvents& unsaid_;
  TensorNumbers& numbers_;
  ReadinessCounts& counts_;
  const LeaderTreeActions& actions_;
  StuckNames stuck_names_;
  BlockedDomains blocked_;
  // root: what it has found last; the next time there may be more ranks in it
  std::string deadlock_;
  DepartedRanks departed_;  // root
  // root: to be looked at again, for refusal, once they are not prepared
  std::set<UnitKey> put_off_;
};

}  // namespace hvd
