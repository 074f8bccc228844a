#include "hvd/engine/peers/peer_departures.h"

#include <algorithm>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/negotiation/values/departure.h"

namespace hvd {

void PeerDepartures::say(int to, PeerFrameKind what) {
  PeerFrameHead head;
  head.kind = what;
  links_.send(to, head);
}

bool PeerDepartures::note(int rank) {
  if (rank == parts_.topology.rank ||
      std::exchange(peers_[static_cast<std::size_t>(rank)].left, true))
    return false;
  ++left_;
  return true;
}

void PeerDepartures::ask_for(const PeerInbox& inbox) {
  if (left_ == 0 || inbox.posted().empty()) return;
  for (int rank = 0; rank < parts_.topology.size; ++rank) {
    if (!peer(rank).left || peer(rank).asked) continue;
    const bool is_awaited = std::ranges::any_of(inbox.posted(), [&](const auto& one) {
      const int awaited = one.second.call.peer;
      return awaited == kAnyPeer || awaited == rank;
    });
    if (is_awaited) ask(rank);
  }
}

void PeerDepartures::ask(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.left && !std::exchange(peer.asked, true)) say(rank, PeerFrameKind::AskLeft);
}

bool PeerDepartures::hear(int rank) {
  if (std::exchange(peers_[static_cast<std::size_t>(rank)].gone, true)) return false;
  if (rank != parts_.topology.rank) ++gone_;
  return true;
}

bool PeerDepartures::is_hopeless(int rank) const {
  if (rank != kAnyPeer) return peer(rank).gone;
  return gone_ + 1 == parts_.topology.size && (gone_ > 0 || peer(parts_.topology.rank).gone);
}

Status PeerDepartures::nothing_comes(const PeerCall& receive) const {
  const std::string who =
      receive.peer == kAnyPeer ? "all other ranks have" : formatted("rank {} has", receive.peer);
  return departure(parts_.world, formatted("{}: {}", describe(receive, false), who),
                   "called hvd::shutdown()", " without sending it");
}

void PeerDepartures::leave() {
  is_over_ = true;
  say(parts_.topology.rank, PeerFrameKind::Left);
  for (int rank = 0; rank < parts_.topology.size; ++rank)
    if (peer(rank).asks) say(rank, PeerFrameKind::Left);
}

void PeerDepartures::answer(int rank) {
  peers_[static_cast<std::size_t>(rank)].asks = true;
  if (is_over_) say(rank, PeerFrameKind::Left);
}

Status PeerDepartures::nothing_is_received() const {
  return departure(parts_.world, formatted("rank {} has", parts_.topology.rank),
                   "called hvd::shutdown()", " and receives nothing more");
}

}  // namespace hvd
