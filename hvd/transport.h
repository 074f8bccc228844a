#pragma once
/// The port through which the domains of a world agree: one rank of each, its leader, sends and receives messages.
/// Called by the leader's driver only. Messages between two leaders arrive whole and in order. Nothing blocks.

#include <optional>
#include <span>

#include "hvd/base/wire.h"

namespace hvd {

struct Message {
  int from = 0;  ///< number of the sending domain
  Bytes bytes;
};

class Transport {
 public:
  virtual ~Transport() = default;
  /// Number of this leader's domain, and of all domains.
  virtual int domain() const = 0;
  virtual int domains() const = 0;
  /// Queues a message; `bytes` may be reused when it returns. Throws BackendError when the wire says no.
  virtual void send(int to, std::span<const std::byte> bytes) = 0;
  /// The next message that has arrived; none if there is none yet.
  virtual std::optional<Message> receive() = 0;
};

}  // namespace hvd
