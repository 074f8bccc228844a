#include "ops/rendezvous/client.h"

#include <poll.h>

#include <array>
#include <utility>

namespace hvd {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kMoment = 100ms;

/// Sends all of it. Returns whether that went well.
bool send_all(const FileDescriptor& connection, std::span<const std::byte> bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const auto sent = send_some(connection, bytes);
    if (!sent || (*sent == 0 && !wait_for(connection, POLLOUT, deadline))) return false;
    bytes = bytes.subspan(*sent);
  }
  return true;
}

enum class Heard { Frame, Nothing, End };

/// Throws WireError for what is no frame.
Heard receive_frame(const FileDescriptor& connection, FrameReader& in, Frame& frame, Deadline deadline) {
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

void meet(Attempt& attempt, const Hello& hello, const Digest& key, Deadline deadline, Deadline patience) {
  using Result = Attempt::Result;
  Frame frame;
  const auto hear = [&](Deadline until) { return receive_frame(attempt.connection, attempt.in, frame, until) == Heard::Frame; };
  const auto say = [&](FrameKind kind, const Bytes& payload) {
    Bytes said;
    put_frame(said, kind, payload);
    return send_all(attempt.connection, said, deadline);
  };
  if (!hear(deadline)) return;  // it may be busy, or of those that wait
  const Nonce server = read_greeting(frame);
  const Nonce client = make_nonce();
  if (!say(FrameKind::Hello, make_hello(hello, key, server, client)) || !hear(deadline)) return;
  if (frame.kind == FrameKind::Refused) {  // whoever listens there can say so: only that the key is another is to be heard
    if (Reader(frame.payload).get<Refusal>() == Refusal::WrongKey) attempt.result = Result::OtherJob;
    return;
  }
  if (frame.kind != FrameKind::Welcome || !is_same(Reader(frame.payload).get<Digest>(), proof_of_server(key, server, client))) return;
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

Attempt try_to_meet(const SocketAddress& address, const Hello& hello, const Digest& key, Deadline deadline, Deadline patience) {
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

StoreClient::StoreClient(Attempt made) : connection_(std::move(made.connection)), in_(std::move(made.in)) {}

void StoreClient::fail(const Status& status) {
  broken_ = status.text();
  status.raise();
  throw BackendError(broken_);
}

void StoreClient::fail_lost() {
  fail({Status::Code::RankFailed, "rank 0 has ended while others wait for it in hvd::init() or hvd::shutdown()"});
}

void StoreClient::send(FrameKind kind, std::span<const std::byte> payload) {
  if (!broken_.empty()) throw BackendError(broken_);
  Bytes bytes;
  put_frame(bytes, kind, payload);
  // The server reads at all times. What it has said before it went is still to be heard.
  if (!send_all(connection_, bytes, Clock::now() + 60s))
    while (receive()) {
    }
}

std::optional<Frame> StoreClient::receive() {
  Frame frame;
  try {
    switch (receive_frame(connection_, in_, frame, Clock::now() + kMoment)) {
      case Heard::Nothing:
        return std::nullopt;
      case Heard::End:
        fail_lost();
      case Heard::Frame:
        break;
    }
    Reader reader(frame.payload);
    if (frame.kind == FrameKind::Failed) {
      const auto code = reader.get<Status::Code>();
      fail({code == Status::Code::Ok ? Status::Code::BackendError : code, reader.get_string()});
    }
    if (frame.kind == FrameKind::Value) {
      std::string key = reader.get_string();
      values_.insert_or_assign(std::move(key), reader.get_list<std::byte>());
    }
  } catch (const WireError& error) {
    fail({Status::Code::BackendError, std::string("the ranks' store says what cannot be read: ") + error.what()});
  }
  return frame;
}

void StoreClient::wait_for_all(Deadline deadline) {
  for (;;) {
    if (const auto frame = receive(); frame && frame->kind == FrameKind::Complete) return;
    if (Clock::now() > deadline) fail({Status::Code::BackendError, "hvd::init(): rank 0 does not say whether all ranks have come"});
  }
}

std::vector<Bytes> StoreClient::allgather(const Bytes& mine, int size, const std::function<void()>& look) {
  send(FrameKind::Gather, mine);
  for (;;) {
    const auto frame = receive();
    if (!frame) {
      try {
        look();
      } catch (...) {
        broken_ = status_of_current_exception().text();
        throw;
      }
    } else if (frame->kind == FrameKind::Gathered) {
      std::vector<Bytes> all;
      try {
        Reader reader(frame->payload);
        for (int rank = 0; rank < size; ++rank) all.push_back(reader.get_list<std::byte>());
      } catch (const WireError& error) {
        fail({Status::Code::BackendError, std::string("the ranks' store says what cannot be read: ") + error.what()});
      }
      return all;
    }
  }
}

void StoreClient::put(const std::string& key, const Bytes& value, int takers) {
  send(FrameKind::Put, Writer().put_string(key).put(static_cast<std::uint32_t>(takers)).put_bytes(value).bytes());
}

std::optional<Bytes> StoreClient::get(const std::string& key, const std::function<bool()>& give_up) {
  if (asked_.insert(key).second) send(FrameKind::Get, Writer().put_string(key).bytes());
  for (;;) {
    if (const auto found = values_.find(key); found != values_.end()) {
      Bytes value = std::move(found->second);
      values_.erase(found);
      asked_.erase(key);
      return value;
    }
    if (give_up()) return std::nullopt;
    static_cast<void>(receive());
  }
}

}  // namespace hvd
