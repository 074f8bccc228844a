#pragma once
/// The board through which the ranks of one shared-memory domain (the processes of a host, or the
/// threads of a test) agree: one log that all read in the same order, a slot per tensor where its
/// readiness is counted, the state of the batches under way, and who lives. A view over a block of
/// memory that every rank of the domain sees; owns nothing but the view. Any thread; the functions
/// that want the lock say so. Nothing here blocks for longer than the lock is held, or a round is
/// claimed: for nanoseconds, unless the rank that has it has lost its core. Where that has died the
/// world ends with RankFailed; where it is stopped, who waits warns of it, and in the end the world
/// ends with StallTimeout (hvd/negotiation/board/patience.h).
///
/// A rank may die at any instruction. The lock is robust (its next owner is told), counters of a
/// dead rank stay as they were, and liveness is a robust mutex that the rank's coordination thread
/// holds for as long as it lives: the kernel releases it however the process ends, in whatever pid
/// namespace.

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "hvd/errors.h"
#include "hvd/negotiation/board/batch_places.h"
#include "hvd/negotiation/board/bells.h"
#include "hvd/negotiation/board/board_log.h"
#include "hvd/negotiation/board/board_view.h"
#include "hvd/negotiation/board/patience.h"
#include "hvd/negotiation/board/patient_lock.h"
#include "hvd/negotiation/board/rings.h"
#include "hvd/negotiation/board/rounds.h"
#include "hvd/negotiation/values/capabilities.h"

namespace hvd {

class Board {
 public:
  static constexpr int kNobody = PatientWait::kNobody;  ///< as a rank's index

  static std::size_t bytes_needed(int ranks, std::uint32_t slots);
  /// Writes an empty board into `block` (zeroed memory). One rank, before any other makes its view.
  static void format(std::span<std::byte> block, int ranks, std::uint32_t slots);

  /// `self` is this rank's index in the domain.
  Board(std::span<std::byte> block, int self);

  [[nodiscard]] int ranks() const { return view_.ranks(); }
  [[nodiscard]] int self() const { return view_.self(); }
  [[nodiscard]] std::uint32_t slots() const { return view_.slots(); }

  // ---- the lock: orders appends to the log; held for microseconds
  /// Blocks until this rank has the lock. An owner that has died ends the world with RankFailed,
  /// and the lock is had. Throws what ends the world meanwhile.
  void lock() { lock_.lock(); }
  void unlock() { lock_.unlock(); }

  // ---- waits for other ranks
  /// Sets the patience, before another thread of this rank uses the board.
  void set_patience(Patience patience) { patience_ = std::move(patience); }
  [[nodiscard]] const Patience& patience() const { return patience_; }
  /// A wait of this rank for another one. `how` that keeps the others, for messages.
  [[nodiscard]] PatientWait make_wait(std::string_view how) const { return lock_.make_wait(how); }

  // ---- its parts
  [[nodiscard]] BoardLog& log() { return log_; }
  [[nodiscard]] const BoardLog& log() const { return log_; }
  [[nodiscard]] Rounds& rounds() { return rounds_; }
  [[nodiscard]] const Rounds& rounds() const { return rounds_; }
  [[nodiscard]] BatchPlaces& batches() { return batches_; }
  [[nodiscard]] const BatchPlaces& batches() const { return batches_; }
  [[nodiscard]] Bells& bells() { return bells_; }
  [[nodiscard]] const Bells& bells() const { return bells_; }
  [[nodiscard]] Rings& rings() { return rings_; }

  // ---- life and death
  /// Called by the coordination thread when it starts and when it ends; in between the kernel
  /// vouches for it.
  void begin_life();
  void end_life();
  /// Ends the world, naming it, if a rank of the domain has died without leaving. Returns whether
  /// one has. Any thread.
  bool end_if_one_died();
  /// Returns whether the rank with this index has died without leaving.
  [[nodiscard]] bool is_dead(int rank);
  /// This rank, which leads the domain, goes on; to be said again and again. One thread at a time.
  void beat();
  /// Returns how often that rank has said so; 0 if it never has, or has left.
  [[nodiscard]] std::uint64_t beats(int rank) const;

  /// The failure that ended this world. The first one said stays; `failed()` holds once this has
  /// returned, whoever was first.
  void set_failure(const Status& status);
  [[nodiscard]] bool failed() const;
  [[nodiscard]] Status failure() const;

 private:
  [[nodiscard]] std::optional<int> find_dead();

  const BoardView view_;
  Patience patience_;
  const BoardReports reports_;
  PatientLock lock_;
  BoardLog log_;
  Rounds rounds_;
  BatchPlaces batches_;
  Bells bells_;
  Rings rings_;
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
