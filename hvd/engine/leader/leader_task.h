#pragma once
/// LeaderTask is a leader's work for its domain in a world of several: it passes on to the other
/// leaders what the domain's log says, and writes into the log what they say and what the root
/// decides. Owns the leader tree. Of a rank that leads its domain; the thread that has the turn
/// drives it, under the engine's mutex.

#include <algorithm>
#include <chrono>
#include <deque>
#include <string>
#include <vector>

#include "hvd/engine/agreement/controller.h"
#include "hvd/engine/agreement/cutter.h"
#include "hvd/engine/agreement/leavers.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/turn.h"
#include "hvd/engine/leader/direct_path.h"
#include "hvd/engine/leader/heartbeat.h"
#include "hvd/negotiation/leaders/leader_tree.h"

namespace hvd {

class LeaderTask {
 public:
  LeaderTask(const EngineParts& parts, NegotiationLog& log, Controller& controller, Cutter& cutter,
             Leavers& leavers, FastPath& fast_path);

  /// Takes note of what the other domains are to know.
  void note(const Outcomes& outcomes) HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool has_noted() const HVD_REQUIRES(engine_mutex) { return !noted_.empty(); }
  /// Passes on what was taken note of, acts on what has arrived; the root also decides. Returns
  /// whether there was anything.
  bool drive(const Turn& turn) HVD_REQUIRES(engine_mutex);
  /// Does that for rounds among leaders alone (hvd/engine/leader/direct_path.h). Returns false if
  /// there is something else to do.
  bool drive_direct(const Turn& turn) HVD_REQUIRES(engine_mutex);
  /// After a failure: passes on what says so, and lets the transport send it. Never throws.
  void drain(const Turn& turn) noexcept HVD_REQUIRES(engine_mutex);
  /// Returns the neighbours in the tree from which nothing has come for so long.
  [[nodiscard]] std::vector<Heartbeat::Silence> silences(std::chrono::seconds limit) const
      HVD_REQUIRES(engine_mutex) {
    return heartbeat_.silences(limit);
  }
  /// Returns how many tensors the tree remembers, which is to stay bounded.
  [[nodiscard]] std::size_t tensors_kept() const HVD_REQUIRES(engine_mutex) {
    return std::max(tree_.tensors_kept(), direct_.numbers_kept());
  }
  [[nodiscard]] std::size_t sets_and_names_kept() const HVD_REQUIRES(engine_mutex) {
    return tree_.sets_and_names_kept();
  }
  /// Tells the other domains that the world has failed.
  void tell_failure(const Turn& turn, const Status& status) HVD_REQUIRES(engine_mutex);
  /// Names under which ranks of any domains submit different operations.
  [[nodiscard]] const TensorNumbers::Names& ambiguous_names() const HVD_REQUIRES(engine_mutex) {
    return tree_.ambiguous_names();
  }
  /// The set's ranks in this domain wait long under the name, each for an operation of its own.
  void tell_stuck(int process_set, const std::string& name,
                  const std::vector<StuckRank>& stuck_ranks) HVD_REQUIRES(engine_mutex) {
    tree_.stuck(process_set, name, stuck_ranks);
  }
  /// These ranks of this domain are blocked in operations of several domains, or none are. The root
  /// is also to look whether any can end.
  void tell_blocked(std::vector<BlockedRank> ranks) HVD_REQUIRES(engine_mutex);

  /// An operation of this domain has not ended by its deadline; to be said again and again.
  void tell_late(LateReport report) HVD_REQUIRES(engine_mutex) { tree_.late(std::move(report)); }

  /// Returns ranks of other domains that may keep the operation waiting, as this leader knows.
  [[nodiscard]] std::vector<int> awaited(const UnitKey& key) const HVD_REQUIRES(engine_mutex);
  /// Returns whether there is something to decide.
  [[nodiscard]] bool has_work() const HVD_REQUIRES(engine_mutex) {
    return tree_.is_root() && table().agreed().has(Scope::World);
  }
  /// Returns whether messages are to be expected soon: some are ready for what others are not, or
  /// there was traffic in the last second.
  [[nodiscard]] bool expects_messages() const HVD_REQUIRES(engine_mutex);

 private:
  LeaderTreeActions actions();
  [[nodiscard]] const Negotiator& table() const { return log_.table(); }
  void end_conflict(int set, const std::string& name, const std::vector<StuckRank>& stuck_ranks)
      HVD_REQUIRES(engine_mutex);
  bool decide_cuts() HVD_REQUIRES(engine_mutex);

  const EngineParts& parts_;
  NegotiationLog& log_;
  Controller& controller_;
  Cutter& cutter_;
  Leavers& leavers_;
  Clock::time_point last_traffic_ HVD_GUARDED_BY(engine_mutex);
  Heartbeat heartbeat_ HVD_GUARDED_BY(engine_mutex);
  DirectPath direct_ HVD_GUARDED_BY(engine_mutex);
  LeaderTree tree_ HVD_GUARDED_BY(engine_mutex);
  std::deque<LocalEvent> noted_ HVD_GUARDED_BY(engine_mutex);
};

}  // namespace hvd
