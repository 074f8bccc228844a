#include "hvd/base/child_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>

#include "hvd/base/process.h"

namespace hvd {

namespace {
thread_local constinit bool holds_mutex = false;  // since before_fork()
}  // namespace

ChildWatch& ChildWatch::instance() {
  static auto* const watch = [] {
    ::pthread_atfork([] { instance().before_fork(); }, [] { instance().after_fork(false); },
                     [] { instance().after_fork(true); });
    return new ChildWatch;
  }();
  return *watch;
}

std::uint64_t ChildWatch::begin() {
  const std::lock_guard lock(mutex_);
  ++things_;
  return forks_;
}

std::uint64_t ChildWatch::end() {
  const std::lock_guard lock(mutex_);
  --things_;
  return forks_;
}

bool ChildWatch::are_gone(std::uint64_t after, std::uint64_t last) {
  if (after == last) return true;
  const std::lock_guard lock(mutex_);
  forget_ended();
  return std::none_of(children_.begin(), children_.end(),
                      [&](const Child& child) { return child.fork > after && child.fork <= last; });
}

/// Requires the mutex.
void ChildWatch::forget_ended() {
  std::erase_if(children_, [](const Child& child) {
    pollfd state{child.alive, 0, 0};
    if (child.alive < 0 || ::poll(&state, 1, 0) != 1 || (state.revents & POLLHUP) == 0)
      return false;
    ::close(child.alive);
    return true;
  });
}

/// A signal handler that has interrupted the library may fork: the mutex may be this thread's own
/// then, and what it guards half changed.
void ChildWatch::before_fork() {
  if (is_inside_library()) return;
  mutex_.lock();
  holds_mutex = true;
  ends_[0] = ends_[1] = -1;
  if (things_ == 0) return;
  forget_ended();
  if (::pipe2(ends_, O_CLOEXEC | O_NONBLOCK) != 0) ends_[0] = ends_[1] = -1;
}

void ChildWatch::after_fork(bool in_child) {
  if (!holds_mutex) return;
  if (in_child) {
    if (ends_[0] >= 0) ::close(ends_[0]);  // it keeps the other as long as it lives
  } else if (things_ > 0) {
    if (ends_[1] >= 0) ::close(ends_[1]);
    children_.push_back({++forks_, ends_[0]});
  }
  holds_mutex = false;
  mutex_.unlock();
}

}  // namespace hvd
