#pragma once
/// Ends what ranks that have called shutdown() make impossible. A rank that leaves makes
/// reservations for what it still takes part in: what it has submitted. Within a domain the log
/// then says which units can never be complete. Of a set that spans domains only the root can tell:
/// it sees what domains are ready for and who has left in one order. So a rank that waits for such
/// a unit queries it, and the root refuses it for all. A rank that leaves with sends or recvs
/// pending lingers, and the world with it, until they have ended: all of them do, as those that
/// have left drive on until all have. Under the engine's mutex.

#include <string>
#include <vector>

#include "hvd/engine/core/ledger.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/submission_queue.h"
#include "hvd/negotiation/board/negotiation_log.h"

namespace hvd {

class Leavers {
 public:
  Leavers(const EngineParts& parts, NegotiationLog& log, Ledger& ledger, SubmissionQueue& queue)
      : parts_(parts), log_(log), ledger_(ledger), queue_(queue), board_(*parts.board) {}

  /// Says that this rank leaves, and what it still takes part in. `lingers`: also in sends or
  /// recvs. Returns false, and nothing has happened, if it is in a prepared round whose end other
  /// domains are to hear first.
  bool leave(bool lingers) HVD_REQUIRES(engine_mutex);
  /// Returns whether it has left so, and `end_lingering` is to follow once they have ended.
  [[nodiscard]] bool lingers() const HVD_REQUIRES(engine_mutex) { return lingers_; }
  void end_lingering() HVD_REQUIRES(engine_mutex);
  /// Says that a rank of another domain has left.
  void leave_elsewhere(int rank) HVD_REQUIRES(engine_mutex);
  /// Sees to it that a unit that this rank waits for, and that can never be complete because a rank
  /// has left, is refused.
  void doubt(UnitRef unit) HVD_REQUIRES(engine_mutex);
  /// The same for all units that this rank waits for.
  void doubt_all() HVD_REQUIRES(engine_mutex);
  /// Refuses a unit as the root says, because the rank has left, or as `text` says. Returns whether
  /// what this domain was ready for is void with it.
  bool refuse_by_root(const UnitKey& key, int left_rank, const std::string& text)
      HVD_REQUIRES(engine_mutex);

 private:
  [[nodiscard]] const Negotiator& table() const { return log_.table(); }
  [[nodiscard]] std::vector<Pledge> pledges() const HVD_REQUIRES(engine_mutex, board_lock);
  bool try_to_doubt(UnitRef unit) HVD_REQUIRES(engine_mutex);
  bool try_to_refuse(const UnitKey& key, int left_rank, const std::string& text, bool& is_void)
      HVD_REQUIRES(engine_mutex);

  const EngineParts& parts_;
  NegotiationLog& log_;
  Ledger& ledger_;
  SubmissionQueue& queue_;
  Board& board_;
  bool lingers_ HVD_GUARDED_BY(engine_mutex) = false;
};

}  // namespace hvd
