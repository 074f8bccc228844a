#pragma once
/// PeerDepartures are the ranks that have left (called shutdown()), as far as messages go. What
/// such a rank has sent may still be under way: who waits for a message of it asks it to say that
/// it has left behind all that it has sent. Once it has, no message of it follows. Under the
/// engine's mutex. Nothing fails.
// Tested in tests/hvd/engine/peer_messages_test.cc

#include <vector>

#include "hvd/engine/core/parts.h"
#include "hvd/engine/peers/peer_inbox.h"
#include "hvd/engine/peers/peer_links.h"

namespace hvd {

class PeerDepartures {
 public:
  PeerDepartures(const EngineParts& parts, PeerLinks& links)
      : parts_(parts), links_(links), peers_(static_cast<std::size_t>(parts.topology.size)) {}

  /// The rank has left, as all ranks are told. Returns false if that was known.
  bool note(int rank) HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool has_left(int rank) const HVD_REQUIRES(engine_mutex) { return peer(rank).left; }
  /// Asks those that have left, and that one of the recvs waits for.
  void ask_for(const PeerInbox& inbox) HVD_REQUIRES(engine_mutex);
  /// Asks this one, if it has left and was not asked.
  void ask(int rank) HVD_REQUIRES(engine_mutex);
  /// The rank has said that it has left behind all that it has sent. Returns whether that is new.
  bool hear(int rank) HVD_REQUIRES(engine_mutex);
  /// Returns whether no message of that rank, or of any, can come any more.
  [[nodiscard]] bool is_hopeless(int rank) const HVD_REQUIRES(engine_mutex);
  /// Returns why such a recv fails.
  [[nodiscard]] Status nothing_comes(const PeerCall& receive) const;

  /// This rank has left: tells itself, and those that have asked, or will ask.
  void leave() HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool is_over() const HVD_REQUIRES(engine_mutex) { return is_over_; }
  /// The rank asks whether this one has left.
  void answer(int rank) HVD_REQUIRES(engine_mutex);
  /// Returns why this rank, which has left, receives a message no more.
  [[nodiscard]] Status nothing_is_received() const;

 private:
  struct Peer {
    bool left = false, asked = false, gone = false;  ///< gone: and no message of it follows
    bool asks = false;                               ///< whether this rank has left
  };
  [[nodiscard]] const Peer& peer(int rank) const HVD_REQUIRES(engine_mutex) {
    return peers_[static_cast<std::size_t>(rank)];
  }
  void say(int to, PeerFrameKind what) HVD_REQUIRES(engine_mutex);

  const EngineParts& parts_;
  PeerLinks& links_;
  std::vector<Peer> peers_ HVD_GUARDED_BY(engine_mutex);  ///< by rank
  int left_ HVD_GUARDED_BY(engine_mutex) = 0;             ///< other ranks that have left
  int gone_ HVD_GUARDED_BY(engine_mutex) = 0;  ///< those of them with nothing more to say
  bool is_over_ HVD_GUARDED_BY(engine_mutex) = false;
};

}  // namespace hvd
