#pragma once
/// Transport is the port through which the domains of a world agree: one rank of each, its leader,
/// sends and receives messages. Ranks that share no memory send each other theirs through another
/// one, to which each rank is a domain. Only the thread that has the turn calls it. Messages
/// between two leaders arrive whole and in order. Nothing blocks.
// Tested in tests/ops/p2p/transport_test.cc

#include <optional>

#include "hvd/base/wire.h"

#pragma GCC visibility push(default)
namespace hvd {

/// A Message is what a leader has sent, whole.
struct Message {
  int from = 0;  ///< number of the sending domain
  Bytes bytes;   ///< what it says
};

/// A Transport sends and receives for one leader. It owns the messages under way.
class Transport {
 public:
  virtual ~Transport() = default;
  /// Returns the number of this leader's domain, from 0.
  virtual int domain() const = 0;
  /// Returns the number of domains.
  virtual int domains() const = 0;
  /// Queues a message, which is kept until it has left. Throws BackendError when the wire says no.
  virtual void send(int to, SharedBytes message) = 0;
  /// Returns the next message that has arrived; none if there is none yet. Throws BackendError when
  /// the wire says no.
  virtual std::optional<Message> receive() = 0;
  /// Returns whether something that was sent is still here, and leaves only while this or `receive`
  /// is called again and again.
  [[nodiscard]] virtual bool has_unsent() { return false; }
};

}  // namespace hvd
#pragma GCC visibility pop
