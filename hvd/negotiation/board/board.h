#pragma once
/// What the ranks of one shared-memory domain (the processes of a host, or the threads of a test) agree through:
/// one log that all read in the same order, a slot per tensor where its readiness is counted, the state of the batches under way,
/// and who lives. A view over a block of memory that every rank of the domain sees; owns nothing but the view.
/// Any thread; the functions that want the lock say so. Nothing here blocks for longer than the lock is held, or a round is claimed: for
/// nanoseconds, unless the rank that has it has lost its core. Where that has died the world ends with RankFailed; where it is stopped, who
/// waits warns of it, and in the end the world ends with StallTimeout (hvd/negotiation/board/patience.h).
///
/// A rank may die at any instruction. The lock is robust (its next owner is told), counters of a dead rank stay as they were,
/// and liveness is a robust mutex that the rank's coordination thread holds for as long as it lives: the kernel releases it
/// however the process ends, in whatever pid namespace.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "hvd/base/futex.h"
#include "hvd/base/wire.h"
#include "hvd/errors.h"
#include "hvd/negotiation/board/patience.h"
#include "hvd/negotiation/board/patient_lock.h"
#include "hvd/negotiation/values/capabilities.h"

namespace hvd {

// hvd/negotiation/board/board_layout.h
namespace board_layout {
struct Header;
struct RankArea;
struct SlotHead;
struct SlotRank;
}  // namespace board_layout

/// One batch under way. Its sequence number, modulo the number of places, says which place it has; the place is given to a later batch only
/// when every rank of the domain that takes part has departed, so that a rank that comes late finds what it came for.
struct alignas(64) BatchState {
  std::atomic<std::uint64_t> sequence{0};    ///< whose place this is
  std::atomic<std::uint64_t> next_chunk{0};  ///< chunks are claimed by adding one
  std::atomic<std::uint64_t> finished{0};    ///< chunks, or ranks, that are done
  std::atomic<bool> complete{false};         ///< the results are where they belong, for all ranks of the domain
  std::atomic<bool> retired{false};          ///< a rank knows that it is over: the next batch may be cut
  std::atomic<std::uint32_t> departed{0};    ///< ranks that need this state no more
  std::atomic<bool> taken{false};            ///< from `open_batch` until all have departed
};

class Board {
 public:
  static constexpr std::size_t kBatchPlaces = 256;
  static constexpr std::size_t kOpenCounts = 1024;
  static constexpr std::size_t kLogBytes = std::size_t{4} << 20;
  static constexpr int kNobody = PatientWait::kNobody;  ///< as a rank's index

  static std::size_t bytes_needed(int ranks, std::uint32_t slots);
  /// Writes an empty board into `block` (zeroed memory). One rank, before any other makes its view.
  static void format(std::span<std::byte> block, int ranks, std::uint32_t slots);

  /// `self` is this rank's index in the domain.
  Board(std::span<std::byte> block, int self);

  [[nodiscard]] int ranks() const { return ranks_; }
  [[nodiscard]] int self() const { return self_; }
  [[nodiscard]] std::uint32_t slots() const { return slots_; }

  // ---- the lock: orders appends to the log; held for microseconds
  /// Blocks until this rank has the lock. An owner that has died ends the world with RankFailed, and the lock is had. Throws what ends the
  /// world meanwhile.
  void lock() { lock_.lock(); }
  void unlock() { lock_.unlock(); }

  // ---- waits for other ranks
  /// Before another thread of this rank uses the board.
  void set_patience(Patience patience) { patience_ = std::move(patience); }
  [[nodiscard]] const Patience& patience() const { return patience_; }
  /// A wait of this rank for another one. `how` that keeps the others, for messages.
  [[nodiscard]] PatientWait make_wait(std::string_view how) const { return {patience_, reports_, how}; }

  // ---- the log
  /// Bytes appended so far.
  [[nodiscard]] std::uint64_t tail() const;
  /// Whether a record of `bytes` can be appended; false while a living rank has not read far enough to make room. Needs the lock.
  [[nodiscard]] bool has_room(std::size_t bytes);
  /// Returns whether a living rank has left more than so many bytes unread. One thread of this rank at a time, as `has_room`.
  [[nodiscard]] bool is_unread(std::uint64_t bytes);
  /// Appends one record. Needs the lock, and room: `has_room`, or for a record of a few bytes the reserve that it keeps.
  /// The appender has read the whole log and acted on the record already: its own position moves past it.
  void append(std::span<const std::byte> record);
  /// The next record this rank has not read, copied out; none when it has read all. One thread of the rank at a time. To the other ranks a
  /// record counts as read only when this is called again: until then its reader still acts on it, and needs the slots' words of its round.
  std::optional<Bytes> read_next();
  [[nodiscard]] std::uint64_t read_position() const { return position_; }
  /// Up to where `rank` has read.
  [[nodiscard]] std::uint64_t read_position(int rank) const;
  /// Up to where every rank that has not left has read.
  [[nodiscard]] std::uint64_t slowest_reader() const { return find_slowest().position; }
  /// Whose position that is; kNobody where all have read the whole log.
  struct SlowestReader {
    int rank;
    std::uint64_t position;
    bool operator==(const SlowestReader&) const = default;
  };
  [[nodiscard]] SlowestReader find_slowest() const;

  // ---- slots: readiness
  /// Some time before an arrival: the processor fetches meanwhile what it will write.
  void prepare_arrival(std::uint32_t slot) const;
  /// Before an arrival: whether it is going to be the last of these ranks', and then all the others have arrived. The processor fetches
  /// meanwhile what they have left.
  [[nodiscard]] bool expect_to_be_last(std::uint32_t slot, std::span<const int> indices) const;
  /// Counts this rank's arrival at `slot`; returns how many ranks have arrived, or 0 if `generation` is over (the name was evicted).
  std::uint32_t arrive(std::uint32_t slot, std::uint32_t generation);
  [[nodiscard]] std::uint32_t arrivals(std::uint32_t slot) const;
  [[nodiscard]] std::uint32_t generation(std::uint32_t slot) const;
  /// Claims the end of the round in which all ranks that take part have arrived: `arrived` of them. Who has it is alone to say what comes
  /// of the round, and must go on at once to `reset_arrivals`, up to where arrivals of the next round, `set_location`, `close_slot` and
  /// `void_slot` wait, unless the world fails. False if another has it, or the round is over.
  bool claim(std::uint32_t slot, std::uint32_t generation, std::uint32_t arrived);
  /// Waits until nobody has claimed the round. Returns false if the world fails first.
  bool await_unclaimed(std::uint32_t slot);
  /// The index of the rank that has claimed the round; kNobody: none has.
  [[nodiscard]] int claimant(std::uint32_t slot) const;
  /// Counts this rank's arrival, as the last of `ranks`, and claims the end of the round in one. False if it would not be the last, or the
  /// generation is over; then it is not counted, and must `arrive`.
  bool arrive_last(std::uint32_t slot, std::uint32_t generation, std::uint32_t ranks);
  /// Starts a new round of a unit of `count` slots: nobody has arrived. Needs the claim.
  void reset_arrivals(std::uint32_t slot, std::uint32_t count);
  /// Ends the slot's generation if nobody has arrived. Needs the lock.
  bool evict(std::uint32_t slot);
  /// Lets nobody arrive in the slot's generation any more. The ranks' words of the last round stay, for those that still need them, until
  /// `void_slot`. Needs the lock.
  void close_slot(std::uint32_t slot);
  /// Ends the slot's generation, whoever has arrived. Needs the lock, and that all ranks have read the last round's words.
  void void_slot(std::uint32_t slot, std::uint32_t count);
  /// This rank's word for the tensor in `slot` in the coming round; set before arriving. A rank may be one round ahead of one that
  /// has not yet read what the last round brought, so two rounds' words are kept.
  void set_location(std::uint32_t slot, std::uint64_t location);
  /// The same for another slot of a unit, after `set_location` of its first: costs little where the word is the one that was set before.
  void keep_location(std::uint32_t slot, std::uint64_t location);
  /// A few bytes of `rank` beside its word, to be written by it before it arrives, and by who has the claim.
  static constexpr std::size_t kNoteBytes = 88;
  [[nodiscard]] std::span<std::byte, kNoteBytes> note(std::uint32_t slot, int rank) const;
  /// The word of `rank` for the round that is gathering; all are there once all have arrived.
  [[nodiscard]] std::uint64_t coming_location(std::uint32_t slot, int rank) const;
  /// The word of `rank` for the last round that was agreed. Read it before arriving again.
  [[nodiscard]] std::uint64_t location(std::uint32_t slot, int rank) const;
  /// Whether `rank` has arrived in the round in which this rank arrived last, be that agreed meanwhile or not.
  [[nodiscard]] bool has_arrived_too(std::uint32_t slot, int rank) const;
  /// Whether `rank` has arrived in the round that is gathering. If not, and it had: a result of that round is there to be seen.
  [[nodiscard]] bool has_arrived(std::uint32_t slot, int rank) const;
  /// This rank has arrived, and a thread of it has been waiting for the rest for long.
  void set_stuck(std::uint32_t slot);
  /// How often ranks of the domain have said so.
  [[nodiscard]] std::uint64_t stuck_marks() const;
  /// `said`: the domain has said that it is ready, so the round that `rank` waits in is the one before.
  [[nodiscard]] bool is_stuck(std::uint32_t slot, int rank, bool said) const;
  /// All threads of this rank that use the library wait for long, each in a slot that it has marked as stuck: so many slots; 0: no more.
  void set_blocked(std::uint32_t slots);
  /// What that rank has said last; it holds as long as it `is_stuck` in so many.
  [[nodiscard]] std::uint32_t blocked(int rank) const;

  // ---- rounds that end without a record: one rank has done the work for all (see hvd/engine/fast_path/fast_path.h)
  /// How a round was ended: by itself, or together with others, as the first of them or as one of the rest.
  enum class Company : std::uint8_t { Alone, First, Rest };
  /// Tells the ranks with these indices that their results are there. Needs the claim; before `reset_arrivals`.
  void give_results(std::uint32_t slot, std::span<const int> indices, Company company = Company::Alone);
  /// Whether so many ranks have arrived, and nobody has claimed the round.
  [[nodiscard]] bool is_to_claim(std::uint32_t slot, std::size_t ranks) const;
  /// Whether the round in which this rank arrived last has ended so, and the result is still to be taken.
  [[nodiscard]] bool has_result(std::uint32_t slot) const;
  /// Takes it, and returns how it came.
  Company take_result(std::uint32_t slot);
  [[nodiscard]] bool are_results_taken(std::uint32_t slot) const;

  // ---- rounds that the leaders end among themselves (see hvd/negotiation/leaders/direct_rounds.h)
  /// The round that is gathering is the leader's alone to end from now on, or it takes that back. Needs the lock.
  void promise(std::uint32_t slot) HVD_REQUIRES(board_lock);
  void take_promise_back(std::uint32_t slot) HVD_REQUIRES(board_lock);
  [[nodiscard]] bool is_promised(std::uint32_t slot) const;
  /// Whether it is promised, and this rank has arrived in it.
  [[nodiscard]] bool awaits_promised(std::uint32_t slot) const { return is_promised(slot) && has_arrived(slot, self_); }
  /// The leader: a thread of it looks at arrivals from now on, or will do so once more.
  void set_leader_looks(bool looks);
  /// After an arrival: whether the leader sees it without being woken.
  [[nodiscard]] bool leader_looks() const;

  // ---- batches
  BatchState& batch(std::uint64_t sequence) const;
  /// Returns sequence numbers for `count` batches, whose places are free; none if there are not so many. Needs the lock, until they are
  /// opened.
  [[nodiscard]] std::vector<std::uint64_t> find_places(std::size_t count) const HVD_REQUIRES(board_lock);
  /// Prepares a batch's place. `group`: the batch counts among those of this number, as far as kOpenCounts tells numbers apart.
  void open_batch(std::uint64_t sequence, std::uint32_t group) HVD_REQUIRES(board_lock);
  /// Returns how many batches of the group have been opened and not yet retired.
  [[nodiscard]] std::uint32_t open_batches(std::uint32_t group) const HVD_REQUIRES(board_lock);
  /// Marks the batch as over for whoever cuts the next one; the first rank to say so counts. False if already said.
  bool retire_batch(std::uint64_t sequence, std::uint32_t group) HVD_REQUIRES(board_lock);
  /// Whether every rank of the domain that takes part has departed.
  [[nodiscard]] bool is_over(std::uint64_t sequence) const;
  /// This rank needs the batch's state no more; `members` ranks take part here.
  void depart(std::uint64_t sequence, std::uint32_t members);

  // ---- bells
  /// The word that user threads waiting for a result sleep on, all ranks together.
  FutexWord& wait_doorbell() const;
  /// Wakes the sleepers of `wait_doorbell`, if there are any.
  void ring_waiters();
  /// Marks a thread that is going to wait for `wait_doorbell` for as long as it lives. It must look for results once more then.
  class Watcher {
   public:
    explicit Watcher(const Board& board);
    ~Watcher();
    Watcher(const Watcher&) = delete;
    Watcher& operator=(const Watcher&) = delete;

   private:
    std::atomic<std::uint32_t>& watchers_;
  };
  /// After an arrival: whether somebody watches the bell, and may have looked before it.
  [[nodiscard]] bool has_watchers() const;
  /// The same as `ring_waiters`, after `give_results`, for threads that look for results themselves: it costs nothing where none of them
  /// watches the bell.
  void ring_watchers();
  /// Sleeps on `wait_doorbell` unless it has rung since `seen`.
  void sleep_waiting(std::uint32_t seen, std::chrono::nanoseconds timeout);
  /// The word that the coordination thread of `rank` sleeps on.
  FutexWord& work_doorbell(int rank) const;
  void ring_worker(int rank);
  void ring_all_workers();
  void sleep_working(std::uint32_t seen, std::chrono::nanoseconds timeout);

  // ---- life and death
  /// Called by the coordination thread when it starts and when it ends; in between the kernel vouches for it.
  void begin_life();
  void end_life();
  /// A rank of the domain (its index) that died without leaving, if there is one.
  std::optional<int> find_dead();
  /// Returns whether the rank with this index has died without leaving.
  [[nodiscard]] bool is_dead(int rank);
  /// This rank reads and writes the board no more; the others may go on.
  void leave();
  [[nodiscard]] bool all_left() const;

  /// The failure that ended this world. The first one said stays; `failed()` holds once this has returned, whoever was first.
  void set_failure(const Status& status);
  [[nodiscard]] bool failed() const;
  [[nodiscard]] Status failure() const;

 private:
  using Header = board_layout::Header;
  using RankArea = board_layout::RankArea;
  using SlotHead = board_layout::SlotHead;
  using SlotRank = board_layout::SlotRank;
  [[nodiscard]] Header& header() const;
  [[nodiscard]] RankArea& area(int rank) const;
  [[nodiscard]] SlotHead& head(std::uint32_t slot) const;
  [[nodiscard]] SlotRank& slot_rank(std::uint32_t slot, int rank) const;
  [[nodiscard]] std::uint64_t unclaimed(std::uint32_t slot);
  [[nodiscard]] std::uint64_t wait_for_claimant(std::uint32_t slot);
  void copy_in(std::uint64_t at, std::span<const std::byte> bytes);
  void copy_out(std::uint64_t at, std::span<std::byte> bytes) const;

  std::span<std::byte> block_;
  int self_;
  int ranks_;
  std::uint32_t slots_;
  std::size_t areas_at_, slots_at_, slot_bytes_, log_at_;
  std::uint64_t position_ = 0;
  std::uint64_t read_by_all_ = 0;  ///< at least up to there, when that was last looked for
  Patience patience_;
  const BoardReports reports_;
  PatientLock lock_;
  std::mutex failure_mutex_;  ///< threads of this rank that meet failures at once
};

/// Holds the board's lock.
class HVD_SCOPED_CAPABILITY BoardLock {
 public:
  explicit BoardLock(Board& board) HVD_ACQUIRE(board_lock) : board_(board) { board_.lock(); }
  ~BoardLock() HVD_RELEASE() { board_.unlock(); }
  BoardLock(const BoardLock&) = delete;
  BoardLock& operator=(const BoardLock&) = delete;

 private:
  Board& board_;
};

}  // namespace hvd
