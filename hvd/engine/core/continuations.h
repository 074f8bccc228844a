#pragma once
/// Continuations are functions of the program that are to be called once operations of this engine
/// have ended (`Handle::then`). Until then they wait with the operation's state; then the thread
/// that ends it posts them to the CallbackThread, and goes on. An operation that has none pays a
/// look for that. Under the engine's mutex, but for what says otherwise.
// Tested in tests/hvd/engine/continuations_test.cc

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "hvd/base/callback_thread.h"
#include "hvd/negotiation/values/capabilities.h"
#include "hvd/submission.h"

namespace hvd {

class Continuations {
 public:
  /// Has `function` called after those that the operation has got before: now, if it may be waited
  /// for without blocking. Returns whether it waits for the operation. Requires that the
  /// CallbackThread has been started.
  bool add(HandleState& pending, std::function<void()> function) HVD_REQUIRES(engine_mutex);
  /// The operation's memory, which ends, is to live until its functions have been called. Returns
  /// false, and has not taken it, if there are none.
  bool keep(HandleState& pending, std::shared_ptr<void>& owner) noexcept
      HVD_REQUIRES(engine_mutex) {
    if (!pending.callbacks) return false;
    if (owner) pending.callbacks->kept = std::move(owner);
    return true;
  }
  /// The operation may be waited for without blocking from now on.
  void post(HandleState& pending) noexcept HVD_REQUIRES(engine_mutex) {
    if (pending.callbacks) hand_over(pending);
  }

  /// Returns whether functions wait for operations, which somebody has to look after. Any thread,
  /// with the mutex or without.
  [[nodiscard]] bool are_waiting() const { return waiting_.load(std::memory_order_acquire) > 0; }
  /// Returns whether functions whose operations have ended are still to be called, or being called.
  [[nodiscard]] bool are_called() const HVD_REQUIRES(engine_mutex) {
    return left_->load(std::memory_order_acquire) > waiting_.load(std::memory_order_relaxed);
  }
  /// Waits until all have been called, for `patience` at most; in the CallbackThread itself not at
  /// all. Returns whether they have. Any thread, without the mutex.
  bool wait_until_called(std::chrono::nanoseconds patience) const HVD_EXCLUDES(engine_mutex) {
    return CallbackThread::wait_until_called(*left_, patience);
  }

 private:
  void hand_over(HandleState& pending) noexcept HVD_REQUIRES(engine_mutex);

  std::atomic<std::uint64_t> waiting_{0};  ///< functions, written under the mutex
  std::shared_ptr<std::atomic<std::uint64_t>> left_ =
      std::make_shared<std::atomic<std::uint64_t>>();  ///< with those that are posted
};

}  // namespace hvd
