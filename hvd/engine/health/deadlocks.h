#pragma once
/// Ends operations that can never end, as the ranks wait for one another, each for one that the
/// other does not submit: a rank has left out a batch after an error that it has caught, or has
/// made one wrapper more. Each rank says on the board that it is blocked; what ranks of one domain
/// lack of each other, any of them finds there; between domains the leaders tell the root
/// (hvd/negotiation/table/deadlock.h). Who waits then gets a Mismatch that says which rank waits
/// for what, and the world goes on. Under the engine's mutex.

#include <string>
#include <vector>

#include "hvd/engine/core/caller_threads.h"
#include "hvd/engine/core/continuations.h"
#include "hvd/engine/core/ledger.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/submission_queue.h"
#include "hvd/engine/leader/leader_task.h"
#include "hvd/negotiation/board/negotiation_log.h"
#include "hvd/negotiation/table/deadlock.h"

namespace hvd {

class Deadlocks {
 public:
  /// A rank counts as blocked when it has waited for the same all this time: for threads of it that
  /// have not used the library yet.
  static constexpr std::chrono::seconds kGrace{2};

  Deadlocks(const EngineParts& parts, NegotiationLog& log, Ledger& ledger,
            const SubmissionQueue& queue, CallerThreads& callers, LeaderTask* leader,
            const Continuations& continuations)
      : parts_(parts),
        log_(log),
        ledger_(ledger),
        queue_(queue),
        callers_(callers),
        leader_(leader),
        continuations_(continuations),
        board_(*parts.board) {
    for (auto* const list : {&seen_, &waiting_}) list->reserve(kUsualThreads);
    units_.reserve(kUsualThreads);
  }

  /// Says whether this rank is blocked, and ends what can never end. Called now and then.
  void look() HVD_REQUIRES(engine_mutex);

 private:
  static constexpr std::size_t kUsualThreads = 8;  // so many, and a look allocates nothing
  [[nodiscard]] const Negotiator& table() const { return log_.table(); }
  void tell_of_this_rank() HVD_REQUIRES(engine_mutex);
  void find_waited_for() HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool add_waited_for(const Entry& entry) HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool will_submit() const HVD_REQUIRES(engine_mutex);
  [[nodiscard]] std::vector<BlockedRank> blocked_here() const
      HVD_REQUIRES(engine_mutex, board_lock);
  void end_here() HVD_REQUIRES(engine_mutex);

  const EngineParts& parts_;
  NegotiationLog& log_;
  Ledger& ledger_;
  const SubmissionQueue& queue_;
  CallerThreads& callers_;
  LeaderTask* const leader_;  // null where this rank leads no domain
  const Continuations& continuations_;
  Board& board_;
  std::vector<CallerThreads::Waiting> waiting_ HVD_GUARDED_BY(engine_mutex);  ///< at this look
  std::vector<CallerThreads::Waiting> seen_ HVD_GUARDED_BY(engine_mutex);     ///< at the last look
  std::vector<UnitRef> units_ HVD_GUARDED_BY(engine_mutex);  ///< those waited for, each once
  Clock::time_point since_ HVD_GUARDED_BY(engine_mutex);     ///< when that was seen first
  Clock::time_point next_search_ HVD_GUARDED_BY(engine_mutex);
  std::string found_ HVD_GUARDED_BY(
      engine_mutex);  ///< by the last search: who waits for what; the next one may find more ranks
};

}  // namespace hvd
