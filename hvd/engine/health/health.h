#pragma once
/// Looks now and then for what would keep a world waiting for ever: ranks that have died,
/// operations that wait too long, different operations under one name, ranks that wait for one
/// another, and hosts that are silent; also that of this rank, of which the others can tell its
/// leader alone. The thread that has the turn calls it; what it finds ends the world or is logged.
/// A FailureMessenger then tells the other domains. Never throws.
// Tested in tests/hvd/engine/failure_messenger_test.cc, tests/hvd/engine/engine_test.cc

#include <atomic>
#include <map>
#include <string>

#include "hvd/engine/agreement/controller.h"
#include "hvd/engine/core/engine_lock.h"
#include "hvd/engine/core/events.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/submission_queue.h"
#include "hvd/engine/core/turn.h"
#include "hvd/engine/health/deadlocks.h"
#include "hvd/engine/leader/leader_task.h"
#include "hvd/engine/peers/peer_messages.h"

namespace hvd {

class Health {
 public:
  Health(const EngineParts& parts, NegotiationLog& log, Controller& controller, Ledger& ledger,
         SubmissionQueue& queue, CallerThreads& callers, LeaderTask* leader, PeerMessages& messages,
         EngineMutex& mutex)
      : parts_(parts),
        log_(log),
        controller_(controller),
        ledger_(ledger),
        queue_(queue),
        leader_(leader),
        messages_(messages),
        mutex_(mutex),
        deadlocks_(parts, log, ledger, queue, callers, leader, mutex.continuations()) {}

  /// Looks, if it is time.
  void look(const Turn& turn) noexcept HVD_EXCLUDES(engine_mutex);

  /// An entry is to end by then: whoever sleeps until there is something to look for sleeps no
  /// longer than that. Any thread.
  void expect(Clock::time_point deadline);
  /// Returns when the next is to; Entry::kNever: none.
  [[nodiscard]] Clock::time_point next_deadline() const {
    return Clock::time_point(Clock::duration(next_deadline_.load()));
  }

 private:
  [[nodiscard]] const Negotiator& table() const { return log_.table(); }
  bool end_if_leader_is_silent(Clock::duration since_last_look);
  void look_for_conflicts() HVD_REQUIRES(engine_mutex);
  void report_stalls() HVD_REQUIRES(engine_mutex);
  void report_late_messages() HVD_REQUIRES(engine_mutex);
  bool is_next(Clock::time_point deadline);
  void report_silence() HVD_REQUIRES(engine_mutex);
  /// Returns which ranks' host has said nothing for how long.
  [[nodiscard]] std::string describe_silence(const Heartbeat::Silence& silence) const;
  void report_stall(Entry& entry, Clock::time_point now, bool waits_for_name)
      HVD_REQUIRES(engine_mutex);
  void look_for_late() HVD_REQUIRES(engine_mutex);
  void tell_of_late() HVD_REQUIRES(engine_mutex);
  [[nodiscard]] Clock::time_point end_if_late(Entry& entry, Clock::time_point now,
                                              bool waits_for_name) HVD_REQUIRES(engine_mutex);
  /// Says who keeps an entry waiting, and whether that is all that anybody can know.
  struct Culprits {
    std::string text;
    bool known = true;
  };
  [[nodiscard]] Culprits find_culprits(const Entry& entry, bool waits_for_name) const
      HVD_REQUIRES(engine_mutex);
  /// Returns who keeps the entry waiting, as far as this rank can know; empty if it cannot.
  [[nodiscard]] std::string describe_missing(const Entry& entry) const HVD_REQUIRES(engine_mutex);
  [[nodiscard]] std::string describe_others(const Entry& entry) const HVD_REQUIRES(engine_mutex);

  const EngineParts& parts_;
  NegotiationLog& log_;
  Controller& controller_;
  Ledger& ledger_;
  SubmissionQueue& queue_;
  LeaderTask* const leader_;  // null where this rank leads no domain
  PeerMessages& messages_;
  EngineMutex& mutex_;
  Deadlocks deadlocks_ HVD_GUARDED_BY(engine_mutex);
  std::map<int, Clock::time_point> silence_reported_ HVD_GUARDED_BY(engine_mutex);  ///< by domain
  std::atomic<Clock::rep> next_deadline_{Entry::kNever.time_since_epoch().count()};
  // of the thread that has the turn
  Clock::time_point last_look_ = Clock::now();
  std::uint64_t leader_beats_ = 0;     ///< at the last look
  Clock::duration leader_silence_{0};  ///< for so long there were no more
  std::uint64_t seen_stuck_marks_ HVD_GUARDED_BY(engine_mutex) = 0;
};

/// Tells the other domains that the world has failed, which they cannot see by themselves. A
/// domain's leader speaks for it; where that is dead, the first of its ranks that live. By the
/// thread that has the turn. Never throws.
class FailureMessenger {
 public:
  /// `leader`: null where this rank leads no domain.
  FailureMessenger(const EngineParts& parts, LeaderTask* leader, EngineMutex& mutex)
      : parts_(parts), leader_(leader), mutex_(mutex) {}

  /// Tells the others, if this rank speaks for its domain.
  void tell(const Turn& turn, const Status& status) noexcept HVD_EXCLUDES(engine_mutex);
  /// Lets what was told reach the others, and hears what they tell; to be called again and again.
  void drain(const Turn& turn) noexcept HVD_EXCLUDES(engine_mutex);

 private:
  const EngineParts& parts_;
  LeaderTask* const leader_;
  EngineMutex& mutex_;
};

}  // namespace hvd
