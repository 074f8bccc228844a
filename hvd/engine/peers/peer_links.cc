#include "hvd/engine/peers/peer_links.h"

#include <cstring>

namespace hvd {

namespace {

// with its head, what MPI sends at once (PointToPoint::piece_bytes)
constexpr std::size_t kWirePiece = std::size_t{62} << 10;

}  // namespace

std::size_t PeerLinks::most_bytes(int to) const {
  return is_elsewhere(to) ? kWirePiece : parts_.board->rings().most_bytes();
}

bool PeerLinks::has_room(int to, std::size_t payload_bytes) {
  if (to == parts_.topology.rank || is_elsewhere(to)) return true;
  return !waiting_.contains(to) && parts_.board->rings().has_room(index_of(to), payload_bytes);
}

void PeerLinks::send(int to, PeerFrameHead head, std::span<const std::byte> payload) {
  head.bytes = payload.size();
  if (head.is_small() && !payload.empty()) {
    std::memcpy(head.words.data(), payload.data(), payload.size());
    payload = {};
  }
  if (to == parts_.topology.rank) {
    own_.push_back({head, Bytes(payload.begin(), payload.end())});
  } else if (is_elsewhere(to)) {
    Bytes message(sizeof head + payload.size());
    std::memcpy(message.data(), &head, sizeof head);
    if (!payload.empty()) std::memcpy(message.data() + sizeof head, payload.data(), payload.size());
    elsewhere_.emplace_back(to, share(std::move(message)));
  } else {
    const auto before = waiting_.find(to);
    if (before != waiting_.end()) {
      before->second.push_back({head, Bytes(payload.begin(), payload.end())});
    } else if (parts_.board->rings().put(index_of(to), head, payload)) {
      if (parts_.board->rings().calls(index_of(to), Rings::kForFrames)) ring(index_of(to));
    } else {
      waiting_[to].push_back({head, Bytes(payload.begin(), payload.end())});
      ring(index_of(to));  // whether it waits for frames or not: it is to make room
    }
  }
}

bool PeerLinks::flush() {
  bool any = false;
  for (auto line = waiting_.begin(); line != waiting_.end();) {
    auto& [to, frames] = *line;
    bool put = false;
    while (!frames.empty() &&
           parts_.board->rings().put(index_of(to), frames.front().head, frames.front().payload)) {
      frames.pop_front();
      put = true;
    }
    any = any || put;
    if (put && (!frames.empty() || parts_.board->rings().calls(index_of(to), Rings::kForFrames)))
      ring(index_of(to));
    line = frames.empty() ? waiting_.erase(line) : std::next(line);
  }
  return any;
}

bool PeerLinks::send_elsewhere() {
  bool any = false;
  for (; !elsewhere_.empty(); elsewhere_.pop_front(), any = true) {
    const auto& [to, message] = elsewhere_.front();
    parts_.peers->send(to, message);
    if (parts_.topology.host_of(to) != parts_.topology.host_of(parts_.topology.rank))
      parts_.stats->add(parts_.stats->bytes_to_other_hosts, message->size());
  }
  is_wire_used_ = is_wire_used_ || any;
  return any;
}

bool PeerLinks::has_unsent(const Turn& /*turn*/) {
  if (!elsewhere_.empty()) return true;
  if (is_wire_used_) is_wire_used_ = parts_.peers->has_unsent();
  return is_wire_used_;
}

PeerPayload PeerLinks::payload_of(const PeerFrameHead& head, std::span<const std::byte> payload) {
  if (head.is_small())
    return {std::as_bytes(std::span(head.words)).first(static_cast<std::size_t>(head.bytes)), {}};
  return {payload, {}};
}

PeerFrameHead PeerLinks::head_of(const Message& message) {
  PeerFrameHead head;
  if (message.bytes.size() < sizeof head)
    throw WireError("a message between ranks that is cut off");
  std::memcpy(&head, message.bytes.data(), sizeof head);
  if (message.bytes.size() - sizeof head != head.payload_bytes() || head.kind > PeerFrameKind::Came)
    throw WireError("not a message between ranks");
  return head;
}

/// Wakes a thread of that rank: one that waits, or its coordination thread.
void PeerLinks::ring(int index) {
  parts_.board->bells().ring_waiters();
  parts_.board->bells().ring_worker(index);
}

}  // namespace hvd
