#include "hvd/engine/core/caller_threads.h"

#include <algorithm>
#include <utility>

namespace hvd {

namespace {

std::uint64_t next_number() {
  static std::atomic<std::uint64_t> last{CallerThread::kNone};
  return last.fetch_add(1) + 1;
}

/// Keeps a thread's CallerThread until the thread ends.
struct Keeper {
  std::shared_ptr<CallerThread> thread;
  Keeper() = default;
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;
  ~Keeper() { is_gone = true; }
  // destructors of what lives longer may still call the library
  static thread_local constinit bool is_gone;
};
thread_local constinit bool Keeper::is_gone = false;

}  // namespace

thread_local constinit std::uint64_t CallerThread::number_here_ = CallerThread::kNone;
thread_local constinit std::uint64_t CallerThread::known_here_ = 0;

std::shared_ptr<CallerThread> CallerThread::here() {
  if (Keeper::is_gone) {  // as if of a thread that ends at once
    known_here_ = 0;
    return std::make_shared<CallerThread>(number_here_ = next_number());
  }
  static thread_local Keeper keeper;
  if (!keeper.thread) keeper.thread = std::make_shared<CallerThread>(number_here_ = next_number());
  return keeper.thread;
}

CallerThreads::CallerThreads() : number_(next_number()) {}

void CallerThreads::add(const std::shared_ptr<CallerThread>& thread) {
  if (std::exchange(CallerThread::known_here_, number_) == number_) return;
  const std::lock_guard lock(mutex_);
  std::erase_if(threads_,
                [&](const auto& known) { return known.expired() || known.lock() == thread; });
  threads_.push_back(thread);
}

CallerThreads::Wait::Wait(CallerThreads& threads, const HandleState& pending)
    : thread_(CallerThread::here()) {
  threads.add(thread_);
  thread_->waits_.fetch_add(1, std::memory_order_relaxed);
  thread_->waits_for_.store(&pending, std::memory_order_release);
}

void CallerThreads::if_all_wait(std::vector<Waiting>& all, bool has_calls) {
  all.clear();
  const std::lock_guard lock(mutex_);
  for (const auto& known : threads_) {
    const auto thread = known.lock();
    if (!thread) continue;
    const auto waits = thread->waits_.load(std::memory_order_relaxed);
    const HandleState* const pending = thread->waits_for_.load(std::memory_order_acquire);
    if (pending == nullptr && thread->calls_back_) continue;
    if (pending == nullptr) return all.clear();
    has_calls = has_calls && !thread->calls_back_;
    all.push_back({thread->number(), waits, pending});
  }
  if (has_calls) all.clear();
}

}  // namespace hvd
