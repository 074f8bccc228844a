#pragma once
/// The engine of one rank: takes submissions, announces them to the other ranks, and drives what is
/// agreed to its end.
///
///   submit -> EntryFactory -> Ledger -> Controller -> [the domain's log] -> NegotiationLog ->
///   outcomes
///   outcomes -> entries that have failed, and batches -> BatchRunner -> Backend -> HandleState
///   send, recv -> PeerCalls -> PeerMessages -> [rings of the domain, or a transport] ->
///   HandleState
///
/// The parts are the members below, each the owner of its state, and know those that they call by
/// reference; back up leads only `EngineEvents`, which the engine implements. The engine itself
/// owns the mutex, decides how entries and worlds end, and is the only one to finish entries.
///
/// Locks, in the order in which they are taken: the engine's mutex (EngineLock), the board's lock
/// (Transaction, BoardLock), and those of leaves that call nothing: timeline, process sets, staging
/// memory. Wake-ups and the ends of entries wait until the engine's mutex is free. Threads:
/// `submit` may be called by any; it announces in the caller's thread. One thread at a time has the
/// `Turn`: it alone launches and advances batches, and calls the transport. That is a user thread
/// in a call where there is one; otherwise the coordination thread. A failure is caught once, by
/// the thread that has the turn; it ends the world: every pending submission fails with its reason,
/// here and on all ranks, until shutdown() and init().

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hvd/base/visible.h"
#include "hvd/engine/agreement/controller.h"
#include "hvd/engine/agreement/cutter.h"
#include "hvd/engine/agreement/entry_factory.h"
#include "hvd/engine/agreement/leavers.h"
#include "hvd/engine/core/burst.h"
#include "hvd/engine/core/caller_threads.h"
#include "hvd/engine/core/engine_lock.h"
#include "hvd/engine/core/events.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/submission_queue.h"
#include "hvd/engine/fast_path/fast_path.h"
#include "hvd/engine/health/health.h"
#include "hvd/engine/leader/leader_task.h"
#include "hvd/engine/outcome_handler.h"
#include "hvd/engine/peers/peer_calls.h"
#include "hvd/engine/peers/peer_messages.h"
#include "hvd/engine/progress/batch_runner.h"
#include "hvd/engine/progress/progress_loop.h"
#include "hvd/engine/progress/submitter.h"
#include "hvd/engine/small_calls.h"
#include "hvd/submission.h"

namespace hvd {

class Engine : private EngineEvents {
 public:
  /// Starts the coordination thread. Throws std::system_error if the system has none to give.
  explicit Engine(EngineParts parts);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Takes a submission, and returns what tells of its end. Throws InvalidArgument or DuplicateName
  /// (and then nothing has happened), Shutdown, or what ended the world. Any thread.
  HVD_BETWEEN_LIBRARIES std::shared_ptr<HandleState> submit(Submission submission,
                                                            After after = After::Return);
  /// Returns the way in for callers of repeated small operations.
  [[nodiscard]] SmallCalls& small_calls() { return small_calls_; }
  /// Returns the way in for send and recv.
  [[nodiscard]] PeerCalls& peer_calls() { return peer_calls_; }
  /// The calling thread has called `init()`, as it has on all ranks: its operations without names
  /// are told from those of other threads.
  void enter_init_thread();
  /// Throws InvalidArgument where `submit` would, for what this rank can see by itself. Nothing is
  /// sent, nothing is read. Any thread.
  HVD_BETWEEN_LIBRARIES void check(Submission submission) const;
  /// Returns a name for the next persistent operation without one: the same on all ranks that ask
  /// in the same order. Throws InvalidArgument where that order is not known, as several threads
  /// ask. Any thread.
  HVD_BETWEEN_LIBRARIES std::string persistent_name(int process_set, OpKind kind);
  /// Blocks until the submission is done, or enqueued if it is `on_stream`; throws what it failed
  /// with. Any thread.
  HVD_BETWEEN_LIBRARIES void wait(HandleState& pending);
  /// Returns whether it is done, failed included; does a little driving, so that polling alone gets
  /// there. Any thread.
  bool poll(HandleState& pending);

  /// Has `function` called by the CallbackThread once `poll` would return true, at once if it does:
  /// after those that were given before for the same submission. Throws std::system_error if there
  /// can be no such thread. Any thread.
  void then(HandleState& pending, std::function<void()> function);

  /// Returns memory on the device for tensors of an operation like this one, which then needs no
  /// packing: see Backend::allocate. Null where the operation would not gain from it. Any thread.
  HVD_BETWEEN_LIBRARIES std::shared_ptr<void> allocate(const Submission& like, DataType dtype,
                                                       std::size_t bytes);

  /// Says that this rank takes part in nothing more, and blocks until what it has submitted is over
  /// and all ranks have said so; until the former alone once `patience` has passed, at which a
  /// world with a name is abandoned where something is still pending, also by another thread of
  /// this rank. Returns whether nothing is left to be waited for. `shutdown()` must follow; until
  /// then the coordination thread goes on with what the others need of this rank.
  bool leave(std::chrono::milliseconds patience);
  /// Collective. Blocks until all ranks have called it, and what was agreed, and each send and
  /// recv, is done; what is still pending then fails with Shutdown. Returns whether it came to
  /// that: false if the world had failed. Functions that were given to `then` have been called
  /// before it returns, or before `leave` has, unless one of them calls it, or it has waited for
  /// them for 10 s; in a world with a name for the `patience` of `leave` at most.
  bool shutdown();
  /// Returns whether the world has failed. Any thread.
  [[nodiscard]] bool has_failed() const { return board_.failed(); }

  /// Ends the world at once, for all ranks: what is pending and what comes fails with `why`, by
  /// default that this rank has left it, unless it has failed before. Waits for nobody, and does
  /// nothing after shutdown(). Any thread.
  void abort(const Status& why = {});

  /// Not collective: this rank ends without shutdown(), for the reason given. Where it speaks for
  /// its domain it tells the other domains, which cannot see it die; its own does, and is told
  /// nothing, so that this rank is the first of them to end. Nothing can be driven afterwards.
  /// False, and nothing has happened, where there is nobody to tell, or another thread of this rank
  /// is driving.
  bool desert(const Status& why) noexcept;

  [[nodiscard]] const Topology& topology() const { return parts_.topology; }
  /// Returns CUDA's index of this rank's GPU; -1 without one.
  [[nodiscard]] int device() const { return parts_.device; }
  [[nodiscard]] const Config& config() const { return parts_.config; }
  /// Returns what all ranks have said; process sets may be asked for by any thread, all else is the
  /// engine's.
  [[nodiscard]] const Negotiator& negotiator() const { return log_.table(); }
  [[nodiscard]] Stats stats() const { return parts_.stats->read(); }
  [[nodiscard]] Timeline& timeline() const { return *parts_.timeline; }
  [[nodiscard]] const std::vector<std::unique_ptr<Backend>>& backends() const {
    return parts_.backends;
  }

 private:
  friend class EngineProbe;  // of the tests

  // ---- what the parts ask of the engine
  void on_outcomes(Outcomes& outcomes, bool said_here) override HVD_REQUIRES(engine_mutex);
  void finish(Entry& entry, Status status) override HVD_REQUIRES(engine_mutex);
  void arrived(Entry& entry, std::uint32_t arrived) override HVD_REQUIRES(engine_mutex) {
    submitter_.arrived(entry, arrived);
  }
  bool progress(const Turn& turn) noexcept override;
  void look_for_trouble(const Turn& turn) noexcept override { health_.look(turn); }
  [[nodiscard]] Clock::time_point time_of_trouble() const override {
    return health_.next_deadline();
  }
  [[nodiscard]] Polling polling(const Turn& turn) const override;
  [[nodiscard]] bool has_results(const Turn& turn) override;
  [[nodiscard]] bool has_more(const Turn& turn) override;
  [[nodiscard]] bool expects_messages(const Turn& turn) override;

  void say_leaving(const std::function<void()>& meanwhile);
  [[nodiscard]] bool all_is_over() HVD_REQUIRES(engine_mutex);
  bool drive_messages(const Turn& turn);
  std::shared_ptr<HandleState> submit_anew(Submission submission, After after);
  void bury_removed_sets(const Turn& turn) HVD_REQUIRES(engine_mutex);
  void fail_everything(const Turn& turn, const Status& failure) noexcept;
  void warn_of_failure() HVD_REQUIRES(engine_mutex);

  EngineParts parts_;
  Board& board_;
  EngineMutex mutex_;
  CallerThreads callers_;
  Burst burst_;
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
  PeerMessages messages_;
  FailureMessenger messenger_;
  Health health_;
  ProgressLoop loop_;
  SmallCalls small_calls_;
  PeerCalls peer_calls_;

  bool somebody_left_ HVD_GUARDED_BY(engine_mutex) =
      false;                      ///< and what waits for them is still to be looked at
  bool failure_handled_ = false;  // of the thread that has the turn
  bool has_left_ HVD_GUARDED_BY(engine_mutex) = false;  ///< `leave()` has been called
  std::chrono::milliseconds callback_patience_ HVD_GUARDED_BY(engine_mutex);  ///< of shutdown()
  std::atomic<bool> stopped_cleanly_{false};
};

}  // namespace hvd
