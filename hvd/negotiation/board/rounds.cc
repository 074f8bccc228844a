#include "hvd/negotiation/board/rounds.h"

#include "hvd/base/futex.h"
#include "hvd/base/waits.h"
#include "hvd/negotiation/board/layout.h"

namespace hvd {

namespace {

constexpr std::uint64_t kClaimed = std::uint64_t{1} << 31;
constexpr unsigned kClaimantBits = 16;  // from here on, below kClaimed, its index
constexpr std::uint64_t kArrivals = (std::uint64_t{1} << kClaimantBits) - 1;
constexpr unsigned kCompanyBits = 2;  // of a result_round

constexpr std::uint64_t claimed_by(int rank) {
  return kClaimed | static_cast<std::uint64_t>(rank) << kClaimantBits;
}
constexpr int claimant_of(std::uint64_t word) {
  return (word & kClaimed) == 0 ? Rounds::kNobody
                                : static_cast<int>((word & (kClaimed - 1)) >> kClaimantBits);
}

}  // namespace

/// Returns the slot's generation and arrivals once nobody claims the round, or the world failed.
std::uint64_t Rounds::unclaimed(std::uint32_t slot) {
  const auto& word = board_.head(slot).generation_and_arrivals;
  std::uint64_t now = 0;
  const auto is_unclaimed = [&] {
    now = word.load(std::memory_order_seq_cst);
    return (now & kClaimed) == 0;
  };
  if (wait_until(is_unclaimed, waits::kClaim, true) ||
      wait_until(is_unclaimed, waits::kClaim, false))
    return now;
  return wait_for_claimant(slot);
}

/// The same where the claimant has lost its core, or worse.
std::uint64_t Rounds::wait_for_claimant(std::uint32_t slot) {
  const auto& word = board_.head(slot).generation_and_arrivals;
  PatientWait wait = lock_.make_wait(PatientWait::kWrites);
  while (true) {
    const std::uint64_t now = word.load(std::memory_order_seq_cst);
    const int claimant = claimant_of(now);
    lock_.await(claimant);  // which this rank may have meanwhile
    if (claimant == kNobody || !wait.pause(claimant)) {
      lock_.await(kNobody);
      return now;
    }
  }
}

bool Rounds::await_unclaimed(std::uint32_t slot) { return (unclaimed(slot) & kClaimed) == 0; }

int Rounds::claimant(std::uint32_t slot) const {
  return claimant_of(board_.head(slot).generation_and_arrivals.load(std::memory_order_acquire));
}

void Rounds::prepare_arrival(std::uint32_t slot) const {
  prefetch_to_write(&board_.head(slot));
  const auto* const mine =
      reinterpret_cast<const std::byte*>(&board_.slot_rank(slot, board_.self()));
  prefetch_to_write(mine);
  prefetch_to_write(mine + 64);
}

bool Rounds::expect_to_be_last(std::uint32_t slot, std::span<const int> indices) const {
  if (arrivals(slot) + 1 != indices.size()) return false;
  for (const int index : indices) {
    if (index == board_.self()) continue;
    const board_layout::SlotRank& other = board_.slot_rank(slot, index);
    __builtin_prefetch(&other);
    __builtin_prefetch(reinterpret_cast<const std::byte*>(&other) + 64);
  }
  return true;
}

bool Rounds::arrive_last(std::uint32_t slot, std::uint32_t generation, std::uint32_t ranks) {
  board_layout::SlotHead& place = board_.head(slot);
  board_layout::SlotRank& mine = board_.slot_rank(slot, board_.self());
  mine.arrived_round.store(place.round.load(std::memory_order_relaxed) + 1,
                           std::memory_order_relaxed);
  std::uint64_t now = std::uint64_t{generation} << 32 | (ranks - 1);
  return place.generation_and_arrivals.compare_exchange_strong(
      now, (now + 1) | claimed_by(board_.self()), std::memory_order_seq_cst);
}

std::uint32_t Rounds::arrive(std::uint32_t slot, std::uint32_t generation) {
  board_layout::SlotHead& place = board_.head(slot);
  board_layout::SlotRank& mine = board_.slot_rank(slot, board_.self());
  while (true) {
    std::uint64_t now = unclaimed(slot);
    if (static_cast<std::uint32_t>(now >> 32) != generation) {
      mine.arrived_round.store(0, std::memory_order_relaxed);
      return 0;
    }
    mine.arrived_round.store(place.round.load(std::memory_order_relaxed) + 1,
                             std::memory_order_relaxed);
    if (place.generation_and_arrivals.compare_exchange_weak(now, now + 1, std::memory_order_seq_cst,
                                                            std::memory_order_acquire))
      return static_cast<std::uint32_t>((now + 1) & kArrivals);
  }
}

bool Rounds::claim(std::uint32_t slot, std::uint32_t generation, std::uint32_t arrived) {
  std::uint64_t now = std::uint64_t{generation} << 32 | arrived;
  return board_.head(slot).generation_and_arrivals.compare_exchange_strong(
      now, now | claimed_by(board_.self()), std::memory_order_acq_rel);
}

std::uint32_t Rounds::arrivals(std::uint32_t slot) const {
  return static_cast<std::uint32_t>(
      board_.head(slot).generation_and_arrivals.load(std::memory_order_seq_cst) & kArrivals);
}
std::uint32_t Rounds::generation(std::uint32_t slot) const {
  return static_cast<std::uint32_t>(
      board_.head(slot).generation_and_arrivals.load(std::memory_order_acquire) >> 32);
}

void Rounds::reset_arrivals(std::uint32_t slot, std::uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) {
    // nobody else writes it while the round is claimed
    auto& round = board_.head(slot + i).round;
    // after the results that have been given
    round.store(round.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }
  board_layout::SlotHead& place = board_.head(slot);
  const std::uint64_t now = place.generation_and_arrivals.load(std::memory_order_relaxed);
  place.generation_and_arrivals.store(now >> 32 << 32, std::memory_order_release);
}

bool Rounds::evict(std::uint32_t slot) {
  auto& word = board_.head(slot).generation_and_arrivals;
  std::uint64_t now = word.load(std::memory_order_acquire);
  if (static_cast<std::uint32_t>(now) != 0) return false;
  return word.compare_exchange_strong(now, ((now >> 32) + 1) << 32, std::memory_order_acq_rel);
}

void Rounds::set_location(std::uint32_t slot, std::uint64_t location) {
  static_cast<void>(unclaimed(slot));  // the round is the one that this rank is going to arrive in
  const std::uint64_t round = board_.head(slot).round.load(std::memory_order_relaxed);
  board_.slot_rank(slot, board_.self())
      .locations[round % 2]
      .store(location, std::memory_order_relaxed);
}
void Rounds::keep_location(std::uint32_t slot, std::uint64_t location) {
  auto& word = board_.slot_rank(slot, board_.self())
                   .locations[board_.head(slot).round.load(std::memory_order_relaxed) % 2];
  if (word.load(std::memory_order_relaxed) != location)
    word.store(location, std::memory_order_relaxed);
}
std::span<std::byte, Rounds::kNoteBytes> Rounds::note(std::uint32_t slot, int rank) const {
  return board_.slot_rank(slot, rank).note;
}
std::uint64_t Rounds::coming_location(std::uint32_t slot, int rank) const {
  const std::uint64_t round = board_.head(slot).round.load(std::memory_order_relaxed);
  return board_.slot_rank(slot, rank).locations[round % 2].load(std::memory_order_relaxed);
}
std::uint64_t Rounds::location(std::uint32_t slot, int rank) const {
  const std::uint64_t round = board_.head(slot).round.load(std::memory_order_relaxed);
  return board_.slot_rank(slot, rank).locations[(round + 1) % 2].load(std::memory_order_relaxed);
}
bool Rounds::has_arrived_too(std::uint32_t slot, int rank) const {
  return board_.slot_rank(slot, rank).arrived_round.load(std::memory_order_relaxed) >=
         board_.slot_rank(slot, board_.self()).arrived_round.load(std::memory_order_relaxed);
}

bool Rounds::has_arrived(std::uint32_t slot, int rank) const {
  return board_.slot_rank(slot, rank).arrived_round.load(std::memory_order_relaxed) ==
         board_.head(slot).round.load(std::memory_order_acquire) + 1;
}
void Rounds::set_stuck(std::uint32_t slot) {
  board_.header().stuck_marks.fetch_add(1, std::memory_order_relaxed);
  board_.slot_rank(slot, board_.self())
      .stuck_round.store(
          board_.slot_rank(slot, board_.self()).arrived_round.load(std::memory_order_relaxed),
          std::memory_order_relaxed);
}
std::uint64_t Rounds::stuck_marks() const {
  return board_.header().stuck_marks.load(std::memory_order_relaxed);
}
bool Rounds::is_stuck(std::uint32_t slot, int rank, bool said) const {
  const std::uint64_t round =
      board_.head(slot).round.load(std::memory_order_relaxed) + (said ? 0 : 1);
  const board_layout::SlotRank& of_rank = board_.slot_rank(slot, rank);
  return of_rank.arrived_round.load(std::memory_order_relaxed) == round &&
         of_rank.stuck_round.load(std::memory_order_relaxed) == round;
}

void Rounds::set_late(const UnitRef& unit, std::chrono::nanoseconds deadline) {
  auto& own = board_.area(board_.self());
  own.late_round.store(0, std::memory_order_seq_cst);  // of none, until all is written
  own.late_unit.store(std::uint64_t{unit.generation} << 32 | unit.id, std::memory_order_seq_cst);
  own.late_deadline.store(deadline.count(), std::memory_order_seq_cst);
  own.late_round.store(
      board_.slot_rank(unit.id, board_.self()).arrived_round.load(std::memory_order_relaxed),
      std::memory_order_seq_cst);
}
std::optional<Rounds::Late> Rounds::late(int rank) const {
  const auto& area = board_.area(rank);
  const std::uint64_t round = area.late_round.load(std::memory_order_seq_cst);
  if (round == 0) return std::nullopt;
  const std::uint64_t unit = area.late_unit.load(std::memory_order_seq_cst);
  const Late late{{static_cast<std::uint32_t>(unit), static_cast<std::uint32_t>(unit >> 32)},
                  std::chrono::nanoseconds(area.late_deadline.load(std::memory_order_seq_cst))};
  const bool holds =
      late.unit.id < board_.slots() && area.late_round.load(std::memory_order_seq_cst) == round &&
      board_.slot_rank(late.unit.id, rank).arrived_round.load(std::memory_order_relaxed) == round;
  return holds ? std::optional(late) : std::nullopt;
}
bool Rounds::is_open(std::uint32_t slot, int rank, bool said) const {
  const std::uint64_t round =
      board_.head(slot).round.load(std::memory_order_relaxed) + (said ? 0 : 1);
  return board_.slot_rank(slot, rank).arrived_round.load(std::memory_order_relaxed) == round;
}

void Rounds::set_blocked(std::uint32_t slots) {
  auto& blocked = board_.area(board_.self()).blocked;
  if (blocked.load(std::memory_order_relaxed) != slots)
    blocked.store(slots, std::memory_order_release);
}
std::uint32_t Rounds::blocked(int rank) const {
  return board_.area(rank).blocked.load(std::memory_order_acquire);
}

void Rounds::void_slot(std::uint32_t slot, std::uint32_t count) {
  // The generation first: who arrives in between finds it over, and is not taken to have arrived in
  // the next round.
  auto& word = board_.head(slot).generation_and_arrivals;
  std::uint64_t now = unclaimed(slot);
  while (!word.compare_exchange_weak(now, ((now >> 32) + 1) << 32, std::memory_order_acq_rel))
    now = unclaimed(slot);
  for (std::uint32_t i = 0; i < count; ++i)
    board_.head(slot + i).round.fetch_add(1, std::memory_order_relaxed);
}

void Rounds::close_slot(std::uint32_t slot) {
  auto& word = board_.head(slot).generation_and_arrivals;
  std::uint64_t now = unclaimed(slot);
  while (!word.compare_exchange_weak(now, ((now >> 32) + 1) << 32, std::memory_order_acq_rel))
    now = unclaimed(slot);
}

void Rounds::give_results(std::uint32_t slot, std::span<const int> indices, Company company) {
  // as in `arrived_round`
  const std::uint64_t round = board_.head(slot).round.load(std::memory_order_relaxed) + 1;
  const std::uint64_t result = round << kCompanyBits | static_cast<std::uint64_t>(company);
  for (const int index : indices)
    board_.slot_rank(slot, index).result_round.store(result, std::memory_order_release);
}
bool Rounds::is_to_claim(std::uint32_t slot, std::size_t ranks) const {
  return (board_.head(slot).generation_and_arrivals.load(std::memory_order_seq_cst) &
          (kClaimed | kArrivals)) == ranks;
}
bool Rounds::has_result(std::uint32_t slot) const {
  const board_layout::SlotRank& mine = board_.slot_rank(slot, board_.self());
  const std::uint64_t round = mine.result_round.load(std::memory_order_acquire) >> kCompanyBits;
  return round != 0 && round == mine.arrived_round.load(std::memory_order_relaxed);
}
Rounds::Company Rounds::take_result(std::uint32_t slot) {
  auto& result = board_.slot_rank(slot, board_.self()).result_round;
  const auto company =
      static_cast<Company>(result.load(std::memory_order_relaxed) & ((1U << kCompanyBits) - 1));
  result.store(0, std::memory_order_release);
  return company;
}
bool Rounds::are_results_taken(std::uint32_t slot) const {
  for (int rank = 0; rank < board_.ranks(); ++rank)
    if (board_.slot_rank(slot, rank).result_round.load(std::memory_order_acquire) != 0)
      return false;
  return true;
}

void Rounds::promise(std::uint32_t slot) {
  board_.head(slot).promised_round.store(
      board_.head(slot).round.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}
void Rounds::take_promise_back(std::uint32_t slot) {
  board_.head(slot).promised_round.store(0, std::memory_order_release);
}
bool Rounds::is_promised(std::uint32_t slot) const {
  return board_.head(slot).promised_round.load(std::memory_order_acquire) ==
         board_.head(slot).round.load(std::memory_order_relaxed) + 1;
}

}  // namespace hvd
