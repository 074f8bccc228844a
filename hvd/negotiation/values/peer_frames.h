#pragma once
/// A peer frame is what two ranks say to each other for send and recv: a head of one cache line,
/// which begins with a word of the ring that it travels in, and a payload of so many bytes. Values;
/// of one binary, in native byte order. Nothing fails.
// Tested in tests/hvd/negotiation/rings_test.cc

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "hvd/types.h"

namespace hvd {

/// A PeerFrameKind is what a frame says to the rank that it goes to. `id` and `words[0]` are 0, and
/// there is no payload, where nothing is said of them.
enum class PeerFrameKind : std::uint8_t {
  Eager,  ///< Here is a message, whole: tag, dtype, count, and its elements: in `words` where they
          ///< fit, else as payload
  Offer,  ///< There is a message, whose elements are still here: tag, dtype, count; `id`: of the
          ///< send; `words[0]`: its location, if any
  Want,   ///< Send the elements of what you have offered. `id`: of the send; `words[0]`: that of
          ///< the receive
  Chunk,  ///< Here are the next of them. `id`: of the receive
  Got,    ///< `words[0]` bytes of them have come. `id`: of the send
  Taken,  ///< All of them are there. `id`: of the send
  Refused,  ///< Nobody will receive what you have offered. `id`: of the send; payload: Status
  Credit,   ///< `words[0]` bytes of eager messages are received, in all
  AskLeft,  ///< Have you left? Then say so behind all that you said
  Left,     ///< I have left: no message follows
  Came      ///< I have come to `words[0]` meetings (barrier_until)
};

struct alignas(64) PeerFrameHead {
  std::uint64_t ready = 0;  ///< of the ring: position + 1 once the frame is there
  PeerFrameKind kind = PeerFrameKind::Eager;
  DataType dtype = DataType::Float32;
  std::int32_t tag = 0;
  std::uint64_t bytes = 0;  ///< of the payload
  std::uint64_t id = 0;
  std::int64_t count = 0;  ///< elements of the message
  std::array<std::uint64_t, 3> words{};

  /// Payloads of so few bytes travel in the words.
  static constexpr std::size_t kSmallBytes = sizeof(words);
  [[nodiscard]] bool is_small() const {
    return kind == PeerFrameKind::Eager && bytes <= kSmallBytes;
  }
  /// Returns the bytes that follow it.
  [[nodiscard]] std::size_t payload_bytes() const {
    return is_small() ? 0 : static_cast<std::size_t>(bytes);
  }
};
static_assert(sizeof(PeerFrameHead) == 64 && std::is_trivially_copyable_v<PeerFrameHead>);

/// The payload of a frame that has come, in up to two pieces: a ring has an end.
struct PeerPayload {
  std::span<const std::byte> first, second;
  [[nodiscard]] std::size_t size() const { return first.size() + second.size(); }
  void copy_to(void* to) const {
    if (!first.empty()) std::memcpy(to, first.data(), first.size());
    if (!second.empty())
      std::memcpy(static_cast<std::byte*>(to) + first.size(), second.data(), second.size());
  }
};

}  // namespace hvd
