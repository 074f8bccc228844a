#include "hvd/negotiation/board/rings.h"

#include <algorithm>

#include "hvd/base/futex.h"
#include "hvd/negotiation/board/layout.h"

namespace hvd {

namespace {

constexpr std::size_t kLine = sizeof(PeerFrameHead);

constexpr std::size_t frame_bytes(std::size_t payload) {
  return kLine + (payload + kLine - 1) / kLine * kLine;
}

/// The word by which a reader sees that the frame at this position is there.
std::atomic_ref<std::uint64_t> ready_at(std::byte* ring, std::size_t ring_bytes,
                                        std::uint64_t position) {
  return std::atomic_ref<std::uint64_t>(
      reinterpret_cast<PeerFrameHead*>(ring + position % ring_bytes)->ready);
}

}  // namespace

Rings::Rings(const BoardView& board)
    : board_(board),
      ring_bytes_(board_layout::ring_bytes(board.ranks())),
      words_(board_layout::sender_words(board.ranks())),
      out_(static_cast<std::size_t>(board.ranks())),
      in_(static_cast<std::size_t>(board.ranks())) {}

bool Rings::has_room(int to, std::size_t payload_bytes) {
  End& end = out_[static_cast<std::size_t>(to)];
  const std::uint64_t at = end.at.load(std::memory_order_relaxed);
  // Behind it is one line more: the next frame's word, where nothing of earlier ones may be read.
  const auto fits = [&] {
    return at - end.other + frame_bytes(payload_bytes) + kLine <= ring_bytes_;
  };
  if (fits()) return true;
  end.other = board_.ring(board_.self(), to).taken.load(std::memory_order_acquire);
  return fits();
}

bool Rings::put(int to, const PeerFrameHead& head, std::span<const std::byte> payload) {
  if (!has_room(to, payload.size())) return false;
  End& end = out_[static_cast<std::size_t>(to)];
  const std::uint64_t at = end.at.load(std::memory_order_relaxed);
  std::byte* const ring = board_.ring_memory(board_.self(), to);
  const std::uint64_t next = at + frame_bytes(payload.size());
  ready_at(ring, ring_bytes_, next).store(0, std::memory_order_relaxed);
  std::byte* const place = ring + at % ring_bytes_;
  constexpr std::size_t kWord = sizeof head.ready;
  std::memcpy(place + kWord, reinterpret_cast<const std::byte*>(&head) + kWord, kLine - kWord);
  const std::size_t begin = (at + kLine) % ring_bytes_;
  const std::size_t until_end = std::min(payload.size(), ring_bytes_ - begin);
  if (until_end > 0) std::memcpy(ring + begin, payload.data(), until_end);
  if (until_end < payload.size())
    std::memcpy(ring, payload.data() + until_end, payload.size() - until_end);
  ready_at(ring, ring_bytes_, at).store(at + 1, std::memory_order_release);
  board_.ring(board_.self(), to).put.store(next, std::memory_order_release);
  end.at.store(next, std::memory_order_relaxed);
  if (!end.is_known) {
    end.is_known = true;
    const auto self = static_cast<unsigned>(board_.self());
    board_.senders(to)[self / 64].fetch_or(std::uint64_t{1} << self % 64,
                                           std::memory_order_release);
  }
  return true;
}

std::uint64_t Rings::senders(std::size_t word) const {
  return board_.senders(board_.self())[word].load(std::memory_order_acquire);
}

bool Rings::is_ready(int from) const {
  const std::uint64_t at = in_[static_cast<std::size_t>(from)].at.load(std::memory_order_relaxed);
  return ready_at(board_.ring_memory(from, board_.self()), ring_bytes_, at)
             .load(std::memory_order_acquire) == at + 1;
}

/// The ring's memory may be looked at by who has the mutex alone: for others the writer is
/// elsewhere by now, perhaps.
bool Rings::has_any() const {
  for (std::size_t word = 0; word < words_; ++word)
    for (std::uint64_t bits = senders(word); bits != 0; bits &= bits - 1) {
      const int from = static_cast<int>(word * 64) + __builtin_ctzll(bits);
      const std::uint64_t at =
          in_[static_cast<std::size_t>(from)].at.load(std::memory_order_relaxed);
      if (board_.ring(from, board_.self()).put.load(std::memory_order_acquire) != at) return true;
    }
  return false;
}

PeerFrameHead Rings::head(int from) const {
  PeerFrameHead head;
  const std::uint64_t at = in_[static_cast<std::size_t>(from)].at.load(std::memory_order_relaxed);
  constexpr std::size_t kWord = sizeof head.ready;
  std::memcpy(reinterpret_cast<std::byte*>(&head) + kWord,
              board_.ring_memory(from, board_.self()) + at % ring_bytes_ + kWord, kLine - kWord);
  return head;
}

PeerPayload Rings::payload(int from, const PeerFrameHead& head) const {
  const std::uint64_t at = in_[static_cast<std::size_t>(from)].at.load(std::memory_order_relaxed);
  const std::byte* const ring = board_.ring_memory(from, board_.self());
  if (head.is_small())
    return {std::as_bytes(std::span(head.words)).first(static_cast<std::size_t>(head.bytes)), {}};
  const std::size_t bytes = head.payload_bytes();
  const std::size_t begin = (at + kLine) % ring_bytes_;
  const std::size_t until_end = std::min(bytes, ring_bytes_ - begin);
  return {{ring + begin, until_end}, {ring, bytes - until_end}};
}

void Rings::drop(int from, const PeerFrameHead& head) {
  End& end = in_[static_cast<std::size_t>(from)];
  const std::uint64_t next =
      end.at.load(std::memory_order_relaxed) + frame_bytes(head.payload_bytes());
  end.untold += static_cast<std::size_t>(next - end.at.load(std::memory_order_relaxed));
  end.at.store(next, std::memory_order_relaxed);
  board_.ring(from, board_.self()).taken.store(next, std::memory_order_release);
}

/// Whoever waits for room found over half of the ring in use: before that is empty, this is true.
bool Rings::frees(int from) {
  End& end = in_[static_cast<std::size_t>(from)];
  if (end.untold < ring_bytes_ / 4) return false;
  end.untold = 0;
  return true;
}

void Rings::set_call(std::uint32_t when) {
  auto& word = board_.ring_rank(board_.self()).call;
  const std::uint32_t before = word.exchange(when, std::memory_order_seq_cst);
  // between that and the look for what came before, as in `calls`
  if ((when & ~before) != 0) full_fence();
}

void Rings::set_meetings(std::uint64_t count) {
  board_.ring_rank(board_.self()).meetings.store(count, std::memory_order_release);
}
std::uint64_t Rings::meetings(int rank) const {
  return board_.ring_rank(rank).meetings.load(std::memory_order_acquire);
}

bool Rings::calls(int rank, Call when) const {
  full_fence();
  return (board_.ring_rank(rank).call.load(std::memory_order_relaxed) & when) != 0;
}

}  // namespace hvd
