#pragma once
/// The callers of send and recv (hvd/engine/peers/peer_messages.h): checks what they give, starts
/// it, and waits for it: first by looking at the rings, which needs neither the turn nor a wake-up,
/// then as for any operation. Any thread. Throws as hvd/hvd.h says.
// Tested in tests/hvd/engine/peer_messages_test.cc

#include <chrono>
#include <memory>
#include <vector>

#include "hvd/base/waits.h"
#include "hvd/engine/core/engine_lock.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/peers/peer_messages.h"
#include "hvd/engine/progress/progress_loop.h"
#include "hvd/engine/progress/submitter.h"

namespace hvd {

class PeerCalls {
 public:
  PeerCalls(const EngineParts& parts, EngineMutex& mutex, Submitter& submitter,
            PeerMessages& messages, ProgressLoop& loop)
      : parts_(parts),
        board_(*parts.board),
        mutex_(mutex),
        submitter_(submitter),
        messages_(messages),
        loop_(loop),
        short_wait_(parts.topology.has_core()) {}

  /// Sends, and waits until the memory may be used again.
  void send(PeerCall call);
  /// Receives, and returns the rank that the message came from.
  int receive(PeerCall call);
  /// Do the same without waiting; of a recv `value` is the rank then.
  std::shared_ptr<HandleState> start_send(PeerCall call);
  std::shared_ptr<HandleState> start_receive(PeerCall call);
  /// Comes to the next meeting, and waits until all ranks have, or the time is over. Returns those
  /// that have not come. Throws what has ended the world.
  std::vector<int> meet(std::chrono::nanoseconds time);
  /// Gives the other ranks a moment for a send or recv that has been started.
  void await(const HandleState& pending);

 private:
  void check(const PeerCall& call, bool is_send) const;
  [[nodiscard]] bool may_be_elsewhere(const PeerCall& receive) const {
    return parts_.peers != nullptr && (receive.peer == kAnyPeer || !parts_.is_here(receive.peer));
  }
  bool begin_to_look(bool is_elsewhere) HVD_REQUIRES(engine_mutex);
  void end_to_look();
  void look(const HandleState& pending);
  bool advance(const HandleState* pending, bool copies = true);
  void finish(HandleState& pending, bool looks);
  void begin(const HandleState* pending, bool is_elsewhere);

  const EngineParts& parts_;
  Board& board_;
  EngineMutex& mutex_;
  Submitter& submitter_;
  PeerMessages& messages_;
  ProgressLoop& loop_;
  ShortWait short_wait_;
};

}  // namespace hvd
