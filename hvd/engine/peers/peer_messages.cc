#include "hvd/engine/peers/peer_messages.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "hvd/negotiation/values/status_wire.h"
#include "hvd/routes.h"

namespace hvd {

namespace {

constexpr std::uint64_t kNoLocation = std::numeric_limits<std::uint64_t>::max();
// that are got at once, before others have their turn
constexpr std::size_t kPartBytes = std::size_t{4} << 20;
constexpr std::size_t kWindow = 16;  // chunks under way at once

/// The bytes that an eager message counts for.
std::uint64_t cost_of(std::size_t bytes) { return sizeof(PeerFrameHead) + bytes; }

PeerFrameHead answer(PeerFrameKind kind, std::uint64_t id, std::uint64_t word = 0) {
  PeerFrameHead head;
  head.kind = kind;
  head.id = id;
  head.words[0] = word;
  return head;
}

std::shared_ptr<HandleState> make_state() {
  auto state = std::make_shared<HandleState>();
  state->is_message = true;
  return state;
}

std::span<const std::byte> bytes_of(const PeerCall& call) {
  return {static_cast<const std::byte*>(call.input), call.bytes()};
}

/// Returns whether the message is what the recv expects.
bool fits(const PeerFrameHead& head, const PeerCall& call) {
  return head.dtype == call.dtype && head.count == call.count;
}

PeerPayload payload_of(const PeerArrival& arrival) { return {arrival.payload, {}}; }

}  // namespace

PeerMessages::PeerMessages(const EngineParts& parts, EngineMutex& mutex)
    : parts_(parts),
      mutex_(mutex),
      links_(parts),
      attention_(parts),
      departures_(parts, links_),
      meetings_(parts, links_, attention_, departures_),
      credits_(static_cast<std::size_t>(parts.topology.size)) {
  for (const auto& backend : parts.backends)
    if (exposed_ == nullptr) exposed_ = backend->exposed_memory();
}

// ------------------------------------------------------------------------------------------- calls

std::shared_ptr<HandleState> PeerMessages::send(PeerCall call) {
  const int to = call.peer;
  const std::size_t bytes = call.bytes();
  Credit& credit = credits_[static_cast<std::size_t>(to)];
  PeerFrameHead head;
  head.dtype = call.dtype;
  head.tag = call.tag;
  head.count = call.count;
  // One that has left has no recv but those that are pending: it is asked whether there is one.
  const std::uint64_t together = credit.sent - credit.taken + cost_of(bytes);
  if (!departures_.has_left(to) &&
      routes::is_eager(bytes, static_cast<std::size_t>(together), links_.most_bytes(to))) {
    credit.sent += cost_of(bytes);
    links_.send(to, head, bytes_of(call));
    if (call.keep_alive) mutex_.destroy(std::move(call.keep_alive));
    update();
    return nullptr;
  }
  Send send;
  send.call = std::move(call);
  send.pending = make_state();
  const bool fed = routes::is_fed(bytes, send.call.waits, parts_.topology.has_core());
  if (exposed_ != nullptr && !links_.is_elsewhere(to) && bytes > 0)
    send.location = exposed_->expose(send.call.input, bytes, fed);
  head.kind = PeerFrameKind::Offer;
  head.id = ++numbers_;
  head.words[0] = send.location.value_or(kNoLocation);
  const auto pending = send.pending;
  count_open(send.call, 1);
  sends_.emplace(head.id, std::move(send));
  links_.send(to, head);
  update();
  return pending;
}

std::shared_ptr<HandleState> PeerMessages::receive(PeerCall call, int& from) {
  PeerReceive receive;
  receive.call = std::move(call);
  const auto arrival = inbox_.take_arrival(receive.call.tag, receive.call.peer);
  if (arrival && arrival->head.kind == PeerFrameKind::Eager && fits(arrival->head, receive.call)) {
    from = arrival->from;
    payload_of(*arrival).copy_to(receive.call.output);
    count_taken(from, arrival->head);
    if (receive.call.keep_alive) mutex_.destroy(std::move(receive.call.keep_alive));
    update();
    return nullptr;
  }
  receive.pending = make_state();
  auto pending = receive.pending;
  count_open(receive.call, 1);
  if (arrival) {
    meet(std::move(receive), arrival->from, arrival->head, payload_of(*arrival));
  } else if (departures_.is_hopeless(receive.call.peer)) {
    end(*pending, receive.call, departures_.nothing_comes(receive.call));
  } else {
    inbox_.post(std::move(receive));
    departures_.ask_for(inbox_);
  }
  update();
  return pending;
}

void PeerMessages::count_open(const PeerCall& call, int by) {
  const bool elsewhere =
      parts_.peers != nullptr && (call.peer == kAnyPeer || links_.is_elsewhere(call.peer));
  attention_.count_open(elsewhere, by);
}

// ----------------------------------------------------------------------------------------- driving

bool PeerMessages::advance(EngineLock& lock, bool copies) {
  const auto taking = [this](int from, const PeerFrameHead& head, const PeerPayload& payload)
                          HVD_NO_THREAD_SAFETY_ANALYSIS { take(from, head, payload); };
  bool any = false;
  do {
    any = links_.receive(taking) || any;
    any = links_.flush() || any;
    any = feed_all() || any;
    any = (copies && copy_some(lock)) || any;
  } while (update());
  return any;
}

bool PeerMessages::exchange(const Turn& turn) {
  const bool any =
      links_.exchange(turn, [this](int from, const PeerFrameHead& head, const PeerPayload& payload)
                                HVD_NO_THREAD_SAFETY_ANALYSIS { take(from, head, payload); });
  return update() || any;
}

/// Returns whether this rank is rung for more than before: it must look again.
bool PeerMessages::update() {
  attention_.set_work(!copies_.empty() || !fed_.empty() || links_.has_waiting() ||
                      links_.has_own());
  return attention_.update(!fed_.empty() || links_.has_waiting());
}

void PeerMessages::take(int from, const PeerFrameHead& head, const PeerPayload& payload) {
  switch (head.kind) {
    case PeerFrameKind::Eager:
    case PeerFrameKind::Offer: return arrived(from, head, payload);
    case PeerFrameKind::Chunk: return chunk_came(head, payload);
    case PeerFrameKind::Want:
    case PeerFrameKind::Got:
    case PeerFrameKind::Taken:
    case PeerFrameKind::Refused: return take_answer(head, payload);
    case PeerFrameKind::Credit:
      credits_[static_cast<std::size_t>(from)].taken = head.words[0];
      return;
    case PeerFrameKind::AskLeft: return departures_.answer(from);
    case PeerFrameKind::Left:
      if (departures_.hear(from)) end_those_of_gone();
      return;
    case PeerFrameKind::Came: return meetings_.hear(from, head.words[0]);
  }
}

// --------------------------------------------------------------------- where message and recv meet

void PeerMessages::arrived(int from, const PeerFrameHead& head, const PeerPayload& payload) {
  if (auto receive = inbox_.take_posted(head.tag, from))
    return meet(std::move(*receive), from, head, payload);
  if (departures_.is_over()) {
    if (head.kind == PeerFrameKind::Eager) return count_taken(from, head);
    return refuse(from, head.id, departures_.nothing_is_received());
  }
  Bytes kept(payload.size());
  payload.copy_to(kept.data());
  inbox_.keep({from, head, std::move(kept)});
}

void PeerMessages::meet(PeerReceive receive, int from, const PeerFrameHead& head,
                        const PeerPayload& payload) {
  const bool is_offer = head.kind == PeerFrameKind::Offer;
  PeerCall& call = receive.call;
  receive.from = from;
  receive.pending->value = from;
  if (!is_offer) count_taken(from, head);
  if (!fits(head, call)) {
    Status status{Status::Code::Mismatch,
                  formatted("message from rank {} to rank {} with tag {}: sent: {} elements of {}; "
                            "to be received: {} of {}",
                            from, parts_.topology.rank, head.tag, head.count, name_of(head.dtype),
                            call.count, name_of(call.dtype))};
    if (is_offer) refuse(from, head.id, status);
    return end(*receive.pending, call, std::move(status));
  }
  if (!is_offer || call.bytes() == 0) {
    if (is_offer) links_.send(from, answer(PeerFrameKind::Taken, head.id));
    payload.copy_to(call.output);
    return end(*receive.pending, call, {});
  }
  receive.send = head.id;
  receive.since = Clock::now();
  const std::uint64_t number = ++numbers_;
  if (head.words[0] != kNoLocation) {
    receive.location = head.words[0];
    copies_.push_back(number);
  } else {
    links_.send(from, answer(PeerFrameKind::Want, head.id, number));
  }
  receives_.emplace(number, std::move(receive));
}

/// Counts what has been received of the rank's eager messages, and tells it now and then.
void PeerMessages::count_taken(int from, const PeerFrameHead& head) {
  Credit& credit = credits_[static_cast<std::size_t>(from)];
  credit.received += cost_of(static_cast<std::size_t>(head.count) * element_bytes(head.dtype));
  if (credit.received - credit.told < limit(Limit::EagerTogetherBytes) / 4) return;
  credit.told = credit.received;
  links_.send(from, answer(PeerFrameKind::Credit, 0, credit.received));
}

void PeerMessages::refuse(int from, std::uint64_t send, const Status& why) {
  links_.send(from, answer(PeerFrameKind::Refused, send), to_wire(why));
}

// ------------------------------------------------------------------------------- what is under way

void PeerMessages::take_answer(const PeerFrameHead& head, const PeerPayload& payload) {
  const auto found = sends_.find(head.id);
  if (found == sends_.end()) return;  // it has ended, with the world
  Send& send = found->second;
  if (head.kind == PeerFrameKind::Taken) return end_send(found, {});
  if (head.kind == PeerFrameKind::Refused) {
    Bytes bytes(payload.size());
    payload.copy_to(bytes.data());
    Reader reader(bytes);
    return end_send(found, decode_status(reader));
  }
  if (head.kind == PeerFrameKind::Got) {
    send.got = static_cast<std::size_t>(head.words[0]);
  } else {
    send.receive = head.words[0];
  }
  fed_.insert(head.id);  // goes on in `feed_all`
}

/// Sends chunks as long as there is room. Returns whether there was.
bool PeerMessages::feed(Send& send) {
  const int to = send.call.peer;
  const auto bytes = bytes_of(send.call);
  const std::size_t chunk = links_.chunk_bytes(to);
  bool any = false;
  while (send.sent < bytes.size()) {
    const auto next = bytes.subspan(send.sent, std::min(chunk, bytes.size() - send.sent));
    if (!links_.is_bounded(to) && send.sent + next.size() > send.got + kWindow * chunk) break;
    if (!links_.has_room(to, next.size())) break;
    links_.send(to, answer(PeerFrameKind::Chunk, send.receive), next);
    send.sent += next.size();
    any = true;
  }
  return any;
}

bool PeerMessages::feed_all() {
  bool any = false;
  for (auto id = fed_.begin(); id != fed_.end();) {
    Send& send = sends_.at(*id);
    any = feed(send) || any;
    // What waits for the receiver's word comes back with it.
    const bool waits_for_room = links_.is_bounded(send.call.peer) && send.sent < send.call.bytes();
    id = waits_for_room ? std::next(id) : fed_.erase(id);
  }
  return any;
}

void PeerMessages::chunk_came(const PeerFrameHead& head, const PeerPayload& payload) {
  const auto found = receives_.find(head.id);
  if (found == receives_.end()) return;  // it has ended, with the world
  PeerReceive& receive = found->second;
  if (payload.size() > receive.call.bytes() - receive.got)
    throw WireError("more of a message than there is");
  payload.copy_to(static_cast<std::byte*>(receive.call.output) + receive.got);
  receive.got += payload.size();
  receive.since = Clock::now();
  if (receive.got == receive.call.bytes()) {
    links_.send(receive.from, answer(PeerFrameKind::Taken, receive.send));
    end_receive(found, {});
  } else if (!links_.is_bounded(receive.from)) {
    links_.send(receive.from, answer(PeerFrameKind::Got, receive.send, receive.got));
  }
}

/// Gets a part of a message out of its sender's memory, without the mutex. Returns whether it has.
bool PeerMessages::copy_some(EngineLock& lock) HVD_NO_THREAD_SAFETY_ANALYSIS {
  if (copies_.empty()) return false;
  const std::uint64_t number = copies_.front();
  copies_.pop_front();
  const auto found = receives_.find(number);
  PeerReceive& receive = found->second;  // stays where it is: nobody ends what is busy
  receive.is_busy = true;
  const std::size_t bytes = std::min(kPartBytes, receive.call.bytes() - receive.got);
  auto* const to = static_cast<std::byte*>(receive.call.output) + receive.got;
  bool is_there = false;
  Status failure;
  lock.unlock();
  try {
    is_there =
        exposed_->get(links_.index_of(receive.from), *receive.location, receive.got, to, bytes);
  } catch (...) {
    failure = status_of_current_exception();
  }
  lock.lock();
  receive.is_busy = false;
  // of a world that has failed, in which the sender has its memory back, perhaps
  if (failure.ok()) failure = parts_.board->failure();
  if (!receive.doomed.ok()) {
    end_receive(found, receive.doomed);
  } else if (!failure.ok()) {
    failure.raise();
  } else if (is_there) {  // else the process has ended: the world is about to fail
    receive.got += bytes;
    receive.since = Clock::now();
    if (receive.got < receive.call.bytes()) {
      copies_.push_back(number);
    } else {
      links_.send(receive.from, answer(PeerFrameKind::Taken, receive.send));
      end_receive(found, {});
    }
  }
  return is_there;
}

// -------------------------------------------------------------------------------------------- ends

void PeerMessages::end(HandleState& pending, PeerCall& call, Status status) {
  count_open(call, -1);
  ++ended_;
  mutex_.continuations().keep(pending, call.keep_alive);
  if (call.keep_alive) mutex_.destroy(std::move(call.keep_alive));
  pending.status = std::move(status);
  pending.done.store(true, std::memory_order_release);
  mutex_.continuations().post(pending);
  mutex_.wake_own_threads();
}

void PeerMessages::end_send(Sends::iterator send, Status status) {
  if (send->second.location) exposed_->withdraw(*send->second.location);
  fed_.erase(send->first);
  Send ended = std::move(send->second);
  sends_.erase(send);
  end(*ended.pending, ended.call, std::move(status));
}

void PeerMessages::end_receive(Receives::iterator receive, Status status) {
  PeerReceive ended = std::move(receive->second);
  receives_.erase(receive);
  end(*ended.pending, ended.call, std::move(status));
}

void PeerMessages::fail_all(const Status& how) {
  for (auto& receive : inbox_.take_posted_if([](int) { return true; }))
    end(*receive.pending, receive.call, how);
  while (!sends_.empty()) end_send(sends_.begin(), how);
  copies_.clear();
  for (auto receive = receives_.begin(); receive != receives_.end();) {
    const auto next = std::next(receive);
    if (receive->second.is_busy) {
      receive->second.doomed = how;
    } else {
      end_receive(receive, how);
    }
    receive = next;
  }
  update();
}

void PeerMessages::leave() {
  for (const auto& one : inbox_.take_arrivals()) {
    if (one.head.kind == PeerFrameKind::Eager) {
      count_taken(one.from, one.head);
    } else {
      refuse(one.from, one.head.id, departures_.nothing_is_received());
    }
  }
  departures_.leave();
  attention_.count_open(true, 1);  // the others, to whom this rank still answers, ring for it
  update();
}

void PeerMessages::note_left(int rank) {
  if (!departures_.note(rank)) return;
  departures_.ask_for(inbox_);
  update();
}

void PeerMessages::end_those_of_gone() {
  const auto is_one = [this](int peer)
                          HVD_NO_THREAD_SAFETY_ANALYSIS { return departures_.is_hopeless(peer); };
  for (auto& receive : inbox_.take_posted_if(is_one))
    end(*receive.pending, receive.call, departures_.nothing_comes(receive.call));
}

}  // namespace hvd
