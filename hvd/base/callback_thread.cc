#include "hvd/base/callback_thread.h"

#include <pthread.h>

#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "hvd/base/process.h"
#include "hvd/base/threads.h"

namespace hvd {

using namespace std::chrono_literals;

namespace {

/// At the end of the process, for functions that run then: what they use may be destroyed next.
constexpr auto kExitPatience = 2s;

/// The state that the thread shares with the others. Never destroyed, as the thread is never
/// joined.
struct Shared {
  std::mutex mutex;
  std::condition_variable posted;
  std::condition_variable called;
  bool runs = false;   // the thread has been started
  bool calls = false;  // it is calling
  std::shared_ptr<Callbacks> first;
  Callbacks* last = nullptr;
};

std::atomic<Shared*> current{nullptr};
thread_local constinit bool is_callback_thread = false;

/// Runs in a child, which has no such thread. What the parent's shares may be locked, and is left
/// as it is.
void begin_anew() { current.store(nullptr, std::memory_order_relaxed); }
[[maybe_unused]] const int watches_forks = ::pthread_atfork(nullptr, nullptr, begin_anew);

Shared& shared() {
  Shared* found = current.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  auto made = std::make_unique<Shared>();
  if (current.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel))
    return *made.release();
  return *found;
}

std::shared_ptr<Callbacks> pop(Shared& with) {
  auto first = std::move(with.first);
  with.first = std::move(first->next);
  if (!with.first) with.last = nullptr;
  return first;
}

void run(Shared& with) {
  is_callback_thread = true;
  const MadeHere process;
  std::unique_lock lock(with.mutex);
  while (true) {
    with.posted.wait(lock, [&] { return with.first != nullptr; });
    auto callbacks = pop(with);
    with.calls = true;
    lock.unlock();
    const auto count = callbacks->functions.size();
    const auto left = std::move(callbacks->left);
    for (auto& function : callbacks->functions) {
      function();
      if (!process.still_here()) return;  // it has forked, and this is the child
      function = nullptr;
    }
    callbacks.reset();
    lock.lock();
    with.calls = false;
    left->fetch_sub(count, std::memory_order_acq_rel);
    with.called.notify_all();
  }
}

void at_exit() {
  Shared* const with = current.load(std::memory_order_acquire);
  if (with == nullptr || is_callback_thread || is_inside_library()) return;
  std::unique_lock lock(with->mutex);
  with->called.wait_for(lock, kExitPatience,
                        [&] { return with->first == nullptr && !with->calls; });
}

}  // namespace

void CallbackThread::start() {
  Shared& with = shared();
  const std::lock_guard lock(with.mutex);
  if (with.runs) return;
  const SignalsKeptOff of_it;
  std::thread([&with] { run(with); }).detach();
  with.runs = true;
  static std::atomic<bool> watches_exit{false};
  if (!watches_exit.exchange(true)) std::atexit(at_exit);
}

void CallbackThread::post(std::shared_ptr<Callbacks> callbacks) noexcept {
  Shared& with = *current.load(std::memory_order_acquire);
  const std::lock_guard lock(with.mutex);
  Callbacks* const added = callbacks.get();
  (with.last != nullptr ? with.last->next : with.first) = std::move(callbacks);
  with.last = added;
  with.posted.notify_one();
}

bool CallbackThread::is_here() { return is_callback_thread; }

bool CallbackThread::wait_until_called(const std::atomic<std::uint64_t>& left,
                                       std::chrono::nanoseconds patience) {
  const auto is_zero = [&] { return left.load(std::memory_order_acquire) == 0; };
  if (is_zero() || is_callback_thread) return is_zero();
  Shared* const with = current.load(std::memory_order_acquire);
  if (with == nullptr) return false;  // they were posted in another process
  std::unique_lock lock(with->mutex);
  return with->called.wait_for(lock, patience, is_zero);
}

}  // namespace hvd
