#pragma once
/// `Exchange` is the wire with its pool of buffers; `Requests` are the messages of one batch under
/// way, which it outlives. Nothing blocks. They are for one thread at a time. Which sends must be
/// synchronous, says point_to_point.h. They fail as the wire does, and with BackendError that says
/// that a message is not as long as expected.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_set>
#include <vector>

#include "ops/p2p/point_to_point.h"

namespace hvd {

class Requests;

class Exchange {
 public:
  /// `hosts[r]`: the host that rank r is on. `looks_again`: this rank looks at the wire also where
  /// no batch is under way.
  Exchange(std::unique_ptr<PointToPoint> wire, std::vector<int> hosts, bool looks_again);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  [[nodiscard]] PointToPoint& wire() const { return *wire_; }
  [[nodiscard]] bool looks_again() const { return looks_again_; }
  /// Cancels and forgets all that is under way.
  void abandon() noexcept;

 private:
  friend class Requests;
  struct Buffer {
    std::unique_ptr<std::byte[]> memory;  // NOLINT(modernize-avoid-c-arrays): not initialized
    std::size_t bytes = 0;
  };
  /// Returns whether this rank's messages to `rank` leave the host.
  [[nodiscard]] bool is_elsewhere(int rank) const;
  Buffer take(std::size_t bytes);
  void give(Buffer buffer);

  std::unique_ptr<PointToPoint> wire_;
  const std::vector<int> hosts_;
  const bool looks_again_;
  std::vector<Buffer> pool_;
  std::size_t pooled_bytes_ = 0;
  std::unordered_set<Requests*> under_way_;
};

class Requests {
 public:
  /// `memory` owns what messages are sent from or received into, besides buffers: kept for as long
  /// as the wire may touch it.
  Requests(Exchange& exchange, std::shared_ptr<void> memory);
  ~Requests();
  Requests(const Requests&) = delete;
  Requests& operator=(const Requests&) = delete;

  /// Memory that lasts as long as this object, and as the wire may touch it. Aligned to 64.
  std::span<std::byte> buffer(std::size_t bytes);

  /// Each is one message or, if it is long and for another host, several in turn
  /// (PointToPoint::piece_bytes). For each it adds one to `pending` and, when that is done, a later
  /// `poll` takes one off. `pending` must stay where it is until then.
  void send(std::span<const std::byte> bytes, int to, int tag, SendMode mode, std::size_t& pending);
  void receive(std::span<std::byte> bytes, int from, int tag, std::size_t& pending);

  /// True if a message was done.
  bool poll();
  /// Returns whether nothing is under way, nor waits in this process for it to look at the wire: a
  /// rank that leads no domain may not look there again before its next batch.
  [[nodiscard]] bool idle();
  /// Bytes sent so far, to ranks on other hosts only.
  [[nodiscard]] std::uint64_t bytes_to_other_hosts() const { return bytes_to_other_hosts_; }
  /// Cancels and forgets what is under way. What the wire may still touch it keeps.
  void abandon() noexcept;

 private:
  struct Message {
    std::size_t* pending;
    std::size_t expected;  ///< bytes to receive
  };
  void add(const Posted& posted, Message message);
  /// Visits the pieces in which `bytes` travel to or from `peer`: the same on both sides.
  template <class Byte, class Visit>
  void each_piece(std::span<Byte> bytes, int peer, Visit&& visit) const;

  Exchange& exchange_;
  std::shared_ptr<void> memory_;
  std::vector<Exchange::Buffer> buffers_;
  std::vector<Posted> posted_;
  std::vector<Message> messages_;  ///< of `posted_`
  std::vector<Finished> finished_;
  std::uint64_t bytes_to_other_hosts_ = 0;
  bool is_to_flush_ = false;
};

}  // namespace hvd
