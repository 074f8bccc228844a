#pragma once
/// A PeerInbox is where messages and recvs of one rank meet: recvs that no message has come for,
/// and messages that no recv has asked for. Of one tag, a message is for the first recv that takes
/// messages of its sender, and a recv takes the first message. A value without a lock; nothing
/// fails.
// Tested in tests/hvd/engine/peer_messages_test.cc

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "hvd/base/wire.h"
#include "hvd/engine/core/parts.h"
#include "hvd/negotiation/values/peer_frames.h"
#include "hvd/options.h"
#include "hvd/submission.h"
#include "hvd/types.h"

namespace hvd {

/// One send or recv, as a caller gives it. A value.
struct PeerCall {
  const void* input = nullptr;  ///< send: the elements
  void* output = nullptr;       ///< recv: where they go
  DataType dtype = DataType::Float32;
  std::int64_t count = 0;  ///< of elements
  int peer = kAnyPeer;     ///< a global rank
  int tag = 0;
  std::shared_ptr<void> keep_alive = {};  ///< owns the memory for as long as it is in use
  bool waits = false;                     ///< send: the caller does nothing else meanwhile

  [[nodiscard]] std::size_t bytes() const {
    return static_cast<std::size_t>(count) * element_bytes(dtype);
  }
};

/// Returns what words call it: "recv from rank 2 with tag 7".
[[nodiscard]] std::string describe(const PeerCall& call, bool is_send);

/// A recv that is not done.
struct PeerReceive {
  PeerCall call;
  std::shared_ptr<HandleState> pending;
  int from = kAnyPeer;                    ///< once it has met a message
  std::uint64_t send = 0;                 ///< of the sender
  std::optional<std::uint64_t> location;  ///< at which the message lies
  std::size_t got = 0;                    ///< bytes
  bool is_busy = false;                   ///< a thread copies, without the mutex
  Status doomed;                          ///< what it is to end with then
  /// `since`: it was called, or it has met its message, or some of that has come last.
  Clock::time_point since = Clock::now(), reported = since;
};

/// A message that no recv has met yet.
struct PeerArrival {
  int from = 0;
  PeerFrameHead head;
  Bytes payload;
};

class PeerInbox {
 public:
  /// Adds a recv, behind all others.
  void post(PeerReceive receive);
  /// Takes out the first recv for a message of this tag and rank.
  [[nodiscard]] std::optional<PeerReceive> take_posted(int tag, int from);
  /// Takes out those for which `is_one(peer)` holds.
  template <class IsOne>
  [[nodiscard]] std::vector<PeerReceive> take_posted_if(const IsOne& is_one) {
    std::vector<PeerReceive> taken;
    for (auto one = posted_.begin(); one != posted_.end();) {
      const bool takes = is_one(one->second.call.peer);
      if (takes) taken.push_back(std::move(one->second));
      one = takes ? posted_.erase(one) : std::next(one);
    }
    return taken;
  }
  [[nodiscard]] const auto& posted() const { return posted_; }
  [[nodiscard]] auto& posted() { return posted_; }

  /// Adds a message, behind all others.
  void keep(PeerArrival arrival);
  /// Takes out the first message of this tag and rank, or any.
  [[nodiscard]] std::optional<PeerArrival> take_arrival(int tag, int from);
  /// Takes out all of them.
  [[nodiscard]] std::vector<PeerArrival> take_arrivals();

 private:
  /// By tag, rank or kAnyPeer, and number.
  using Key = std::tuple<int, int, std::uint64_t>;
  std::map<Key, PeerReceive> posted_;
  std::map<Key, PeerReceive>::node_type spare_;  ///< of the last that was taken out, for its memory
  std::map<Key, PeerArrival> arrivals_;
  std::uint64_t numbers_ = 0;
};

}  // namespace hvd
