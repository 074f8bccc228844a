#pragma once
/// This header says what lies where in the memory that the ranks of a domain share for a Board. The
/// Board's parts alone know it. A field is either constant, or atomic, or guarded by the lock, or
/// written by one rank before an atomic says that it may be read.
///
/// The block has, each from a new page on: the Header; a RankArea for each rank, by its index in
/// the domain; for each slot its SlotHead, and after it a SlotRank for each rank; the log's
/// `kLogBytes`, which are records, each its length u32 and so many bytes
/// (hvd/negotiation/values/records.h), where position p lies at p modulo the size; for each rank
/// its RingRank, and after it a bit for each rank, in whole lines: whether that has ever sent it a
/// frame; for each rank, and for each that it sends frames to, a RingHead and `ring_bytes` of
/// frames (hvd/negotiation/values/peer_frames.h), each a line and its payload, in whole lines. What
/// many ranks write, or wait for, begins a cache line.
// Tested in tests/hvd/negotiation/board_test.cc

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hvd/base/futex.h"
#include "hvd/errors.h"
#include "hvd/negotiation/board/board_view.h"
#include "hvd/negotiation/board/patient_lock.h"

namespace hvd::board_layout {

inline constexpr std::size_t kPage = 4096;
inline constexpr std::size_t kFailureText = 2048;
inline constexpr int kNobody = PatientLock::kNobody;
inline constexpr int kNoFailure = -1;

struct Header {
  int ranks;                             ///< constant
  std::uint32_t slots;                   ///< constant
  pthread_mutex_t lock;                  ///< the board's lock, a robust mutex
  std::atomic<int> lock_owner{kNobody};  ///< index of the rank that has it; for messages
  /// By group: batches opened and not retired; under the lock.
  std::array<std::uint32_t, kOpenCounts> open_batches{};
  std::uint32_t next_place = 0;  ///< where to look for free places first; under the lock
  std::atomic<std::uint64_t> stuck_marks{0};       ///< how often a rank has said that it is stuck
  alignas(64) std::atomic<std::uint64_t> tail{0};  ///< bytes appended to the log
  std::atomic<int> awaited{kNobody};  ///< the rank that the lock's owner waits for; for messages
  alignas(64) FutexWord wait_doorbell{0};  ///< of the threads that wait for results, of all ranks
  std::atomic<std::uint32_t> wait_sleepers{0};     ///< how many of them sleep
  std::atomic<std::uint32_t> watchers{0};          ///< how many of them sleep or are going to
  std::atomic<std::uint32_t> leader_looks{0};      ///< 1: a thread of the domain's leader looks for
                                                   ///< arrivals all the time
  std::atomic<std::uint32_t> watching_workers{0};  ///< coordination threads that are to be woken
                                                   ///< like the sleepers of `wait_doorbell`
  alignas(64) std::atomic<int> first_failure{kNoFailure};  ///< the rank whose failure stays
  std::array<BatchState, kBatchPlaces> batches;            ///< by place
};

struct alignas(64) RankArea {
  pthread_mutex_t alive;       ///< robust; held by the rank's coordination thread while it lives
  FutexWord work_doorbell{0};  ///< of the rank's coordination thread
  std::atomic<std::uint32_t> work_sleepers{0};     ///< how many threads sleep on it
  std::atomic<std::uint32_t> born{0};              ///< 1: `alive` has been taken
  std::atomic<std::uint32_t> left{0};              ///< 1: the rank reads and writes no more
  std::atomic<std::uint32_t> dead{0};              ///< 1: `alive` was found without its owner
  std::atomic<std::uint32_t> blocked{0};           ///< units that the rank's threads wait for, if
                                                   ///< all of them do, for long; else 0
  alignas(64) std::atomic<std::uint64_t> read{0};  ///< bytes of the log that it has acted on
  Status::Code failure_code = Status::Code::Ok;    ///< what the rank says has failed: written
                                                   ///< before `first_failure` can name it
  std::array<char, kFailureText> failure_text{};   ///< the same in words, up to a zero
  std::atomic<std::uint32_t> watches{0};           ///< 1: it is one of the `watching_workers`
  std::atomic<std::uint64_t> late_unit{0};         ///< what has not ended by its deadline: bits
                                                   ///< 32-63 the generation, bits 0-31 the slot
  std::atomic<std::int64_t> late_deadline{0};      ///< that deadline, in ns after the submission
  std::atomic<std::uint64_t> late_round{0};        ///< its `arrived_round`, once all of that is
                                                   ///< written; 0: never, or it is being written
  std::atomic<std::uint64_t> beats{0};             ///< how often it has said that it goes on
};

struct alignas(64) SlotHead {
  /// Bits 32-63: the generation; bit 31: the round is claimed, by the rank whose index bits 16-30
  /// are; bits 0-15: how many have arrived.
  std::atomic<std::uint64_t> generation_and_arrivals{0};
  std::atomic<std::uint64_t> round{0};           ///< of the one that is gathering
  std::atomic<std::uint64_t> promised_round{0};  ///< round + 1 of the last that the domain's leader
                                                 ///< has prepared
};

struct alignas(64) SlotRank {
  std::array<std::atomic<std::uint64_t>, 2> locations{};  ///< by the round's parity
  std::atomic<std::uint64_t> arrived_round{0};            ///< round + 1 of the rank's last arrival
  std::atomic<std::uint64_t> result_round{0};  ///< the same of the one that has ended without a
                                               ///< record, times 4, and how (Rounds::Company); 0
                                               ///< once its result is taken
  /// Input, then result, of a tiny operation on the fast path: 32 bytes in the first line; or where
  /// the ranks' blocks of a round of leased blocks are, a word each.
  std::array<std::byte, kNoteBytes> note;
  std::atomic<std::uint64_t> stuck_round{0};  ///< `arrived_round` of the last that waited for long
};

struct alignas(64) RingRank {
  std::atomic<std::uint32_t> call{0};  ///< when the rank's doorbells are to be rung (Rings::Call)
  std::atomic<std::uint64_t> meetings{0};  ///< calls of barrier_until of the rank
};

struct alignas(64) RingHead {
  std::atomic<std::uint64_t> taken{0};            ///< bytes that the reader has taken
  alignas(64) std::atomic<std::uint64_t> put{0};  ///< bytes that the writer has put, for who looks
                                                  ///< without the engine's mutex
};

/// Returns the bytes of a ring's frames: large for few ranks, as all pairs may come to use theirs.
constexpr std::size_t ring_bytes(int ranks) {
  constexpr std::size_t kAll = std::size_t{64} << 20;
  constexpr std::size_t kMost = std::size_t{256} << 10, kLeast = std::size_t{16} << 10;
  const auto n = static_cast<std::size_t>(ranks);
  return std::clamp(std::bit_floor(kAll / (n * n) + 1), kLeast, kMost);
}
/// Returns the words that have a bit for each rank.
constexpr std::size_t sender_words(int ranks) {
  return (static_cast<std::size_t>(ranks) + 63) / 64;
}

// What several processes see must be one word to each of them.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<int>::is_always_lock_free && sizeof(FutexWord) == 4);
static_assert(std::is_standard_layout_v<Header> && std::is_standard_layout_v<RankArea>);
static_assert(sizeof(BatchState) == 64 && alignof(BatchState) == 64);
static_assert(offsetof(Header, tail) % 64 == 0 && offsetof(Header, wait_doorbell) % 64 == 0);
static_assert(offsetof(Header, first_failure) % 64 == 0 && offsetof(Header, batches) % 64 == 0);
static_assert(offsetof(RankArea, read) % 64 == 0 && sizeof(RankArea) % 64 == 0);
static_assert(sizeof(RingRank) == 64 && sizeof(RingHead) == 128);
static_assert(sizeof(SlotHead) == 64 && sizeof(SlotRank) == 128 && offsetof(SlotRank, note) == 32);

/// The offsets of the parts.
struct Offsets {
  std::size_t areas, slots, slot_bytes, log, callers, caller_bytes, rings, ring_bytes, end;
};
inline Offsets offsets(int ranks, std::uint32_t slots) {
  const auto round_up = [](std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; };
  const auto n = static_cast<std::size_t>(ranks);
  Offsets at{};
  at.areas = round_up(sizeof(Header));
  at.slots = at.areas + round_up(n * sizeof(RankArea));
  at.slot_bytes = sizeof(SlotHead) + n * sizeof(SlotRank);
  at.log = at.slots + round_up(slots * at.slot_bytes);
  at.callers = at.log + kLogBytes;
  at.caller_bytes = sizeof(RingRank) + (sender_words(ranks) * sizeof(std::uint64_t) + 63) / 64 * 64;
  at.rings = at.callers + round_up(n * at.caller_bytes);
  at.ring_bytes = sizeof(RingHead) + ring_bytes(ranks);
  at.end = at.rings + round_up(n * n * at.ring_bytes);
  return at;
}

}  // namespace hvd::board_layout

namespace hvd {

inline BoardView::BoardView(std::span<std::byte> block, int self)
    : block_(block.data()),
      self_(self),
      ranks_(reinterpret_cast<board_layout::Header*>(block.data())->ranks),
      slots_(reinterpret_cast<board_layout::Header*>(block.data())->slots) {
  const auto at = board_layout::offsets(ranks_, slots_);
  areas_at_ = at.areas;
  slots_at_ = at.slots;
  slot_bytes_ = at.slot_bytes;
  log_at_ = at.log;
  callers_at_ = at.callers;
  caller_bytes_ = at.caller_bytes;
  rings_at_ = at.rings;
  ring_bytes_ = at.ring_bytes;
}

// On the way of small operations, of which they would be a twentieth as calls.
[[gnu::always_inline]] inline board_layout::Header& BoardView::header() const {
  return *reinterpret_cast<board_layout::Header*>(block_);
}
[[gnu::always_inline]] inline board_layout::RankArea& BoardView::area(int rank) const {
  return *reinterpret_cast<board_layout::RankArea*>(
      block_ + areas_at_ + static_cast<std::size_t>(rank) * sizeof(board_layout::RankArea));
}
[[gnu::always_inline]] inline board_layout::SlotHead& BoardView::head(std::uint32_t slot) const {
  return *reinterpret_cast<board_layout::SlotHead*>(block_ + slots_at_ + slot * slot_bytes_);
}
[[gnu::always_inline]] inline board_layout::SlotRank& BoardView::slot_rank(std::uint32_t slot,
                                                                           int rank) const {
  return *reinterpret_cast<board_layout::SlotRank*>(
      block_ + slots_at_ + slot * slot_bytes_ + sizeof(board_layout::SlotHead) +
      static_cast<std::size_t>(rank) * sizeof(board_layout::SlotRank));
}

[[gnu::always_inline]] inline board_layout::RingRank& BoardView::ring_rank(int rank) const {
  return *reinterpret_cast<board_layout::RingRank*>(block_ + callers_at_ +
                                                    static_cast<std::size_t>(rank) * caller_bytes_);
}
[[gnu::always_inline]] inline std::atomic<std::uint64_t>* BoardView::senders(int rank) const {
  return reinterpret_cast<std::atomic<std::uint64_t>*>(&ring_rank(rank) + 1);
}
[[gnu::always_inline]] inline board_layout::RingHead& BoardView::ring(int from, int to) const {
  const std::size_t number = static_cast<std::size_t>(from) * static_cast<std::size_t>(ranks_) +
                             static_cast<std::size_t>(to);
  return *reinterpret_cast<board_layout::RingHead*>(block_ + rings_at_ + number * ring_bytes_);
}
[[gnu::always_inline]] inline std::byte* BoardView::ring_memory(int from, int to) const {
  return reinterpret_cast<std::byte*>(&ring(from, to) + 1);
}

}  // namespace hvd
