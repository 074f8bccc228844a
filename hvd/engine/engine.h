#pragma once
/// One rank's engine. Takes submissions, announces them to the other ranks, and drives what is agreed to its end.
///
///   submit -> [Ledger] -announce-> [Board's log] -read-> [Negotiator] -cut-> [Planner] -batches-> [Backend] -> HandleState
///
/// Threads: `submit` may be called by any; it announces in the caller's thread. Exactly one thread at a time has the driver's role:
/// it reads the log, launches and advances batches, and is the only one that calls backends and transport. That is a user thread
/// inside `wait()` where there is one, so that a result costs no context switch; otherwise the coordination thread, which sleeps
/// while it has nothing to do.
/// Owns everything it is made of. A failure is caught once, in the driver; it ends the world: every pending submission fails with
/// its reason, here and on all ranks, until shutdown() and init().

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "hvd/backend.h"
#include "hvd/config.h"
#include "hvd/engine/fast_path.h"
#include "hvd/engine/ledger.h"
#include "hvd/negotiation/board.h"
#include "hvd/negotiation/leader_tree.h"
#include "hvd/negotiation/negotiator.h"
#include "hvd/stats.h"
#include "hvd/submission.h"
#include "hvd/timeline/timeline.h"
#include "hvd/topology.h"
#include "hvd/transport.h"

namespace hvd {

/// What an engine is made of.
struct EngineParts {
  Config config;
  Topology topology;
  std::vector<ProcessSetInfo> process_sets;  ///< the first is the global one
  std::shared_ptr<void> memory;              ///< what the board and the backends stand on; released last
  std::unique_ptr<Board> board;
  std::shared_ptr<StatsCounters> stats = std::make_shared<StatsCounters>();
  std::unique_ptr<Timeline> timeline = std::make_unique<Timeline>();
  std::unique_ptr<Transport> transport;            ///< of a domain's leader in a world of several domains; otherwise null
  std::vector<std::unique_ptr<Backend>> backends;  ///< the first that supports a batch runs it
  unsigned cores = std::thread::hardware_concurrency();
};

/// Whether the caller goes straight on to `wait()`, and so will drive the engine itself.
enum class After : std::uint8_t { Return, Wait };

class Engine {
 public:
  explicit Engine(EngineParts parts);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Any thread. Throws InvalidArgument or DuplicateName (and then nothing has happened), Shutdown, or what ended the world.
  std::shared_ptr<HandleState> submit(Submission submission, After after = After::Return);
  /// Any thread. Submits the operation and waits for it, without memory from the heap, if this rank has a persistent operation for it: if
  /// it has been submitted twice before by a caller that waited. False, and nothing has happened, if not: to be submitted. Throws as `wait`
  /// does.
  bool try_fast_path(const SmallCall& call);
  /// Any thread. Returns when the submission is done, or enqueued if it is `on_stream`; throws what it failed with.
  void wait(HandleState& pending);
  /// Any thread. Whether it is done, failed included; does a little driving, so that polling alone gets there.
  bool poll(const HandleState& pending);

  /// Any thread. Memory on the device for tensors of an operation like this one, which then needs no packing: see Backend::allocate. Null
  /// where the operation would not gain from it.
  std::shared_ptr<void> allocate(const Submission& like, DataType dtype, std::size_t bytes);

  /// Collective. Waits until all ranks have called it and what was agreed is done; what is still pending then fails with Shutdown.
  /// Returns whether it came to that: false if the world had failed, or if `patience` ran out first.
  bool shutdown(std::chrono::milliseconds patience = std::chrono::hours(24 * 365));

  [[nodiscard]] const Topology& topology() const { return parts_.topology; }
  [[nodiscard]] const Config& config() const { return parts_.config; }
  [[nodiscard]] const Negotiator& negotiator() const { return negotiator_; }
  /// For tests: what is kept of tensors and process sets, in this rank's tables and its leader tree.
  [[nodiscard]] std::size_t tensors_kept_for_test() const;
  [[nodiscard]] std::size_t sets_kept_for_test() const;
  [[nodiscard]] Stats stats() const { return parts_.stats->read(); }
  [[nodiscard]] Timeline& timeline() const { return *parts_.timeline; }
  [[nodiscard]] const std::vector<std::unique_ptr<Backend>>& backends() const { return parts_.backends; }

  /// For tests: the coordination thread ends as if the process had been killed.
  void die_for_test();
  /// For tests: how many persistent operations there are; gives back what they keep. None may be in use.
  std::size_t drop_persistent_for_test();

 private:
  /// A batch to launch, with what must be read when it is cut: later the slots may belong to other tensors.
  struct Prepared {
    CutBatch cut;
    std::vector<Entry*> entries;                        ///< per tensor
    std::vector<std::vector<std::uint64_t>> locations;  ///< per tensor, by rank of the domain
  };
  struct Running {
    Prepared batch;
    Backend* backend;
    std::shared_ptr<Execution> execution;
    bool handed_over = false;
    bool over = false;
  };

  // ---- submitting
  std::unique_ptr<Entry> make_entry(Submission submission);
  void check(const Submission& submission) const;
  /// Null if none supports it.
  [[nodiscard]] Backend* backend_for(const BatchTraits& traits) const;
  void prepare(Entry& entry);
  void release(Entry& entry) noexcept;
  void note_submission(Entry& entry);
  /// False: there is no room in the table just now; to be called again when others have read the log.
  bool announce(Entry& entry);
  /// Announces submissions that have waited for an earlier one under their name.
  bool announce_later();
  [[nodiscard]] bool has_later(int process_set) const;
  [[nodiscard]] bool can_announce_later();
  /// What the submission without a name after `before` others is called, written into `text`. Few names, that come back: what the ranks
  /// have said of them need not be said again.
  std::string_view made_up_name(int process_set, OpKind kind, std::uint64_t before, std::span<char> text);
  /// What follows an arrival: agrees if it was the last, or if all others have joined or left.
  void after_arriving(Entry& entry, std::uint32_t arrived);
  bool introduce(Entry& entry);
  void introduce_remote(const UnitKey& key, Runs ranks, const Signature& signature);
  void agree_by_root(const UnitKey& key, const Agreement& what);
  /// Whether a tensor can be introduced: now; once all ranks have read what is in the log; once something is cut; not before some of what
  /// is in flight is done.
  enum class Room : std::uint8_t { Now, AfterReading, AfterCutting, None };
  Room make_room_for(const UnitKey& key, std::uint32_t slots);
  Room make_room(std::uint32_t slots);
  /// Wakes whoever has not read the log for long, and waits a moment.
  void nudge_readers();
  /// Forgets the unit if nobody here uses it; false if somebody does.
  bool drop_unit(const UnitKey& key);
  /// Forgets process sets that were removed and that nothing of this rank belongs to any more. By the driver.
  void bury_removed_sets();
  void agree(std::uint32_t id);
  void join(int process_set);
  /// Whether all ranks of this domain that have not joined have arrived.
  [[nodiscard]] bool is_complete(std::uint32_t id) const;
  [[nodiscard]] std::vector<int> absent_from(const Unit& unit) const;
  [[nodiscard]] bool have_read(const std::vector<int>& ranks, std::uint64_t position) const;
  void raise_if_over() const;

  // ---- persistent operations; under mutex_
  /// For an entry that has ended well and is worth it. Never throws: without a persistent operation the next one is submitted as this was.
  void make_persistent(const Entry& entry) noexcept;
  void drop_persistent(const UnitKey& key) noexcept;
  bool take_persistent(PersistentOp& op, const SmallCall& call, Entry*& entry);
  /// The last to arrive does the work for all. False if it must be agreed in the log.
  bool run_for_all(const PersistentOp& op);
  /// Finishes what others have done for this rank.
  void take_results();
  void take_result(Entry& entry);

  // ---- the log; under mutex_, appends also under the board's lock
  /// Locks the board, reads what is new, waits for room, and lets `append` commit records.
  void with_log(std::size_t bytes, const std::function<void()>& append);
  void commit(const Bytes& record);
  void read_log();
  void cut_if_idle();
  void act(Outcomes& outcomes);
  void note_news(const Outcomes& outcomes);
  [[nodiscard]] bool is_here(int rank) const {
    return parts_.topology.domain_of_rank[static_cast<std::size_t>(rank)] == parts_.topology.domain;
  }
  void act_on_agreement(const Outcomes::Agreed& agreed);
  void note_rows(Entry& entry, const Unit& unit);
  void enqueue(CutBatch batch);
  /// What this rank still takes part in when it leaves. Needs the board's lock, and the log to be read.
  [[nodiscard]] std::vector<Pledge> pledges() const;
  /// Sees to it that a unit that this rank waits for, and that can never be complete because a rank has left, is refused.
  void doubt(std::uint32_t id);
  void doubt_all();
  void refuse_by_root(const UnitKey& key, int left_rank);
  [[nodiscard]] bool evictable(std::uint32_t id) const;

  // ---- driving
  bool try_take_turn();
  void leave_turn();
  bool progress() noexcept;
  void launch(Prepared batch);
  BatchMember make_member(const Prepared& batch, std::size_t index);
  /// Says where the outputs will be to follow, once all of the batch is enqueued.
  void hand_over(Running& running);
  void finish(Running& running);
  void retire(const CutBatch& cut);
  void idle_wait(std::uint32_t seen_bell, unsigned idle_rounds);
  [[nodiscard]] bool must_poll() const;
  void ring_after(const Outcomes& outcomes);
  void drive_leader_tree(bool& progressed);
  /// Cuts the world's next batches, which the root announces. False if the board has no room for them yet.
  bool cut_world();

  // ---- ends
  void finish_entry(Entry& entry, Status status);
  void fail_what_was_never_agreed();
  void fail_later(const Status& status);
  void fail_world(const Status& status) noexcept;
  void fail_everything(const Status& status) noexcept;
  void look_for_trouble();
  void report_stalls();
  /// Who keeps the entry waiting, as far as this rank can know.
  [[nodiscard]] std::string describe_missing(const Entry& entry) const;
  void look_for_conflicts();
  void commit_conflict(int process_set, const std::string& name, const std::vector<StuckRank>& stuck_ranks);
  [[nodiscard]] std::vector<StuckRank> stuck_here(int process_set, const std::string& name) const;
  void coordinate();

  EngineParts parts_;
  Board& board_;
  const bool spare_cores_;

  mutable std::mutex mutex_;         // guards what follows
  std::condition_variable changed_;  // an entry is done, or the turn is free
  Ledger ledger_;
  std::map<UnitKey, std::deque<std::unique_ptr<Entry>>> later_;  // submissions that wait for their name, which is in flight
  PersistentOps persistent_ops_;
  std::vector<Entry*> in_fast_path_;  // entries that have arrived and whose result may come without a record
  std::vector<std::uint64_t> fast_locations_;
  std::vector<int> fast_ranks_;
  Negotiator negotiator_;
  std::vector<Prepared> to_launch_;
  std::map<std::pair<int, OpKind>, std::uint64_t> unnamed_;  // how many there were
  std::map<int, std::uint64_t> joins_;                       // of a process set: how often all its ranks have joined
  Status over_;                                              // why submissions are refused
  bool stopping_ = false;
  int waiters_ = 0;
  bool somebody_left_ = false;           // and what waits for them is still to be looked at
  std::deque<LocalEvent> local_events_;  // what the relay has still to pass on

  std::atomic<bool> turn_taken_{false};
  std::deque<Running> running_;              // the driver's own
  std::unique_ptr<LeaderTree> leader_tree_;  // the driver's own
  bool failure_handled_ = false;             // the driver's own

  struct WorldCut {
    std::uint64_t sequence;
    bool here;  ///< this domain takes part, so it will see the end
  };
  std::vector<WorldCut> open_world_cuts_;               // the root's driver's own
  bool told_of_no_room_ = false;                        // the driver's own
  std::chrono::steady_clock::time_point last_traffic_;  // of the leader tree; the driver's own

  std::atomic<bool> stop_thread_{false};
  std::atomic<bool> stopped_cleanly_{false};
  std::atomic<bool> die_{false};
  std::chrono::steady_clock::time_point last_look_;  // the driver's own
  std::thread coordination_;
};

}  // namespace hvd
