#pragma once
/// PointToPoint is the port through which ranks that share no memory send each other messages: from
/// one rank to one rank, found again by a tag. Messages from one rank to another that have the same
/// tag are received in the order in which they were sent; a message that comes before it is asked
/// for waits. Nothing blocks; what is under way goes on while any of these functions is called. One
/// thread at a time. It fails with BackendError that has the wire's own words, or with RankFailed
/// where the wire knows that a rank has gone. MPI (ops/mpi/point_to_point.h) and UCX
/// (ops/ucx/point_to_point.h) implement it.
// Tested in tests/ops/p2p/exchange_test.cc, tests/ops/p2p/transport_test.cc

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace hvd {

/// A Posted is a message under way. It is asked about, and dropped, where it was posted.
struct Posted {
  std::uintptr_t handle = 0;  ///< of the wire; 0: nothing is under way
  int peer = -1;              ///< the other rank
  bool is_send = false;
};

/// A Finished is a message that is done.
struct Finished {
  std::size_t place = 0;  ///< among those that were asked about
  std::size_t bytes = 0;  ///< received
};

/// A Claimed is a message that has come, and that only `receive_claimed` gets now.
struct Claimed {
  std::uintptr_t handle = 0;
  int from = -1;
  std::size_t bytes = 0;
};

/// The time at which a send is done. An ordinary one is done when its bytes may be used again, be
/// it that the other rank has gone; it may be so while bytes of it still wait in this process for a
/// next call, which may not come for long; a synchronous one is done only when none do: at the
/// latest when the other side has begun to take it. Who has nothing else to wait for must use that.
enum class SendMode : std::uint8_t { Ordinary, Synchronous };

class PointToPoint {
 public:
  PointToPoint() = default;
  virtual ~PointToPoint() = default;
  PointToPoint(const PointToPoint&) = delete;
  PointToPoint& operator=(const PointToPoint&) = delete;

  /// Returns "mpi", "ucx": what timelines call it.
  [[nodiscard]] virtual std::string_view name() const = 0;
  [[nodiscard]] virtual int rank() const = 0;
  /// Returns the largest tag that messages may carry.
  [[nodiscard]] virtual int largest_tag() const = 0;

  /// Returns how many bytes a message to another host should have at most; what is longer had
  /// better be several messages.
  [[nodiscard]] virtual std::size_t piece_bytes() const {
    return std::numeric_limits<std::size_t>::max();
  }

  /// Sends `bytes`, which stay where and as they are until it is done.
  virtual Posted send(std::span<const std::byte> bytes, int to, int tag, SendMode mode) = 0;
  /// Receives into `bytes`, which stay where they are until it is done. A message that is longer is
  /// an error when it is asked about.
  virtual Posted receive(std::span<std::byte> bytes, int from, int tag) = 0;
  /// Adds to `finished` those of `posted` that are done, which are nothing under way then.
  virtual void test(std::span<Posted> posted, std::vector<Finished>& finished) = 0;
  /// Returns the next message with this tag, from whatever rank, that has come and that nobody has
  /// posted a receive for; none if none has.
  virtual std::optional<Claimed> claim(int tag) = 0;
  /// Receives it into `bytes`, which are as many as it has.
  virtual Posted receive_claimed(const Claimed& claimed, std::span<std::byte> bytes) = 0;
  /// Forgets a message, which may still arrive. Returns whether the wire may go on reading or
  /// writing its bytes: then it is to `keep` them.
  [[nodiscard]] virtual bool drop(Posted& posted) noexcept = 0;
  /// Holds memory for as long as the wire may touch it: until its end is closed, or for ever where
  /// that never is.
  virtual void keep(std::shared_ptr<void> memory) noexcept = 0;
  /// Returns whether the bytes of all sends that are done have left this process. Makes them leave
  /// when it is called again and again.
  virtual bool flush() = 0;
  /// Looks, where a message done at both ends still needs its sender or its receiver to do so.
  virtual void look_again() {}
  [[nodiscard]] virtual bool looks_again() const { return false; }
};

/// Makes one more wire between all ranks, for its own messages. Collective, if the wire says so.
using MakePointToPoint = std::function<std::unique_ptr<PointToPoint>()>;

}  // namespace hvd
