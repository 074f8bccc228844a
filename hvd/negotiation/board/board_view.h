#pragma once
/// A BoardView finds what lies in the memory of a board (hvd/negotiation/board/layout.h, which its
/// users include for what it refers to). A value; the memory must outlive it. Any thread; nothing
/// fails.
// Tested in tests/hvd/negotiation/board_test.cc

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace hvd {

// hvd/negotiation/board/layout.h
namespace board_layout {
inline constexpr std::size_t kBatchPlaces = 256;
inline constexpr std::size_t kOpenCounts = 1024;
inline constexpr std::size_t kNoteBytes = 88;
inline constexpr std::size_t kLogBytes = std::size_t{4} << 20;
struct Header;
struct RankArea;
struct SlotHead;
struct SlotRank;
struct RingRank;
struct RingHead;
}  // namespace board_layout

/// One batch under way. Its sequence number, modulo the number of places, says which place it has;
/// the place is given to a later batch only when every rank of the domain that takes part has
/// departed, so that a rank that comes late finds what it came for.
struct alignas(64) BatchState {
  std::atomic<std::uint64_t> sequence{0};    ///< whose place this is
  std::atomic<std::uint64_t> next_chunk{0};  ///< chunks are claimed by adding one
  std::atomic<std::uint64_t> finished{0};    ///< chunks, or ranks, that are done
  std::atomic<bool> complete{
      false};  ///< the results are where they belong, for all ranks of the domain
  std::atomic<bool> retired{false};  ///< a rank knows that it is over: the next batch may be cut
  std::atomic<std::uint32_t> departed{0};  ///< ranks that need this state no more
  std::atomic<bool> taken{false};          ///< from `BatchPlaces::open` until all have departed
};

class BoardView {
 public:
  /// Views a board that `Board::format` has written. `self`: the index of this rank in the domain.
  BoardView(std::span<std::byte> block, int self);

  [[nodiscard]] int ranks() const { return ranks_; }
  [[nodiscard]] int self() const { return self_; }
  [[nodiscard]] std::uint32_t slots() const { return slots_; }

  [[nodiscard]] board_layout::Header& header() const;
  [[nodiscard]] board_layout::RankArea& area(int rank) const;
  [[nodiscard]] board_layout::SlotHead& head(std::uint32_t slot) const;
  [[nodiscard]] board_layout::SlotRank& slot_rank(std::uint32_t slot, int rank) const;
  [[nodiscard]] std::byte* log() const { return block_ + log_at_; }
  [[nodiscard]] board_layout::RingRank& ring_rank(int rank) const;
  /// Returns the first of the words that say who has sent the rank frames.
  [[nodiscard]] std::atomic<std::uint64_t>* senders(int rank) const;
  [[nodiscard]] board_layout::RingHead& ring(int from, int to) const;
  [[nodiscard]] std::byte* ring_memory(int from, int to) const;

 private:
  std::byte* block_;
  int self_;
  int ranks_;
  std::uint32_t slots_;
  std::size_t areas_at_, slots_at_, slot_bytes_, log_at_, callers_at_, caller_bytes_, rings_at_,
      ring_bytes_;
};

}  // namespace hvd
