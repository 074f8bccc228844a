#pragma once
/// The rounds of a board's slots. A slot has the readiness of one tensor: in each round every rank
/// that takes part arrives once, with a word of its own; who claims the complete round says what
/// comes of it. Any thread of the rank; the functions that want the board's lock say so. Nothing
/// here blocks for longer than a round is claimed: for nanoseconds, unless the rank that has
/// claimed it has lost its core, and then as hvd/negotiation/board/patience.h has it.
// Tested in tests/hvd/negotiation/board_test.cc

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "hvd/negotiation/board/board_view.h"
#include "hvd/negotiation/board/patient_lock.h"
#include "hvd/negotiation/values/capabilities.h"
#include "hvd/negotiation/values/unit.h"

namespace hvd {

class Rounds {
 public:
  static constexpr int kNobody = PatientWait::kNobody;  ///< as a rank's index

  Rounds(const BoardView& board, PatientLock& lock) : board_(board), lock_(lock) {}

  // ---- readiness
  /// Some time before an arrival: the processor fetches meanwhile what it will write.
  void prepare_arrival(std::uint32_t slot) const;
  /// Before an arrival: returns whether it is going to be the last of these ranks', and then all
  /// the others have arrived. The processor fetches meanwhile what they have left.
  [[nodiscard]] bool expect_to_be_last(std::uint32_t slot, std::span<const int> indices) const;
  /// Counts this rank's arrival at `slot`; returns how many ranks have arrived, or 0 if
  /// `generation` is over (the name was evicted).
  std::uint32_t arrive(std::uint32_t slot, std::uint32_t generation);
  [[nodiscard]] std::uint32_t arrivals(std::uint32_t slot) const;
  [[nodiscard]] std::uint32_t generation(std::uint32_t slot) const;
  /// Claims the end of the round in which all ranks that take part have arrived: `arrived` of them.
  /// Who has it is alone to say what comes of the round, and must go on at once to
  /// `reset_arrivals`, up to where arrivals of the next round, `set_location`, `close_slot` and
  /// `void_slot` wait, unless the world fails. False if another has it, or the round is over.
  bool claim(std::uint32_t slot, std::uint32_t generation, std::uint32_t arrived);
  /// Waits until nobody has claimed the round. Returns false if the world fails first.
  bool await_unclaimed(std::uint32_t slot);
  /// The index of the rank that has claimed the round; kNobody: none has.
  [[nodiscard]] int claimant(std::uint32_t slot) const;
  /// Counts this rank's arrival, as the last of `ranks`, and claims the end of the round in one.
  /// False if it would not be the last, or the generation is over; then it is not counted, and must
  /// `arrive`.
  bool arrive_last(std::uint32_t slot, std::uint32_t generation, std::uint32_t ranks);
  /// Starts a new round of a unit of `count` slots: nobody has arrived. Needs the claim.
  void reset_arrivals(std::uint32_t slot, std::uint32_t count);
  /// Ends the slot's generation if nobody has arrived. Needs the lock.
  bool evict(std::uint32_t slot);
  /// Lets nobody arrive in the slot's generation any more. The ranks' words of the last round stay,
  /// for those that still need them, until `void_slot`. Needs the lock.
  void close_slot(std::uint32_t slot);
  /// Ends the slot's generation, whoever has arrived. Needs the lock, and that all ranks have read
  /// the last round's words.
  void void_slot(std::uint32_t slot, std::uint32_t count);
  /// This rank's word for the tensor in `slot` in the coming round; set before arriving. A rank may
  /// be one round ahead of one that has not yet read what the last round brought, so two rounds'
  /// words are kept.
  void set_location(std::uint32_t slot, std::uint64_t location);
  /// The same for another slot of a unit, after `set_location` of its first: costs little where the
  /// word is the one that was set before.
  void keep_location(std::uint32_t slot, std::uint64_t location);
  /// A few bytes of `rank` beside its word, to be written by it before it arrives, and by who has
  /// the claim.
  static constexpr std::size_t kNoteBytes = board_layout::kNoteBytes;
  [[nodiscard]] std::span<std::byte, kNoteBytes> note(std::uint32_t slot, int rank) const;
  /// The word of `rank` for the round that is gathering; all are there once all have arrived.
  [[nodiscard]] std::uint64_t coming_location(std::uint32_t slot, int rank) const;
  /// The word of `rank` for the last round that was agreed. Read it before arriving again.
  [[nodiscard]] std::uint64_t location(std::uint32_t slot, int rank) const;
  /// Returns whether `rank` has arrived in the round in which this rank arrived last, be that
  /// agreed meanwhile or not.
  [[nodiscard]] bool has_arrived_too(std::uint32_t slot, int rank) const;
  /// Returns whether `rank` has arrived in the round that is gathering. If not, and it had: a
  /// result of that round is there to be seen.
  [[nodiscard]] bool has_arrived(std::uint32_t slot, int rank) const;
  /// This rank has arrived, and a thread of it has been waiting for the rest for long.
  void set_stuck(std::uint32_t slot);
  /// Returns how often ranks of the domain have said so.
  [[nodiscard]] std::uint64_t stuck_marks() const;
  /// `said`: the domain has said it is ready, so `rank` waits in the round before.
  [[nodiscard]] bool is_stuck(std::uint32_t slot, int rank, bool said) const;
  /// All threads of this rank that use the library wait for long, each in a slot that it has marked
  /// as stuck: so many slots; 0: no more.
  void set_blocked(std::uint32_t slots);
  /// Returns what that rank has said last; it holds as long as the rank `is_stuck` in so many.
  [[nodiscard]] std::uint32_t blocked(int rank) const;

  /// What this rank has arrived at, as the last thing that it has, is to end `deadline` after its
  /// submission, and has not.
  void set_late(const UnitRef& unit, std::chrono::nanoseconds deadline);
  struct Late {
    UnitRef unit;
    std::chrono::nanoseconds deadline;
  };
  /// Returns what that rank has said last, if it has not arrived there again since.
  [[nodiscard]] std::optional<Late> late(int rank) const;
  /// Returns whether the round that `rank` has arrived in has not ended. `said` as in `is_stuck`.
  [[nodiscard]] bool is_open(std::uint32_t slot, int rank, bool said) const;

  // ---- rounds that end without a record: one rank has done the work for all (see
  // hvd/engine/fast_path/fast_path.h)
  /// Company says how a round was ended: by itself, or together with others, as the first of them
  /// or as one of the rest.
  enum class Company : std::uint8_t { Alone, First, Rest };
  /// Tells the ranks with these indices that their results are there. Needs the claim; before
  /// `reset_arrivals`.
  void give_results(std::uint32_t slot, std::span<const int> indices,
                    Company company = Company::Alone);
  /// Returns whether so many ranks have arrived, and nobody has claimed the round.
  [[nodiscard]] bool is_to_claim(std::uint32_t slot, std::size_t ranks) const;
  /// Returns whether the round in which this rank arrived last has ended so, and the result is
  /// still to be taken.
  [[nodiscard]] bool has_result(std::uint32_t slot) const;
  /// Takes it, and returns how it came.
  Company take_result(std::uint32_t slot);
  [[nodiscard]] bool are_results_taken(std::uint32_t slot) const;

  // ---- rounds that the leaders end among themselves (see hvd/negotiation/leaders/direct_rounds.h)
  /// The round that is gathering is the leader's alone to end from now on, or it takes that back.
  /// Needs the lock.
  void promise(std::uint32_t slot) HVD_REQUIRES(board_lock);
  void take_promise_back(std::uint32_t slot) HVD_REQUIRES(board_lock);
  [[nodiscard]] bool is_promised(std::uint32_t slot) const;
  /// Returns whether it is prepared, and this rank has arrived in it.
  [[nodiscard]] bool awaits_promised(std::uint32_t slot) const {
    return is_promised(slot) && has_arrived(slot, board_.self());
  }

 private:
  [[nodiscard]] std::uint64_t unclaimed(std::uint32_t slot);
  [[nodiscard]] std::uint64_t wait_for_claimant(std::uint32_t slot);

  const BoardView board_;
  PatientLock& lock_;
};

}  // namespace hvd
