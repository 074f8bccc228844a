#include "ops/p2p/transport.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "hvd/errors.h"

namespace hvd {

namespace {

constexpr int kTag = 0;

/// Forgets a message that is being received.
void forget(PointToPoint& wire, Posted& posted, Bytes& bytes) noexcept {
  if (!wire.drop(posted)) return;
  try {
    wire.keep(std::make_shared<Bytes>(std::move(bytes)));
  } catch (const std::bad_alloc&) {
    static_cast<void>(0);  // nothing was moved, and nothing can be done
  }
}

}  // namespace

P2pTransport::P2pTransport(std::unique_ptr<PointToPoint> wire, std::vector<int> leaders,
                           std::vector<int> domain_of_rank, int domain)
    : wire_(std::move(wire)),
      leaders_(std::move(leaders)),
      domain_of_rank_(std::move(domain_of_rank)),
      domain_(domain) {}

P2pTransport::~P2pTransport() {
  for (auto& out : outgoing_)
    if (wire_->drop(out.posted)) wire_->keep(std::const_pointer_cast<Bytes>(out.message));
  for (auto& in : incoming_) forget(*wire_, in.posted, in.message.bytes);
}

void P2pTransport::send(int to, SharedBytes message) {
  reap();
  Outgoing& out = outgoing_.emplace_back();
  out.message = std::move(message);
  try {
    out.posted = wire_->send(*out.message, leaders_.at(static_cast<std::size_t>(to)), kTag,
                             SendMode::Ordinary);
  } catch (...) {
    outgoing_.pop_back();
    throw;
  }
}

bool P2pTransport::is_done(Posted& posted) {
  finished_.clear();
  wire_->test({&posted, 1}, finished_);
  return !finished_.empty();
}

void P2pTransport::reap() {
  // Almost always the oldest are done first; one that is not only delays the freeing of others.
  while (!outgoing_.empty() && is_done(outgoing_.front().posted)) outgoing_.pop_front();
}

void P2pTransport::look_for_arrivals() {
  while (const auto claimed = wire_->claim(kTag)) {
    Incoming& in = incoming_.emplace_back();
    in.message.from = domain_of_rank_.at(static_cast<std::size_t>(claimed->from));
    in.message.bytes.resize(claimed->bytes);
    in.posted = wire_->receive_claimed(*claimed, in.message.bytes);
  }
}

std::optional<Message> P2pTransport::receive() {
  reap();
  look_for_arrivals();
  std::vector<int> held_back;
  for (auto in = incoming_.begin(); in != incoming_.end(); ++in) {
    if (std::find(held_back.begin(), held_back.end(), in->message.from) != held_back.end())
      continue;
    if (is_done(in->posted)) {
      Message message = std::move(in->message);
      incoming_.erase(in);
      return message;
    }
    held_back.push_back(in->message.from);
  }
  return std::nullopt;
}

bool P2pTransport::has_unsent() {
  reap();
  return !outgoing_.empty() || !wire_->flush();
}

bool P2pTransport::drain(std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (true) {
    reap();
    if (outgoing_.empty() && wire_->flush()) return true;
    if (std::chrono::steady_clock::now() > deadline) return false;
    try {
      look_for_arrivals();  // two leaders that drain at once take each other's
    } catch (const RankFailed&) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace hvd
