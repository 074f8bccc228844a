#include "ops/rendezvous/server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "hvd/base/log.h"
#include "hvd/base/text.h"
#include "hvd/base/threads.h"

namespace hvd {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kPatienceWithStrangers = 5s;
constexpr std::size_t kMostStrangers = 256;
constexpr auto kRest = 100ms;

}  // namespace

StoreServer::StoreServer(FileDescriptor listener, Options options)
    : options_(std::move(options)),
      listener_(std::move(listener)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      store_(options_.size),
      begin_(Clock::now()) {
  if (wake_.get() < 0) throw BackendError(formatted("eventfd: {}", std::strerror(errno)));
  try {
    const SignalsKeptOff of_it;
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    throw BackendError(
        formatted("the thread of the ranks' store cannot be started: {}", error.what()));
  }
}

StoreServer::~StoreServer() {
  ends_ = true;
  const std::uint64_t one = 1;
  while (::write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
  thread_.join();
}

void StoreServer::run() {
  while (!ends_) {
    wait();
    accept_all();
    for (Peer& peer : peers_) read(peer);
    keep_time();
    sweep();
    deliver();
    for (Peer& peer : peers_)
      if (peer.rank != 0) write(peer);
    for (Peer& peer : peers_)
      if (peer.rank == 0 && is_next(peer)) write(peer);
    sweep();
    deliver();  // what is left to be said wakes the next round
  }
}

bool StoreServer::is_next(const Peer& peer) const {
  if (peer.out.empty() || peer.rank != 0) return !peer.out.empty();
  // Rank 0 comes last: when it has its answer it may end its process, and the answers to the others
  // must have left by then.
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& other) { return other.rank == 0 || other.out.empty(); });
}

bool StoreServer::is_resting() const { return Clock::now() < accepts_at_; }

int StoreServer::time_to_wait() const {
  auto next = is_resting() ? accepts_at_ : Deadline::max();
  for (const Peer& peer : peers_)
    if (peer.rank == kStranger) next = std::min(next, peer.deadline);
  if (!is_closed_)
    next = std::min(next, begin_ + (has_remarked_ ? options_.patience
                                                  : std::min(options_.remark, options_.patience)));
  if (next == Deadline::max()) return -1;
  return static_cast<int>(std::clamp<long long>(
      std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count(), 0, 60'000));
}

void StoreServer::wait() {
  std::vector<pollfd> all;
  all.push_back({wake_.get(), POLLIN, 0});
  all.push_back({is_resting() ? -1 : listener_.get(), POLLIN, 0});
  for (const Peer& peer : peers_)
    all.push_back(
        {peer.connection.get(), static_cast<short>(is_next(peer) ? POLLIN | POLLOUT : POLLIN), 0});
  ::poll(all.data(), all.size(), time_to_wait());
}

void StoreServer::accept_all() {
  for (std::size_t strangers = 0; strangers < kMostStrangers; ++strangers) {
    auto connection = accept_from(listener_);
    if (!connection) {
      if (errno != EAGAIN) accepts_at_ = Clock::now() + kRest;
      return;
    }
    make_room();
    Peer& peer = peers_.emplace_back();
    peer.connection = std::move(*connection);
    peer.nonce = make_nonce();
    peer.deadline = Clock::now() + kPatienceWithStrangers;
    put_frame(peer.out, FrameKind::Greeting, make_greeting(peer.nonce));
  }
}

/// Strangers that say nothing must keep nobody out: of too many, the one that has had the most time
/// to prove itself goes.
void StoreServer::make_room() {
  const auto is_unproven = [](const Peer& peer) { return peer.rank == kStranger && !peer.hello; };
  if (static_cast<std::size_t>(std::count_if(peers_.begin(), peers_.end(), is_unproven)) >=
      kMostStrangers)
    peers_.erase(std::find_if(peers_.begin(), peers_.end(), is_unproven));
}

void StoreServer::read(Peer& peer) {
  static thread_local std::array<std::byte, 1 << 16> buffer;
  while (!peer.gone && !peer.ends) {
    const auto received = receive_some(peer.connection, buffer);
    if (!received) peer.gone = true;
    if (!received || *received == 0) return;
    try {
      peer.in.add(std::span(buffer).first(*received));
      while (auto frame = peer.ends ? std::nullopt : peer.in.next()) hear(peer, *frame);
    } catch (const std::exception&) {  // a frame that is none; or libcrypto fails
      peer.gone = true;
    }
  }
}

void StoreServer::hear(Peer& peer, const Frame& frame) {
  if (peer.rank == kStranger) {
    introduce(peer, frame);
  } else {
    store_.take(peer.rank, frame);
  }
}

void StoreServer::introduce(Peer& peer, const Frame& frame) {
  if (peer.hello) {
    if (frame.kind != FrameKind::Here)
      throw WireError("who is welcome says that it is here, and nothing else");
    take_in(peer);
    return;
  }
  const auto found = read_hello(frame, options_.key, peer.nonce);
  if (!found) {
    put_frame(peer.out, FrameKind::Refused, Writer().put(Refusal::WrongKey).put_string("").bytes());
    peer.ends = true;
    return;
  }
  // It is a rank as soon as it has heard this: one that has given up meanwhile, because this host
  // is busy, comes again and is not missed.
  peer.hello = found->hello;
  put_frame(peer.out, FrameKind::Welcome, Writer().put(found->proof).bytes());
}

void StoreServer::take_in(Peer& peer) {
  if (const auto refused = store_.come(*peer.hello)) {
    put_frame(peer.out, FrameKind::Refused,
              Writer().put(refused->first).put_string(refused->second).bytes());
    peer.ends = true;
    return;
  }
  peer.rank = peer.hello->rank;
  peer.in.trust();
  put_frame(peer.out, FrameKind::Taken, {});
}

void StoreServer::keep_time() {
  const auto now = Clock::now();
  for (Peer& peer : peers_)
    if (peer.rank == kStranger && now >= peer.deadline) peer.gone = true;
  if (is_closed_) return;
  if (store_.is_complete()) {
    is_closed_ = true;
    return;
  }
  const auto missing = [&] {
    const auto ranks = store_.missing();
    return formatted("{} {} of {}", ranks.size() == 1 ? "rank" : "ranks", rank_list(ranks),
                     options_.size);
  };
  if (now >= begin_ + options_.patience) {
    is_closed_ = true;
    store_.fail(
        {Status::Code::BackendError,
         formatted("hvd::init(): {} did not come to {} within {} s ({}); have all been started, "
                   "with the same variables?",
                   missing(), options_.place,
                   std::chrono::duration_cast<std::chrono::seconds>(options_.patience).count(),
                   options_.knob)});
  } else if (!has_remarked_ && now >= begin_ + options_.remark) {
    has_remarked_ = true;
    log(LogLevel::Warning, "hvd::init() waits at {} for {}", options_.place, missing());
  }
}

void StoreServer::deliver() {
  for (const auto& reply : store_.take_replies()) {
    const auto peer = std::find_if(peers_.begin(), peers_.end(), [&](const Peer& one) {
      return one.rank == reply.rank && !one.gone;
    });
    if (peer == peers_.end()) continue;
    put_frame(peer->out, reply.frame.kind, reply.frame.payload);
    if (reply.frame.kind == FrameKind::Failed) peer->ends = !store_.is_complete();
  }
}

void StoreServer::write(Peer& peer) {
  std::size_t done = 0;
  while (!peer.gone && done < peer.out.size()) {
    const auto sent = send_some(peer.connection, std::span(peer.out).subspan(done));
    if (!sent) peer.gone = true;
    if (!sent || *sent == 0) break;
    done += *sent;
  }
  peer.out.erase(peer.out.begin(), peer.out.begin() + static_cast<std::ptrdiff_t>(done));
}

void StoreServer::sweep() {
  for (auto peer = peers_.begin(); peer != peers_.end();) {
    if (!peer->gone && !(peer->ends && peer->out.empty())) {
      ++peer;
      continue;
    }
    const int rank = peer->rank;
    peer = peers_.erase(peer);
    if (rank != kStranger) store_.leave(rank);
  }
}

}  // namespace hvd
