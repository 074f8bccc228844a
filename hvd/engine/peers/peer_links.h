#pragma once
/// PeerLinks bring frames (hvd/negotiation/values/peer_frames.h) from this rank to others and back,
/// in order for each pair: through the rings of the board to ranks of this domain, through a
/// transport to all others, and to this rank itself through a queue. What has no room waits here.
/// Under the engine's mutex; the transport's part is for the thread that has the turn, and throws
/// what that throws.
// Tested in tests/hvd/engine/peer_messages_test.cc

#include <cstddef>
#include <deque>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "hvd/base/wire.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/turn.h"
#include "hvd/negotiation/values/capabilities.h"
#include "hvd/negotiation/values/peer_frames.h"

namespace hvd {

class PeerLinks {
 public:
  explicit PeerLinks(const EngineParts& parts) : parts_(parts) {}

  /// Returns whether the rank is of another domain.
  [[nodiscard]] bool is_elsewhere(int rank) const { return !parts_.is_here(rank); }
  /// Returns the index in this domain of one of its ranks.
  [[nodiscard]] int index_of(int rank) const { return parts_.topology.index_here(rank); }
  /// Returns the most bytes that a payload to the rank may have.
  [[nodiscard]] std::size_t most_bytes(int to) const;
  /// Returns the bytes that it should have if there are many, so many of them under way at once.
  [[nodiscard]] std::size_t chunk_bytes(int to) const {
    return is_elsewhere(to) ? most_bytes(to) : most_bytes(to) / 2;
  }
  /// Returns whether the links bound by themselves how much is under way.
  [[nodiscard]] bool is_bounded(int to) const {
    return !is_elsewhere(to) && to != parts_.topology.rank;
  }

  /// Sends a frame; the payload may be used again when it returns.
  void send(int to, PeerFrameHead head, std::span<const std::byte> payload = {})
      HVD_REQUIRES(engine_mutex);
  /// Returns whether a frame with such a payload would go at once, not having to wait here.
  [[nodiscard]] bool has_room(int to, std::size_t payload_bytes) HVD_REQUIRES(engine_mutex);
  /// Sends what has waited, to ranks of this domain. Returns whether some of it has gone.
  bool flush() HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool has_waiting() const HVD_REQUIRES(engine_mutex) { return !waiting_.empty(); }

  /// Calls `take(from, head, payload)` for frames that have come from ranks of this domain, if
  /// there are any. Returns whether there were.
  template <class Take>
  bool receive(const Take& take) HVD_REQUIRES(engine_mutex) {
    bool any = false;
    for (std::size_t left = own_.size(); left > 0; --left, any = true) {
      const auto [head, payload] = std::move(own_.front());
      own_.pop_front();
      take(parts_.topology.rank, head, payload_of(head, payload));
    }
    const auto take_one = [&](int from, const PeerFrameHead& head, const PeerPayload& payload) {
      take(parts_.topology.domain_ranks[static_cast<std::size_t>(from)], head, payload);
    };
    const auto freed = [&](int from) {
      if (parts_.board->rings().calls(from, Rings::kForRoom)) ring(from);
    };
    return parts_.board->rings().take(kMostOfEach, take_one, freed) > 0 || any;
  }
  /// Returns whether frames have come, as far as this domain is concerned. Any thread.
  [[nodiscard]] bool has_any() const { return parts_.board->rings().has_any(); }
  [[nodiscard]] bool has_own() const HVD_REQUIRES(engine_mutex) { return !own_.empty(); }

  /// The same with ranks of other domains: sends what waits, and receives. Returns whether there
  /// was anything.
  template <class Take>
  bool exchange(const Turn& /*turn*/, const Take& take) HVD_REQUIRES(engine_mutex) {
    bool any = send_elsewhere();
    while (auto message = parts_.peers->receive()) {
      any = true;
      const PeerFrameHead head = head_of(*message);
      take(message->from, head, payload_of(head, std::span(message->bytes).subspan(sizeof head)));
    }
    return send_elsewhere() || any;
  }
  /// Returns whether frames for other domains are here still.
  [[nodiscard]] bool has_unsent(const Turn& turn) HVD_REQUIRES(engine_mutex);

 private:
  struct Frame {
    PeerFrameHead head;
    Bytes payload;
  };
  static constexpr std::size_t kMostOfEach = 64;  ///< frames of a rank that are taken at a time

  [[nodiscard]] static PeerPayload payload_of(const PeerFrameHead& head,
                                              std::span<const std::byte> payload);
  /// Throws WireError if it is none.
  [[nodiscard]] static PeerFrameHead head_of(const Message& message);
  bool send_elsewhere() HVD_REQUIRES(engine_mutex);
  void ring(int index);

  const EngineParts& parts_;
  std::deque<Frame> own_ HVD_GUARDED_BY(engine_mutex);  ///< from this rank to itself
  std::map<int, std::deque<Frame>> waiting_
      HVD_GUARDED_BY(engine_mutex);  ///< by rank of this domain; none is empty
  std::deque<std::pair<int, SharedBytes>> elsewhere_
      HVD_GUARDED_BY(engine_mutex);  ///< for ranks of other domains
  bool is_wire_used_ HVD_GUARDED_BY(engine_mutex) =
      false;  ///< something may still be in the transport
};

}  // namespace hvd
