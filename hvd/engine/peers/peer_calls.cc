#include "hvd/engine/peers/peer_calls.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/engine/core/caller_threads.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

constexpr int kLooksAtOnce = 8;

std::shared_ptr<HandleState> done_state(int value) {
  auto state = std::make_shared<HandleState>();
  state->is_message = true;
  state->value = value;
  state->done.store(true, std::memory_order_release);
  return state;
}

}  // namespace

void PeerCalls::check(const PeerCall& call, bool is_send) const {
  const char* const what = is_send ? "send" : "recv";
  const int size = parts_.topology.size;
  if (call.peer == kAnyPeer && is_send)
    throw InvalidArgument("send: the peer must be a rank; kAnyPeer is for recv");
  if (call.peer != kAnyPeer && (call.peer < 0 || call.peer >= size))
    throw InvalidArgument(formatted("{}: peer {} must be a rank from 0 to {}{}", what, call.peer,
                                    size - 1, is_send ? "" : ", or kAnyPeer"));
  if (call.tag < 0)
    throw InvalidArgument(formatted("{}: tag {} must not be negative", what, call.tag));
  if (call.count > 0 && (is_send ? call.input : call.output) == nullptr)
    throw InvalidArgument(
        formatted("{}: a buffer of {} elements of {} has no memory: it is a null pointer", what,
                  call.count, name_of(call.dtype)));
}

/// Returns whether the calling thread is to `look`: messages of other domains do not show so. Comes
/// before the recv that it looks for is posted, or the rank that this one waits for would ring for
/// it, each time. `is_elsewhere`: it may be of another domain.
bool PeerCalls::begin_to_look(bool is_elsewhere) {
  if (is_elsewhere || messages_.attention().awaits_elsewhere()) return false;
  messages_.attention().begin_to_look();
  return true;
}

/// Looks once more: others have rung for nothing that they have sent while the thread looked.
void PeerCalls::end_to_look() {
  if (!messages_.attention().end_to_look()) return;
  try {
    EngineLock lock(mutex_);
    messages_.advance(lock);
  } catch (...) {
    board_.set_failure(status_of_current_exception());
  }
}

/// The caller goes on: has what it started driven. `pending`: null if it is done.
void PeerCalls::begin(const HandleState* pending, bool is_elsewhere) {
  // What came, or what room became free, before this rank said that it is to be rung.
  if (pending != nullptr ? messages_.has_news() : messages_.attention().has_work())
    advance(nullptr, false);
  if (is_elsewhere) {
    loop_.drive_or_call(true);
  } else if (pending != nullptr && messages_.attention().has_work()) {
    loop_.drive_or_call(false);
  }
}

void PeerCalls::send(PeerCall call) {
  const LibraryCall inside;
  check(call, true);
  call.waits = true;
  const bool is_elsewhere = !parts_.is_here(call.peer);
  std::shared_ptr<HandleState> pending;
  bool looks = false;
  {
    const EngineLock lock(mutex_);
    submitter_.require_open();
    pending = messages_.send(std::move(call));
    if (pending) looks = begin_to_look(is_elsewhere);
  }
  if (pending) return finish(*pending, looks);
  begin(nullptr, is_elsewhere);
}

int PeerCalls::receive(PeerCall call) {
  const LibraryCall inside;
  check(call, false);
  // It is freed while the next call waits, and so not before this one's answer is sent.
  static thread_local std::shared_ptr<HandleState> last;
  const bool is_elsewhere = may_be_elsewhere(call);
  std::shared_ptr<HandleState> pending;
  bool looks = false;
  int from = kAnyPeer;
  try {
    const EngineLock lock(mutex_);
    submitter_.require_open();
    looks = begin_to_look(is_elsewhere);
    pending = messages_.receive(std::move(call), from);
  } catch (...) {
    if (looks) end_to_look();
    throw;
  }
  if (!pending) {
    if (looks) end_to_look();
    return from;
  }
  last.reset();
  finish(*pending, looks);
  from = static_cast<int>(pending->value);
  last = std::move(pending);
  return from;
}

std::shared_ptr<HandleState> PeerCalls::start_send(PeerCall call) {
  const LibraryCall inside;
  check(call, true);
  const bool is_elsewhere = !parts_.is_here(call.peer);
  const int self = parts_.topology.rank;
  std::shared_ptr<HandleState> pending;
  {
    const EngineLock lock(mutex_);
    submitter_.require_open();
    pending = messages_.send(std::move(call));
  }
  begin(pending.get(), is_elsewhere);
  return pending ? pending : done_state(self);
}

std::shared_ptr<HandleState> PeerCalls::start_receive(PeerCall call) {
  const LibraryCall inside;
  check(call, false);
  const bool is_elsewhere = may_be_elsewhere(call);
  std::shared_ptr<HandleState> pending;
  int from = kAnyPeer;
  {
    const EngineLock lock(mutex_);
    submitter_.require_open();
    pending = messages_.receive(std::move(call), from);
  }
  if (!pending) return done_state(from);
  begin(pending.get(), is_elsewhere);
  return pending;
}

std::vector<int> PeerCalls::meet(std::chrono::nanoseconds time) {
  constexpr std::chrono::nanoseconds kLongestPause = std::chrono::milliseconds(1);
  const LibraryCall inside;
  const auto began = Clock::now();
  std::uint64_t meeting = 0;
  {
    const EngineLock lock(mutex_);
    submitter_.require_open();
    meeting = messages_.meetings().come();
  }
  for (std::chrono::nanoseconds pause = std::chrono::microseconds(5);;
       pause = std::min(2 * pause, kLongestPause)) {
    loop_.poll();
    bool is_hopeless = false;
    EngineLock lock(mutex_);
    auto missing = messages_.meetings().missing(meeting, is_hopeless);
    const std::chrono::nanoseconds spent = Clock::now() - began;
    if (is_hopeless || spent >= time || board_.failed()) {  // none are missing: that is as good
      messages_.meetings().stop_waiting();
      if (!missing.empty()) submitter_.require_open();
      return missing;
    }
    lock.unlock();
    std::this_thread::sleep_for(std::min(pause, time - spent));
  }
}

void PeerCalls::await(const HandleState& pending) {
  {
    const EngineLock lock(mutex_);
    if (!begin_to_look(false)) return;
  }
  look(pending);
}

/// Acts on what has come. A failure is the world's, and raised where the callers wait. Returns
/// whether there was anything. `pending`: what the calling thread waits for.
bool PeerCalls::advance(const HandleState* pending, bool copies) {
  bool any = false, others = false;
  const auto is_done = [pending] {
    return pending != nullptr && pending->done.load(std::memory_order_relaxed);
  };
  try {
    EngineLock lock(mutex_);
    const std::uint64_t before = messages_.ended();
    const bool was_done = is_done();
    any = !board_.failed() && messages_.advance(lock, copies);
    others = messages_.ended() - before > (is_done() != was_done ? 1U : 0U);
  } catch (...) {
    board_.set_failure(status_of_current_exception());
  }
  // among them a thread of this rank that has the turn and sleeps
  if (others && loop_.is_taken()) board_.bells().ring_waiters();
  return any;
}

/// Looks for news as long as there is some, and a moment longer.
void PeerCalls::look(const HandleState& pending) {
  const auto is_done = [&] { return pending.done.load(std::memory_order_acquire); };
  bool moved = true;
  while (moved && !is_done() && !board_.failed()) {
    moved = false;
    const auto step = [&] {
      // Several times, as a pause is as long as several looks.
      for (int times = 0; times < kLooksAtOnce && !moved && !is_done(); ++times)
        moved = messages_.has_news() && advance(&pending);
      return moved || is_done();
    };
    short_wait_.until(step);
  }
  end_to_look();
}

void PeerCalls::finish(HandleState& pending, bool looks) {
  if (looks) look(pending);
  if (pending.done.load(std::memory_order_acquire)) return pending.status.raise();
  loop_.wait_for(pending);
}

}  // namespace hvd
