#pragma once
/// The fast path runs repeated small operations (hvd/engine/core/repeated_op.h): makes the
/// repeated operations of entries that are worth one, starts them, does the work for all where
/// this rank arrives last, and takes results that others have left, or gets its part out of their
/// blocks. Under the engine's mutex, but for `await`. Of operations that a rank starts one after
/// the other without waiting, those that it arrives in last gather: a rank that waits, polls or
/// submits ends all that are complete in one pass, whose results go out with one ring; the
/// coordination thread does where none comes.

#include <memory>
#include <utility>
#include <vector>

#include "hvd/base/waits.h"
#include "hvd/engine/core/burst.h"
#include "hvd/engine/core/events.h"
#include "hvd/engine/core/repeated_op.h"
#include "hvd/engine/core/submission_queue.h"
#include "hvd/engine/fast_path/repeated_op_factory.h"
#include "hvd/engine/fast_path/round_work.h"

namespace hvd {

class FastPath {
 public:
  FastPath(const EngineParts& parts, NegotiationLog& log, Ledger& ledger, SubmissionQueue& queue,
           EngineMutex& mutex, Burst& burst, EngineEvents& engine);

  /// Starts the call if there is a repeated operation that fits. Null, and nothing has happened,
  /// if not. The operation is the caller's until it clears `in_use`. `waits`: the caller waits for
  /// it at once.
  std::shared_ptr<RepeatedOp> start(const SmallCall& call, bool waits) HVD_REQUIRES(engine_mutex);
  /// The same, for a caller that does not take the result: the operation is the library's until it
  /// ends, `owner` so long. Returns what tells of its end; null if `start` returns null.
  std::shared_ptr<HandleState> start_unowned(const SmallCall& call, std::shared_ptr<void> owner)
      HVD_REQUIRES(engine_mutex);

  /// Returns whether a caller has not seen the end of the last round under the key: as
  /// `Ledger::is_unseen`.
  [[nodiscard]] bool is_unseen(const UnitKey& key) const HVD_REQUIRES(engine_mutex);

  // ---- rounds that gather
  /// Ends the rounds of this rank's operations that all ranks have arrived in, and takes what
  /// results there are.
  void end_complete() HVD_REQUIRES(engine_mutex);
  /// Returns the operation in flight that this is the state of; null if it is none's.
  [[nodiscard]] const RepeatedOp* find(const HandleState& pending) const HVD_REQUIRES(engine_mutex);

  // ---- operations of all ranks of several domains (hvd/engine/leader/direct_path.h)
  /// Returns those of them that this rank has arrived at, and that have not ended.
  [[nodiscard]] const std::vector<RepeatedOp*>& direct_ops() const HVD_REQUIRES(engine_mutex) {
    return direct_ops_;
  }
  /// Returns what one rank does for all of its domain.
  [[nodiscard]] RoundWork& work() { return work_; }
  /// The blocks hold results: claims the round that was prepared, and tells the ranks.
  void give_results(RepeatedOp& op, Rounds::Company company) HVD_REQUIRES(engine_mutex);
  /// Has the operation negotiated.
  void take_long_way(RepeatedOp& op) HVD_REQUIRES(engine_mutex);

  /// Gives the other ranks a moment for the round that `unit` is in, whose end `pending` tells of.
  /// Returns whether there is something for `end_complete` to do. Any thread, no lock.
  bool await(const RepeatedOp::Awaited& round, const HandleState& pending);
  /// Returns whether there is something for `end_complete` to do.
  [[nodiscard]] bool has_complete() const HVD_REQUIRES(engine_mutex);

  /// Puts the entries of all operations in flight into the ledger, where whoever looks at entries
  /// finds them. Until then a round costs no work there: most end before anybody looks.
  void adopt_all() HVD_REQUIRES(engine_mutex);

  /// Returns the repeated operations of this rank.
  [[nodiscard]] RepeatedOpFactory& ops() HVD_REQUIRES(engine_mutex) { return factory_; }
  /// Copies the result to memory that the caller of the operation gives, if it is to, and says what
  /// rows came. Requires that the operation is done, and not the mutex: it calls user code.
  static void fetch(RepeatedOp& op, const SmallCall& call) HVD_EXCLUDES(engine_mutex);
  /// The caller of an operation that is under way will not take its result: the operation is the
  /// library's until it ends, `owner` so long.
  void abandon(RepeatedOp& op, std::shared_ptr<void> owner) HVD_REQUIRES(engine_mutex) {
    op.owner = std::move(owner);
  }
  /// An entry of a repeated operation ends. Returns false if its result was there, and taken.
  bool end(Entry& entry, bool failed) HVD_REQUIRES(engine_mutex);

 private:
  [[nodiscard]] static bool is_unseen(const RepeatedOp& op);
  bool is_ready(RepeatedOp& op) HVD_REQUIRES(engine_mutex);
  void let_go(RepeatedOp& op) HVD_REQUIRES(engine_mutex);
  void begin(RepeatedOp& op, const SmallCall& call) HVD_REQUIRES(engine_mutex);
  void fill_block(RepeatedOp& op) const HVD_REQUIRES(engine_mutex);
  bool arrive(RepeatedOp& op, bool gathers) HVD_REQUIRES(engine_mutex);
  void gather(const RepeatedOp& op) HVD_REQUIRES(engine_mutex);
  void take_results() HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool is_waiting(const RepeatedOp& op) const HVD_REQUIRES(engine_mutex);
  std::size_t end_batch(std::size_t first) HVD_REQUIRES(engine_mutex);
  Entry& adopt(RepeatedOp& op) HVD_REQUIRES(engine_mutex);
  bool arrive_last(RepeatedOp& op) HVD_REQUIRES(engine_mutex);
  void tell_results(RepeatedOp& op, Rounds::Company company) HVD_REQUIRES(engine_mutex);
  void ended(RepeatedOp& op) HVD_REQUIRES(engine_mutex);
  void run_for_all(RepeatedOp& op) HVD_REQUIRES(engine_mutex);
  void take_result(RepeatedOp& op) HVD_REQUIRES(engine_mutex);

  const EngineParts& parts_;
  NegotiationLog& log_;
  Ledger& ledger_;
  SubmissionQueue& queue_;
  EngineMutex& mutex_;
  Burst& burst_;
  EngineEvents& engine_;
  Board& board_;
  RepeatedOpFactory factory_;
  RoundWork work_;
  ShortWait short_wait_;
  const unsigned looks_at_result_;
  const std::size_t most_batch_bytes_;
  std::vector<RepeatedOp*> arrived_
      HVD_GUARDED_BY(engine_mutex);  ///< those in flight: their result may come without a record
  std::vector<RepeatedOp*> direct_ops_ HVD_GUARDED_BY(engine_mutex);  ///< of `arrived_`
  bool has_called_help_ HVD_GUARDED_BY(engine_mutex) =
      false;  ///< the coordination thread ends what gathers
  std::vector<RepeatedOp*> complete_
      HVD_GUARDED_BY(engine_mutex);  ///< of `end_complete`: what may be ended
  std::vector<RepeatedOp*> claimed_ HVD_GUARDED_BY(engine_mutex);  ///< those of one batch
  std::vector<UnitRef> negotiated_ HVD_GUARDED_BY(engine_mutex);   ///< those that are to negotiate
};

}  // namespace hvd
