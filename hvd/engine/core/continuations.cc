#include "hvd/engine/core/continuations.h"

#include "hvd/base/log.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

/// Calls it. What it throws has nobody to catch it.
void call(const std::function<void()>& function) noexcept {
  try {
    function();
  } catch (...) {
    log(LogLevel::Error, "a function that was given to Handle::then() has thrown: {}",
        status_of_current_exception().text());
  }
}

}  // namespace

bool Continuations::add(HandleState& pending, std::function<void()> function) {
  const bool waits = !pending.done.load(std::memory_order_acquire) &&
                     !pending.enqueued.load(std::memory_order_acquire);
  std::shared_ptr<Callbacks> callbacks = pending.callbacks;
  if (!callbacks) callbacks = std::make_shared<Callbacks>();
  callbacks->functions.emplace_back(
      [function = std::move(function), told = pending.weak_from_this()] {
        if (const auto state = told.lock())
          state->waited_for.store(true, std::memory_order_relaxed);
        call(function);
      });
  callbacks->left = left_;
  left_->fetch_add(1, std::memory_order_acq_rel);
  if (waits) {
    waiting_.fetch_add(1, std::memory_order_release);
    pending.callbacks = std::move(callbacks);
  } else {
    CallbackThread::post(std::move(callbacks));
  }
  return waits;
}

void Continuations::hand_over(HandleState& pending) noexcept {
  waiting_.fetch_sub(pending.callbacks->functions.size(), std::memory_order_release);
  CallbackThread::post(std::move(pending.callbacks));
}

}  // namespace hvd
