#pragma once
/// PieceExchange brings pieces of tensors to other ranks and takes theirs, through rings, all at
/// once: as long as every rank is at work each piece passes through the cache, and neither core is
/// idle. It waits for others for some microseconds at a time only: then it reads a piece where it
/// is, so that a rank that sleeps, or has died, holds nobody up. One batch member of one rank; the
/// thread that has the turn. It fails as `Read` does.
// Tested in tests/ops/shm/relay_test.cc

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "hvd/base/waits.h"
#include "ops/shm/memory/relay.h"

namespace hvd {

class PieceExchange {
 public:
  /// Copies a piece, which begins after `skipped` bytes of the memory of source number `source`, to
  /// `to`. Returns false if that cannot be done any more.
  using Read =
      std::function<bool(std::size_t source, std::size_t skipped, std::span<std::byte> to)>;

  /// `have_cores`: every rank of the domain has one; elsewhere this one offers its own when it
  /// waits. `past_caches`: what is taken is not to stay in the caches.
  explicit PieceExchange(bool have_cores, bool past_caches = false)
      : pauses_(have_cores), past_caches_(past_caches) {}

  /// `memory` is for the readers of the ring.
  void give(Relay& relay, std::span<const std::byte> memory) {
    outgoing_.push_back({&relay, memory});
  }
  /// Adds what goes to `to` by way of `from`, and begins after `skipped` bytes of the memory of
  /// source number `source`.
  void take(std::size_t source, std::size_t skipped, RelayEnd from, std::span<std::byte> to) {
    incoming_.push_back({from.relay, to, source, skipped, from.reader});
  }
  /// Takes all that is to be taken, and gives meanwhile. Returns false if `read` has.
  bool take_all(const Read& read);
  /// Gives on until the readers have all, or do nothing for a moment. Returns false if one of them
  /// has not begun.
  bool give_rest();

 private:
  struct Outgoing {
    Relay* relay;
    std::span<const std::byte> memory;
    std::uint64_t next = 0;
  };
  struct Incoming {
    Relay* relay;
    std::span<std::byte> to;
    std::size_t source, skipped, reader;
    [[nodiscard]] bool is_done() const {
      return relay->taken_by(reader) >= Relay::pieces_of(to.size());
    }
  };
  bool give_some();
  bool take_some();

  Pauses pauses_;  // since something has moved
  const bool past_caches_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
};

}  // namespace hvd
