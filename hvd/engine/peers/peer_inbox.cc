#include "hvd/engine/peers/peer_inbox.h"

#include <algorithm>

#include "hvd/base/text.h"

namespace hvd {

std::string describe(const PeerCall& call, bool is_send) {
  const std::string who = call.peer == kAnyPeer ? "any rank" : formatted("rank {}", call.peer);
  return formatted("{} {} with tag {}", is_send ? "send to" : "recv from", who, call.tag);
}

void PeerInbox::post(PeerReceive receive) {
  const Key key{receive.call.tag, receive.call.peer, ++numbers_};
  if (spare_.empty()) {
    posted_.emplace(key, std::move(receive));
  } else {
    spare_.key() = key;
    spare_.mapped() = std::move(receive);
    posted_.insert(std::move(spare_));
  }
}

std::optional<PeerReceive> PeerInbox::take_posted(int tag, int from) {
  if (posted_.empty()) return std::nullopt;
  const auto first_for = [&](int peer) {
    const auto found = posted_.lower_bound({tag, peer, 0});
    return found != posted_.end() && std::get<0>(found->first) == tag &&
                   std::get<1>(found->first) == peer
               ? found
               : posted_.end();
  };
  auto found = first_for(from);
  const auto any = first_for(kAnyPeer);
  if (found == posted_.end() ||
      (any != posted_.end() && std::get<2>(any->first) < std::get<2>(found->first)))
    found = any;
  if (found == posted_.end()) return std::nullopt;
  spare_ = posted_.extract(found);
  return std::move(spare_.mapped());
}

void PeerInbox::keep(PeerArrival arrival) {
  const Key key{arrival.head.tag, arrival.from, ++numbers_};
  arrivals_.emplace(key, std::move(arrival));
}

std::optional<PeerArrival> PeerInbox::take_arrival(int tag, int from) {
  if (arrivals_.empty()) return std::nullopt;
  auto best = arrivals_.end();
  // From the first message of one rank to that of the next.
  for (auto at = arrivals_.lower_bound({tag, std::max(from, 0), 0});
       at != arrivals_.end() && std::get<0>(at->first) == tag;
       at = arrivals_.lower_bound({tag, std::get<1>(at->first) + 1, 0})) {
    if (from != kAnyPeer && std::get<1>(at->first) != from) break;
    if (best == arrivals_.end() || std::get<2>(at->first) < std::get<2>(best->first)) best = at;
    if (from != kAnyPeer) break;
  }
  if (best == arrivals_.end()) return std::nullopt;
  PeerArrival taken = std::move(best->second);
  arrivals_.erase(best);
  return taken;
}

std::vector<PeerArrival> PeerInbox::take_arrivals() {
  std::vector<PeerArrival> taken;
  for (auto& [key, arrival] : std::exchange(arrivals_, {})) taken.push_back(std::move(arrival));
  return taken;
}

}  // namespace hvd
