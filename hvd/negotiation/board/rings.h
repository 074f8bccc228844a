#pragma once
/// The rings of a board: one for each ordered pair of ranks of the domain, through which the first
/// sends the second frames (hvd/negotiation/values/peer_frames.h), in order. A ring takes memory
/// when it is first used. One thread of a rank at a time writes or reads, but for `has_any`, which
/// any thread may call. Nothing blocks and nothing fails: where there is no room, the frame is not
/// put. A rank may die at any instruction: a frame that it has not finished is never seen.
// Tested in tests/hvd/negotiation/rings_test.cc

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hvd/negotiation/board/board_view.h"
#include "hvd/negotiation/values/peer_frames.h"

namespace hvd {

class Rings {
 public:
  explicit Rings(const BoardView& board);

  // ---- to the other ranks, by index
  /// Returns whether a frame with a payload of so many bytes has room now.
  [[nodiscard]] bool has_room(int to, std::size_t payload_bytes);
  /// Puts a frame. Returns false if it has no room.
  bool put(int to, const PeerFrameHead& head, std::span<const std::byte> payload);
  /// Returns the most bytes that a payload may have.
  [[nodiscard]] std::size_t most_bytes() const { return ring_bytes_ / 4; }

  // ---- from them
  /// Returns whether a frame has come. Any thread.
  [[nodiscard]] bool has_any() const;
  /// Calls `take(from, head, payload)` for each frame that has come, of each rank up to so many.
  /// Returns how many there were. The payload is gone when `take` returns. Calls `freed(from)` now
  /// and then, as room has become free there: often enough for whoever waits for it.
  template <class Take, class Freed>
  std::size_t take(std::size_t most_of_each, const Take& take, const Freed& freed) {
    std::size_t taken = 0;
    for (std::size_t word = 0; word < words_; ++word) {
      for (std::uint64_t bits = senders(word); bits != 0; bits &= bits - 1) {
        const int from = static_cast<int>(word * 64) + __builtin_ctzll(bits);
        for (std::size_t count = 0; count < most_of_each && is_ready(from); ++count, ++taken) {
          const PeerFrameHead head = this->head(from);
          take(from, head, payload(from, head));
          drop(from, head);
        }
        if (frees(from)) freed(from);
      }
    }
    return taken;
  }

  // ---- who wants to be rung
  enum Call : std::uint32_t { kNobody = 0, kForFrames = 1, kForRoom = 2 };
  /// Says when this rank's doorbells are to be rung: when a frame has come, when a frame of its own
  /// has been taken; a sum of both. Whoever says more than before must look once more then, for
  /// what came before.
  void set_call(std::uint32_t when);
  /// Returns, after a frame was put for that rank, or some of its were taken, whether it wants to
  /// be rung for this.
  [[nodiscard]] bool calls(int rank, Call when) const;

  // ---- meetings (barrier_until)
  /// Says how many this rank has come to.
  void set_meetings(std::uint64_t count);
  /// Returns how many that rank has come to. Any thread.
  [[nodiscard]] std::uint64_t meetings(int rank) const;

 private:
  /// The state of a ring, of its reader or of its writer: how far it is, and the other, as known.
  struct End {
    std::atomic<std::uint64_t> at{0};  // written under the rank's mutex, read by `has_any` without
    std::uint64_t other = 0;
    std::size_t untold = 0;  // bytes that have become free since `freed` was called
    bool is_known = false;   // to the reader
  };
  [[nodiscard]] std::uint64_t senders(std::size_t word) const;
  [[nodiscard]] bool is_ready(int from) const;
  [[nodiscard]] PeerFrameHead head(int from) const;
  /// Returns what refers to the ring, or to the head.
  [[nodiscard]] PeerPayload payload(int from, const PeerFrameHead& head) const;
  void drop(int from, const PeerFrameHead& head);
  [[nodiscard]] bool frees(int from);

  const BoardView board_;
  const std::size_t ring_bytes_;
  const std::size_t words_;
  std::vector<End> out_, in_;
};

}  // namespace hvd
