#pragma once
/// Is one rank's engine: takes submissions, announces them to the other ranks, and drives what is agreed to its end.
///
///   submit -> EntryFactory -> Ledger -> Controller -> [the domain's log] -> NegotiationLog -> outcomes
///   outcomes -> entries that have failed, and batches -> BatchRunner -> Backend -> HandleState
///
/// Parts, each with a file pair and the owner of its state: CallerThreads, EntryFactory, Ledger, SubmissionQueue, NegotiationLog,
/// Controller, Cutter, Leavers, FastPath, BatchRunner, Submitter, OutcomeHandler, LeaderTask, FailureMessenger, Deadlocks, Health,
/// ProgressLoop. Calls lead down in this order; back up leads only `EngineEvents`, which the engine implements. The engine itself owns the
/// mutex, decides how entries and worlds end, and is the only one to finish entries.
///
/// Locks, in the order in which they are taken: the engine's mutex (EngineLock), the board's lock (Transaction, BoardLock), and those of
/// leaves that call nothing: timeline, process sets, staging memory. Wake-ups and the ends of entries wait until the engine's mutex is
/// free. Threads: `submit` may be called by any; it announces in the caller's thread. One thread at a time has the `Turn`: it reads the
/// log, launches and advances batches, and is the only one that calls backends and transport. That is a user thread inside `wait()` where
/// there is one; otherwise the coordination thread.
/// A failure is caught once, by the thread that has the turn; it ends the world: every pending submission fails with its reason, here and
/// on all ranks, until shutdown() and init().

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/base/visible.h"
#include "hvd/engine/agreement/controller.h"
#include "hvd/engine/agreement/cutter.h"
#include "hvd/engine/agreement/entry_factory.h"
#include "hvd/engine/agreement/leavers.h"
#include "hvd/engine/core/caller_threads.h"
#include "hvd/engine/core/engine_lock.h"
#include "hvd/engine/core/events.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/submission_queue.h"
#include "hvd/engine/fast_path/fast_path.h"
#include "hvd/engine/health/failure_messenger.h"
#include "hvd/engine/health/health.h"
#include "hvd/engine/leader/leader_task.h"
#include "hvd/engine/outcome_handler.h"
#include "hvd/engine/progress/batch_runner.h"
#include "hvd/engine/progress/progress_loop.h"
#include "hvd/engine/progress/submitter.h"
#include "hvd/submission.h"

namespace hvd {

/// Whether the caller goes straight on to `wait()`, and so will drive the engine itself; or comes back with the same submission, once it
/// has waited for this one.
enum class After : std::uint8_t { Return, Wait, Repeat };

class Engine : private EngineEvents {
 public:
  /// Starts the coordination thread. Throws std::system_error if the system has none to give.
  explicit Engine(EngineParts parts);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Takes a submission, and returns what tells of its end. Throws InvalidArgument or DuplicateName (and then nothing has happened),
  /// Shutdown, or what ended the world. Any thread.
  HVD_BETWEEN_LIBRARIES std::shared_ptr<HandleState> submit(Submission submission, After after = After::Return);
  /// Submits the operation and waits for it, without memory from the heap, if this rank has a persistent operation for it: if it has been
  /// submitted twice before by a caller that waited. Returns false, and nothing has happened, if not: it is to be submitted. Throws as
  /// `wait` does. Any thread.
  HVD_BETWEEN_LIBRARIES bool try_fast_path(const SmallCall& call);
  /// Returns what `try_fast_path` returns true for, and does not wait for it: `finish_fast_path` or `abandon_fast_path` must follow, with
  /// the same call. Null, and nothing has happened, if there is none. `after`: Wait or Repeat. Any thread.
  std::shared_ptr<PersistentOp> start_fast_path(const SmallCall& call, After after);
  /// Waits for what `start_fast_path` has returned. Throws as `wait` does.
  void finish_fast_path(PersistentOp& op, const SmallCall& call);
  /// Leaves it to itself: `owner` (not null) owns its memory, and is released when it has ended.
  void abandon_fast_path(const std::shared_ptr<PersistentOp>& op, std::shared_ptr<void> owner);
  /// Starts what its caller waits for by the state that is returned, if there is a persistent operation for it: as `submit` does, without
  /// a submission. `owner` owns its memory. Null, and nothing has happened, if there is none. Throws as `submit` does. Any thread.
  std::shared_ptr<HandleState> start_unowned(const SmallCall& call, const std::shared_ptr<void>& owner);
  /// The calling thread has called `init()`, as it has on all ranks: its operations without names are told from those of other threads.
  void enter_init_thread();
  /// Throws InvalidArgument where `submit` would, for what this rank can see by itself. Nothing is sent, nothing is read. Any thread.
  HVD_BETWEEN_LIBRARIES void check(Submission submission) const;
  /// Returns a name for the next persistent operation without one: the same on all ranks that ask in the same order. Throws InvalidArgument
  /// where that order is not known, as several threads ask. Any thread.
  HVD_BETWEEN_LIBRARIES std::string persistent_name(int process_set, OpKind kind);
  /// Blocks until the submission is done, or enqueued if it is `on_stream`; throws what it failed with. Any thread.
  HVD_BETWEEN_LIBRARIES void wait(HandleState& pending);
  /// Returns whether it is done, failed included; does a little driving, so that polling alone gets there. Any thread.
  bool poll(const HandleState& pending);

  /// Returns memory on the device for tensors of an operation like this one, which then needs no packing: see Backend::allocate. Null
  /// where the operation would not gain from it. Any thread.
  HVD_BETWEEN_LIBRARIES std::shared_ptr<void> allocate(const Submission& like, DataType dtype, std::size_t bytes);

  /// Collective. Blocks until all ranks have called it and what was agreed is done; what is still pending then fails with Shutdown.
  /// Returns whether it came to that: false if the world had failed, or if `patience` ran out first.
  bool shutdown(std::chrono::milliseconds patience = std::chrono::hours(24 * 365));

  /// Not collective: this rank ends without shutdown(), for the reason given. Where it speaks for its domain it tells the other domains,
  /// which cannot see it die; its own does, and is told nothing, so that this rank is the first of them to end. Nothing can be driven
  /// afterwards. False, and nothing has happened, where there is nobody to tell, or another thread of this rank is driving.
  bool desert(const Status& why) noexcept;

  [[nodiscard]] const Topology& topology() const { return parts_.topology; }
  /// Returns CUDA's index of this rank's GPU; -1 without one.
  [[nodiscard]] int device() const { return parts_.device; }
  [[nodiscard]] const Config& config() const { return parts_.config; }
  /// Returns what all ranks have said; process sets may be asked for by any thread, all else is the engine's.
  [[nodiscard]] const Negotiator& negotiator() const { return log_.table(); }
  [[nodiscard]] Stats stats() const { return parts_.stats->read(); }
  /// Returns how many batches and rounds of this rank took the way.
  [[nodiscard]] std::uint64_t taken(RouteChoice way) const {
    return way.access == Access::None ? parts_.stats->routes[static_cast<std::size_t>(way.route)].load()
                                      : parts_.stats->accesses[static_cast<std::size_t>(way.access)].load();
  }
  [[nodiscard]] Timeline& timeline() const { return *parts_.timeline; }
  [[nodiscard]] const std::vector<std::unique_ptr<Backend>>& backends() const { return parts_.backends; }

  /// For tests: the coordination thread ends as if the process had been killed.
  void die_for_test() { loop_.die(); }
  /// For tests: returns how many persistent operations there are, and gives back what they keep. None may be in use.
  std::size_t drop_persistent_for_test();
  /// For tests: return what is kept of tensors and of process sets, in this rank's tables and its leader tree.
  [[nodiscard]] std::size_t tensors_kept_for_test();
  [[nodiscard]] std::size_t sets_kept_for_test();

 private:
  // ---- what the parts ask of the engine
  void on_outcomes(Outcomes& outcomes, bool said_here) override HVD_REQUIRES(engine_mutex);
  void finish(Entry& entry, Status status) override HVD_REQUIRES(engine_mutex);
  void arrived(Entry& entry, std::uint32_t arrived) override HVD_REQUIRES(engine_mutex) { submitter_.arrived(entry, arrived); }
  bool progress(const Turn& turn) noexcept override;
  void look_for_trouble(const Turn& turn) noexcept override { health_.look(turn); }
  [[nodiscard]] bool polls(const Turn& turn) const override;
  [[nodiscard]] bool has_results(const Turn& turn) override;
  [[nodiscard]] std::uint32_t burst() const override { return fast_path_.burst() + negotiated_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool is_gathering() const override { return fast_path_.is_gathering() || has_gathered_.load(); }
  [[nodiscard]] bool has_more(const Turn& turn) override;
  [[nodiscard]] bool expects_messages(const Turn& turn) override;

  void hand_over(bool small_work);
  void call_for_burst();
  void end_burst() {
    fast_path_.end_burst();
    negotiated_.store(0, std::memory_order_relaxed);
  }
  void await_round(const PersistentOp::Awaited& round, const HandleState& pending);
  void end_complete() HVD_REQUIRES(engine_mutex);
  void end_gathered();
  void drive_direct(const PersistentOp::Awaited& round, const HandleState& pending);
  std::shared_ptr<HandleState> start_small(const Submission& submission);
  enum class Work : std::uint8_t { None, Small, Large };
  bool may_start() HVD_REQUIRES(engine_mutex);
  Work work_left(bool in_burst) HVD_REQUIRES(engine_mutex);
  std::optional<PersistentOp::Awaited> find_round(const HandleState& pending);
  void wait_longer(HandleState& pending);
  bool leave();
  std::shared_ptr<HandleState> submit_anew(Submission submission, After after);
  void bury_removed_sets(const Turn& turn) HVD_REQUIRES(engine_mutex);
  void fail_everything(const Turn& turn, const Status& failure) noexcept;
  void warn_of_failure() HVD_REQUIRES(engine_mutex);

  EngineParts parts_;
  Board& board_;
  EngineMutex mutex_;
  CallerThreads callers_;
  Ledger ledger_ HVD_GUARDED_BY(engine_mutex);
  SubmissionQueue queue_;
  NegotiationLog log_;
  EntryFactory factory_;
  Cutter cutter_;
  Controller controller_;
  Leavers leavers_;
  FastPath fast_path_;
  BatchRunner runner_;
  Submitter submitter_;
  OutcomeHandler handler_;
  std::unique_ptr<LeaderTask> leader_;  // of a rank that leads its domain in a world of several
  FailureMessenger messenger_;
  Health health_;
  ProgressLoop loop_;

  bool somebody_left_ HVD_GUARDED_BY(engine_mutex) = false;  ///< and what waits for them is still to be looked at
  bool failure_handled_ = false;                             // of the thread that has the turn
  std::atomic<bool> stopped_cleanly_{false};
  std::atomic<std::uint32_t> negotiated_{0};  ///< of a burst between hosts: what the fast path has no part in
  std::atomic<bool> has_gathered_{false};     ///< announced in a burst since somebody has driven, and the coordination thread called
};

}  // namespace hvd
