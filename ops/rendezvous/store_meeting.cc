#include "ops/rendezvous/store_meeting.h"

#include <poll.h>
#include <unistd.h>

#include <array>

#include "hvd/base/text.h"
#include "hvd/negotiation/values/status_wire.h"

namespace hvd {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kMoment = 100ms;
constexpr auto kGraceOfDead = 1s;

/// Sends all of it. Returns whether that went well.
bool send_all(const FileDescriptor& connection, std::span<const std::byte> bytes,
              Deadline deadline) {
  while (!bytes.empty()) {
    const auto sent = send_some(connection, bytes);
    if (!sent || (*sent == 0 && !wait_for(connection, POLLOUT, deadline))) return false;
    bytes = bytes.subspan(*sent);
  }
  return true;
}

enum class Heard { Frame, Nothing, End };

/// Throws WireError for what is no frame.
Heard receive_frame(const FileDescriptor& connection, FrameReader& in, Frame& frame,
                    Deadline deadline) {
  std::array<std::byte, 1 << 14> buffer;
  for (;;) {
    if (auto next = in.next()) {
      frame = std::move(*next);
      return Heard::Frame;
    }
    const auto received = receive_some(connection, buffer);
    if (!received) return Heard::End;
    if (*received > 0) {
      in.add(std::span(buffer).first(*received));
    } else if (!wait_for(connection, POLLIN, deadline)) {
      return Heard::Nothing;
    }
  }
}

void meet(Attempt& attempt, const Hello& hello, const Digest& key, Deadline deadline,
          Deadline patience) {
  using Result = Attempt::Result;
  Frame frame;
  const auto hear = [&](Deadline until) {
    return receive_frame(attempt.connection, attempt.in, frame, until) == Heard::Frame;
  };
  const auto say = [&](FrameKind kind, const Bytes& payload) {
    Bytes said;
    put_frame(said, kind, payload);
    return send_all(attempt.connection, said, deadline);
  };
  if (!hear(deadline)) return;  // it may be busy, or of those that wait
  const Nonce server = read_greeting(frame);
  const Nonce client = make_nonce();
  if (!say(FrameKind::Hello, make_hello(hello, key, server, client)) || !hear(deadline)) return;
  // whoever listens there can say so: only that the key is another is to be heard
  if (frame.kind == FrameKind::Refused) {
    if (Reader(frame.payload).get<Refusal>() == Refusal::WrongKey)
      attempt.result = Result::OtherJob;
    return;
  }
  if (frame.kind != FrameKind::Welcome ||
      !is_same(Reader(frame.payload).get<Digest>(), proof_of_server(key, server, client)))
    return;
  attempt.in.trust();
  if (!say(FrameKind::Here, {}) || !hear(patience)) return;
  Reader reader(frame.payload);
  if (frame.kind == FrameKind::Taken) {
    attempt.result = Result::Welcome;
  } else if (frame.kind == FrameKind::Refused) {
    const auto why = reader.get<Refusal>();
    attempt.text = reader.get_string();
    attempt.result = why == Refusal::Complete ? Result::Complete : Result::Wrong;
  }
}

}  // namespace

Attempt try_to_meet(const SocketAddress& address, const Hello& hello, const Digest& key,
                    Deadline deadline, Deadline patience) {
  Attempt attempt;
  auto connection = connect_to(address, deadline);
  if (!connection) return attempt;
  attempt.connection = std::move(*connection);
  attempt.result = Attempt::Result::Stranger;
  try {
    meet(attempt, hello, key, deadline, patience);
  } catch (const WireError&) {
    attempt.result = Attempt::Result::Stranger;
  }
  return attempt;
}

// ---------------------------------------------------------------------------------- the connection

void StoreMeeting::send(FrameKind kind, std::span<const std::byte> payload) {
  if (!broken_.empty()) throw BackendError(broken_);
  Bytes bytes;
  put_frame(bytes, kind, payload);
  if (send_all(connection_, bytes, Clock::now() + patience_)) return;
  // The server reads at all times. What it has said before it went is still to be heard.
  while (receive()) {
  }
  // it may have half a frame, for the rest of which it would take the next one
  fail({Status::Code::BackendError,
        formatted("rank 0, which holds the ranks' store, takes nothing of what rank {} says",
                  rank_)});
}

std::optional<Frame> StoreMeeting::receive() {
  Frame frame;
  try {
    const Heard heard = receive_frame(connection_, in_, frame, Clock::now() + kMoment);
    if (heard == Heard::Nothing) return std::nullopt;
    if (heard == Heard::End) fail({Status::Code::RankFailed, words_of_dead(0)});
    Reader reader(frame.payload);
    if (frame.kind == FrameKind::Failed) {
      const Status why = decode_status(reader);
      fail(why.ok() ? Status(Status::Code::BackendError, why.text()) : why);
    }
    if (frame.kind == FrameKind::Value) {
      std::string key = reader.get_string();
      values_.insert_or_assign(std::move(key), reader.get_bytes());
    }
  } catch (const WireError& error) {
    fail({Status::Code::BackendError,
          std::string("the ranks' store says what cannot be read: ") + error.what()});
  }
  return frame;
}

void StoreMeeting::look_for_dead() {
  // The store sees connections end. Those of a rank that was forked outlive it, in its children.
  if (!dead_) {
    if (const auto found = peers_.find_dead()) dead_ = {*found, Clock::now() + kGraceOfDead};
  } else if (Clock::now() > dead_->second) {
    fail({Status::Code::RankFailed, words_of_dead(dead_->first)});
  }
}

// ---------------------------------------------------------------------------------- the rendezvous

void StoreMeeting::start(std::unique_ptr<StoreServer>& server, Deadline deadline) {
  for (auto frame = receive(); !frame || frame->kind != FrameKind::Complete; frame = receive())
    if (Clock::now() > deadline)
      fail({Status::Code::BackendError,
            "hvd::init(): rank 0 does not say whether all ranks have come"});
  peers_.watch(allgather(Peers::introduce()), rank_);
  server_ = std::move(server);
}

void StoreMeeting::begin() {
  if (!broken().empty())
    throw BackendError(formatted("hvd::init(): the ranks cannot meet any more: {}", broken()));
  // A gift that somebody no longer waited for lies in the store for ever. No other world may take
  // it for one of its own.
  const std::lock_guard lock(one_at_a_time_);
  world_ = exchanges_;
  gifts_.clear();
}

std::vector<Bytes> StoreMeeting::allgather(const Bytes& mine) {
  const std::lock_guard lock(one_at_a_time_);
  send(FrameKind::Gather, mine);
  auto frame = receive();
  for (; !frame || frame->kind != FrameKind::Gathered; frame = receive())
    if (!frame) look_for_dead();
  std::vector<Bytes> all;
  try {
    Reader reader(frame->payload);
    for (int rank = 0; rank < size_; ++rank) all.push_back(reader.get_bytes());
  } catch (const WireError& error) {
    fail({Status::Code::BackendError,
          std::string("the ranks' store says what cannot be read: ") + error.what()});
  }
  ++exchanges_;
  return all;
}

void StoreMeeting::put(const std::string& key, std::uint32_t takers, const Bytes& bytes) {
  const std::string of_world = formatted("{} {}", world_, key);
  send(FrameKind::Put, Writer().put_string(of_world).put(takers).put_bytes(bytes).bytes());
}

std::optional<Bytes> StoreMeeting::try_take(const std::string& gift) {
  const std::string key = formatted("{} {}", world_, gift);
  if (asked_.insert(key).second) send(FrameKind::Get, Writer().put_string(key).bytes());
  if (!values_.contains(key)) static_cast<void>(receive());
  auto value = values_.extract(key);
  if (value.empty()) return std::nullopt;
  asked_.erase(key);
  return std::move(value.mapped());
}

}  // namespace hvd
