#pragma once
/// Joins the board's log and the negotiator's table of one rank: what is read, and what is
/// appended, changes the table in one order.
///
///   append: Transaction(log, budget) -> read all -> table.apply(record) -> listener ->
///   board.log().append(record)
///   read:   board.log().read_next() -> table.apply(record) -> listener, one record at a time: what
///           an agreement or a cut means is what the table says just then, and a slot's words may
///           be overwritten once all ranks have read past the cut
///
/// Owns the table. Under the engine's mutex; appends also under the board's lock, which a
/// Transaction holds.
// Tested in tests/hvd/engine/controller_test.cc, tests/hvd/negotiation/patience_test.cc

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/negotiation/board/board.h"
#include "hvd/negotiation/table/negotiator.h"
#include "hvd/negotiation/values/capabilities.h"

namespace hvd {

/// An OutcomeListener is told what each record brought about, before the next one is read.
class OutcomeListener {
 public:
  virtual ~OutcomeListener() = default;
  /// `said_here`: this rank appends the record; otherwise another has.
  virtual void on_outcomes(Outcomes& outcomes, bool said_here) HVD_REQUIRES(engine_mutex) = 0;
};

class NegotiationLog {
 public:
  /// `groups_alone`: as in hvd/negotiation/table/planner.h. `world`: its name, for messages.
  NegotiationLog(Board& board, const Topology& topology, std::string world,
                 std::vector<ProcessSetInfo> sets, std::uint64_t fusion_threshold_bytes,
                 bool groups_alone, OutcomeListener& listener)
      : board_(board),
        table_(topology, std::move(sets), fusion_threshold_bytes, board.slots(), groups_alone,
               std::move(world)),
        listener_(listener) {}

  /// Returns what all ranks have said so far. Process sets may be asked for by any thread, all else
  /// needs the engine's mutex.
  [[nodiscard]] const Negotiator& table() const { return table_; }
  [[nodiscard]] Board& board() const { return board_; }

  /// Reads what is new. Throws WireError if a record makes no sense, and what the listener throws.
  void read() HVD_REQUIRES(engine_mutex);
  /// Returns the world's failure with what was said before it and may have brought it about: a rank
  /// dies of it that another has left.
  [[nodiscard]] Status explained(const Status& failure) noexcept HVD_REQUIRES(engine_mutex);
  /// Forgets process sets that were removed and that are not `in_use` here.
  void bury_removed(const std::function<bool(int process_set)>& in_use) HVD_REQUIRES(engine_mutex) {
    table_.bury_removed(in_use);
  }
  /// Wakes whoever has not read the log for long, and waits a moment. Under no lock.
  void nudge_readers();

  /// A wait for other ranks to read the log, which those that live do within moments
  /// (hvd/negotiation/board/patience.h). It may hold up all threads of this rank: the engine's
  /// mutex may be held, the board's lock not.
  class ReaderWait {
   public:
    explicit ReaderWait(NegotiationLog& log)
        : log_(log), wait_(log.board_.make_wait(PatientWait::kReads)) {}
    /// Wakes whoever has not read the log for long, and waits a moment. Returns false once the
    /// world has failed.
    bool nudge();

   private:
    NegotiationLog& log_;
    PatientWait wait_;
  };

  /// Appends some records in a row: holds the board's lock, with all of the log read, and with room
  /// for `budget` bytes of records.
  class HVD_SCOPED_CAPABILITY Transaction {
   public:
    /// Blocks until there is room, reading meanwhile. Throws what ends the world first. Requires
    /// the engine's mutex, which the analysis cannot be told of a constructor that acquires.
    Transaction(NegotiationLog& log, std::size_t budget) HVD_ACQUIRE(board_lock);
    ~Transaction() HVD_RELEASE();
    Transaction(const Transaction&) = delete;
    Transaction& operator=(const Transaction&) = delete;

    /// Applies the record to this rank's table and gives it to the others. Throws std::logic_error
    /// beyond the budget: nothing has happened then.
    void append(const Bytes& record) HVD_REQUIRES(engine_mutex, board_lock);
    /// Returns whether a record of so many bytes is within what is left of the budget.
    [[nodiscard]] bool fits(std::size_t record_bytes) const {
      return left_ >= bytes_of_record(record_bytes);
    }

   private:
    NegotiationLog& log_;
    std::size_t left_;
  };

  /// Bytes that a record takes up in the log.
  static constexpr std::size_t bytes_of_record(std::size_t record_bytes) {
    return sizeof(std::uint32_t) + record_bytes;
  }

 private:
  void warn_of_slowest();
  void ring_readers();

  Board& board_;
  Negotiator table_;
  OutcomeListener& listener_;
  /// The rank that has left half of the log unread, and since when it has read no further.
  struct Behind {
    BoardLog::SlowestReader reader{Board::kNobody, 0};
    std::chrono::steady_clock::time_point since, next_warning;
  } behind_;
};

using Transaction = NegotiationLog::Transaction;
using ReaderWait = NegotiationLog::ReaderWait;

}  // namespace hvd
