#pragma once
/// A peer frame is what two ranks say to each other for send and recv: a head of one cache line,
/// which begins with a word of the ring that it travels in, and a payload of so many bytes. Values;
/// of one binary, in native byte order. Nothing fails.
///
///   kind      id              words[0]           payload
///             says, to the rank that it goes to
///   Eager     -               small payload      its elements
///             here is a message, whole
///   Offer     of the send     location, if any   -
///             there is a message, whose elements are still here
///   Want      of the send     id of the receive  -
///             send the elements of what you have offered
///   Chunk     of the receive  -                  elements
///             here are the next of them
///   Got       of the send     bytes              -
///             so many bytes of them have come
///   Taken     of the send     -                  -
///             all of them are there
///   Refused   of the send     -                  Status: code, text
///             nobody will receive what you have offered
///   Credit    -               bytes, in all      -
///             so many bytes of eager messages are received
///   AskLeft   -               -                  -
///             have you left? Then say so behind all that you said
///   Left      -               -                  -
///             I have left: no message follows
///   Came      -               their number       -
///             I have come to so many meetings (barrier_until)
///
/// Eager and Offer also have the message's tag, type and number of elements.
// Tested in tests/hvd/negotiation/rings_test.cc

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "hvd/types.h"

namespace hvd {

/// The kinds of frames.
enum class PeerFrameKind : std::uint8_t {
  Eager,
  Offer,
  Want,
  Chunk,
  Got,
  Taken,
  Refused,
  Credit,
  AskLeft,
  Left,
  Came
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
