#pragma once
/// This header says what lies where in the memory that the ranks of a domain share for a Board. The
/// Board's parts alone know it. A field is either constant, or atomic, or guarded by the lock, or
/// written by one rank before an atomic says that it may be read.
///
/// The block for n ranks and s slots, each part from a new page of 4,096 bytes on:
///
///   part      bytes           what it holds
///   Header    20,736          the fields of the whole domain
///   RankArea  2,176 n         the fields of each rank, by its index in the domain
///   slots     (64 + 128 n) s  for each slot its SlotHead, and after it a SlotRank for each rank
///   log       4,194,304       records, each its length u32 and so many bytes
///                             (hvd/negotiation/values/records.h); the byte at position p lies at p
///                             modulo the size
///   callers   (64 + s) n      for each rank its RingRank, and after it a bit for each rank, in
///                             words of 64, in whole lines (s bytes): whether that has ever sent it
///                             a frame
///   rings     (128 + r) n n   for each rank, and for each that it sends frames to, a RingHead and
///                             r bytes of frames (hvd/negotiation/values/peer_frames.h): each a
///                             line and its payload, in whole lines; r is `ring_bytes`
///
/// Offsets and sizes are those of glibc on x86-64; where a mutex is larger, what follows it lies
/// further on. What many ranks write, or wait for, begins a cache line.
///
///   Header: offset  bytes   field
///                0      4   ranks                   constant
///                4      4   slots                   constant
///                8     40   lock                    the board's lock, a robust mutex
///               48      4   lock_owner              index of the rank that has it, -1: none; for
///                                                   messages
///               52  4,096   open_batches            by group, u32: batches opened and not retired;
///                                                   under the lock
///            4,148      4   next_place              where to look for free places first; under the
///                                                   lock
///            4,152      8   stuck_marks             how often a rank has said that it is stuck
///            4,160      8   tail                    bytes appended to the log
///            4,168      4   awaited                 index of the rank that the lock's owner waits
///                                                   for, -1: none; for messages
///            4,224      4   wait_doorbell           futex of the threads that wait for results, of
///                                                   all ranks
///            4,228      4   wait_sleepers           how many of them sleep
///            4,232      4   watchers                how many of them sleep or are going to
///            4,236      4   leader_looks            1: a thread of the domain's leader looks for
///                                                   arrivals all the time
///            4,240      4   watching_workers        how many coordination threads are to be woken
///                                                   like the sleepers of `wait_doorbell`
///            4,288      4   first_failure           index of the rank whose failure stays, -1:
///                                                   none
///            4,352 16,384   batches                 BatchState by place, 64 bytes each
///
///   RankArea:    0     40   alive                   a robust mutex that the rank's coordination
///                                                   thread holds for as long as it lives
///               40      4   work_doorbell           futex of the rank's coordination thread
///               44      4   work_sleepers           how many threads sleep on it
///               48      4   born                    1: `alive` has been taken
///               52      4   left                    1: the rank reads and writes no more
///               56      4   dead                    1: somebody has found `alive` without its
///                                                   owner
///               60      4   blocked                 units that the rank's threads wait for, if all
///                                                   of them do, for long; else 0
///               64      8   read                    bytes of the log that the rank has read and
///                                                   acted on
///               72      1   failure_code            what the rank says has failed: written before
///                                                   `first_failure` can name it
///               73  2,048   failure_text            the same in words, up to a zero
///            2,124      4   watches                 1: the rank's coordination thread is one of
///                                                   the `watching_workers`
///            2,128      8   late_unit               what the rank has submitted, and has not ended
///                                                   by its deadline: bits 32-63 the generation,
///                                                   bits 0-31 the slot
///            2,136      8   late_deadline           that deadline, in ns after the submission
///            2,144      8   late_round              as arrived_round there, when the rank has said
///                                                   so; 0: never, or it is being written
///
///   SlotHead:    0      8   generation_and_arrivals bits 32-63 the generation; bit 31: the round is
///                                                   claimed, by the rank whose index bits 16-30
///                                                   are; bits 0-15 how many have arrived
///                8      8   round                   of the one that is gathering
///               16      8   promised_round          round + 1 of the last that the domain's leader
///                                                   has prepared
///
///   SlotRank:    0     16   locations               two words, by the round's parity
///               16      8   arrived_round           round + 1 of the rank's last arrival
///               24      8   result_round            the same of the one that has ended without a
///                                                   record, times 4, and how it ended
///                                                   (Rounds::Company); 0 once its result is taken
///               32     88   note                    input, then result, of a tiny operation on the
///                                                   fast path: 32 bytes in the first line; or
///                                                   where the ranks' blocks of a round of leased
///                                                   blocks are, a word each
///              120      8   stuck_round             as arrived_round, of the last that has waited
///                                                   for long
///
///   RingRank:    0      4   call                    when the rank's doorbells are to be rung
///                                                   (Rings::Call)
///                8      8   meetings                calls of barrier_until of the rank
///
///   RingHead:    0      8   taken                   bytes that the reader has taken
///               64      8   put                     bytes that the writer has put, for who looks
///                                                   without the engine's mutex
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
  int ranks;
  std::uint32_t slots;
  pthread_mutex_t lock;
  std::atomic<int> lock_owner{kNobody};
  std::array<std::uint32_t, kOpenCounts> open_batches{};
  std::uint32_t next_place = 0;
  std::atomic<std::uint64_t> stuck_marks{0};
  alignas(64) std::atomic<std::uint64_t> tail{0};
  std::atomic<int> awaited{kNobody};
  alignas(64) FutexWord wait_doorbell{0};
  std::atomic<std::uint32_t> wait_sleepers{0};
  std::atomic<std::uint32_t> watchers{0};
  std::atomic<std::uint32_t> leader_looks{0};
  std::atomic<std::uint32_t> watching_workers{0};
  alignas(64) std::atomic<int> first_failure{kNoFailure};
  std::array<BatchState, kBatchPlaces> batches;
};

struct alignas(64) RankArea {
  pthread_mutex_t alive;
  FutexWord work_doorbell{0};
  std::atomic<std::uint32_t> work_sleepers{0};
  std::atomic<std::uint32_t> born{0};
  std::atomic<std::uint32_t> left{0};
  std::atomic<std::uint32_t> dead{0};
  std::atomic<std::uint32_t> blocked{0};
  alignas(64) std::atomic<std::uint64_t> read{0};
  Status::Code failure_code = Status::Code::Ok;
  std::array<char, kFailureText> failure_text{};
  std::atomic<std::uint32_t> watches{0};
  std::atomic<std::uint64_t> late_unit{0};
  std::atomic<std::int64_t> late_deadline{0};
  std::atomic<std::uint64_t> late_round{0};
};

struct alignas(64) SlotHead {
  std::atomic<std::uint64_t> generation_and_arrivals{0};
  std::atomic<std::uint64_t> round{0};
  std::atomic<std::uint64_t> promised_round{0};
};

struct alignas(64) SlotRank {
  std::array<std::atomic<std::uint64_t>, 2> locations{};
  std::atomic<std::uint64_t> arrived_round{0};
  std::atomic<std::uint64_t> result_round{0};
  std::array<std::byte, kNoteBytes> note;
  std::atomic<std::uint64_t> stuck_round{0};
};

struct alignas(64) RingRank {
  std::atomic<std::uint32_t> call{0};
  std::atomic<std::uint64_t> meetings{0};
};

struct alignas(64) RingHead {
  std::atomic<std::uint64_t> taken{0};
  alignas(64) std::atomic<std::uint64_t> put{0};
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
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__ILP32__)
static_assert(sizeof(Header) == 20'736 && offsetof(Header, lock) == 8 &&
              offsetof(Header, lock_owner) == 48);
static_assert(offsetof(Header, open_batches) == 52 && offsetof(Header, next_place) == 4148 &&
              offsetof(Header, stuck_marks) == 4152);
static_assert(offsetof(Header, tail) == 4160 && offsetof(Header, awaited) == 4168 &&
              offsetof(Header, wait_doorbell) == 4224 && offsetof(Header, wait_sleepers) == 4228);
static_assert(offsetof(Header, watchers) == 4232 && offsetof(Header, leader_looks) == 4236 &&
              offsetof(Header, watching_workers) == 4240);
static_assert(offsetof(Header, first_failure) == 4288 && offsetof(Header, batches) == 4352);
static_assert(sizeof(RankArea) == 2176 && offsetof(RankArea, work_doorbell) == 40 &&
              offsetof(RankArea, born) == 48);
static_assert(offsetof(RankArea, blocked) == 60 && offsetof(RankArea, read) == 64 &&
              offsetof(RankArea, failure_code) == 72 && offsetof(RankArea, failure_text) == 73 &&
              offsetof(RankArea, watches) == 2124);
static_assert(offsetof(RankArea, late_unit) == 2128 && offsetof(RankArea, late_deadline) == 2136 &&
              offsetof(RankArea, late_round) == 2144);
#endif

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
