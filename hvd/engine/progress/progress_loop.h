#pragma once
/// Decides who drives the engine: a user thread that waits, so that a result costs no context
/// switch; otherwise the coordination thread, which sleeps while there is nothing to do. Owns the
/// turn and that thread. Any thread.
// Tested in tests/hvd/engine/engine_test.cc, tests/hvd/engine/what_if_burst_test.cc

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "hvd/base/waits.h"
#include "hvd/engine/core/burst.h"
#include "hvd/engine/core/caller_threads.h"
#include "hvd/engine/core/engine_lock.h"
#include "hvd/engine/core/events.h"
#include "hvd/engine/core/parts.h"

namespace hvd {

class ProgressLoop {
 public:
  ProgressLoop(const EngineParts& parts, EngineMutex& mutex, CallerThreads& callers, Burst& burst,
               EngineEvents& engine)
      : parts_(parts),
        board_(*parts.board),
        mutex_(mutex),
        callers_(callers),
        burst_(burst),
        engine_(engine),
        short_wait_(parts.topology.has_core()),
        polls_(parts.topology.has_core()),
        looks_again_(std::ranges::any_of(
            parts.backends, [](const auto& backend) { return backend->looks_again(); })) {}
  ProgressLoop(const ProgressLoop&) = delete;
  ProgressLoop& operator=(const ProgressLoop&) = delete;
  /// Requires that the coordination thread has ended: see `stop` and `join`.
  ~ProgressLoop() = default;

  /// Starts the coordination thread. Throws std::system_error if the system has none to give.
  void start();
  /// Tells it to end. `in_order`: the other ranks see that this one left; otherwise, that it died.
  void stop(bool in_order);
  /// Waits until it has ended.
  void join();
  /// For tests: the thread ends as if the process had been killed.
  void die();

  /// Returns the turn, or none if another thread has it.
  [[nodiscard]] Turn try_take() {
    bool expected = false;
    if (taken_.load(std::memory_order_relaxed) ||
        !taken_.compare_exchange_strong(expected, true, std::memory_order_acquire))
      return {};
    return Turn(*this);
  }
  /// Waits for the turn; returns none if another thread still has it at `deadline`.
  [[nodiscard]] Turn take(std::chrono::steady_clock::time_point deadline =
                              std::chrono::steady_clock::time_point::max());
  [[nodiscard]] bool is_taken() const { return taken_.load(); }
  /// Nobody drives this engine any more.
  void keep_forever(Turn turn) { turn.loop_ = nullptr; }

  /// Drives once, if nobody else does.
  void poll() {
    if (const Turn turn = try_take()) engine_.progress(turn);
  }
  /// Drives until `is_over`, as the thread that has the turn.
  template <class IsOver>
  void drive_until(const Turn& turn, IsOver is_over) {
    for (unsigned idle = 0; !is_over();) {
      const std::uint32_t doorbell = board_.bells().wait_doorbell().load(std::memory_order_seq_cst);
      if (engine_.progress(turn)) {
        idle = 0;
      } else if (!is_over()) {
        idle_wait(turn, doorbell, idle++);
        engine_.look_for_trouble(turn);
      }
    }
  }
  /// Drives, or waits while another thread does, until `is_over`.
  template <class IsOver>
  void wait_until(IsOver is_over) {
    while (!is_over()) {
      if (const Turn turn = try_take()) {
        drive_until(turn, is_over);
      } else if (!hvd::wait_until(
                     [&] { return is_over() || !taken_.load(std::memory_order_relaxed); },
                     waits::kTurn, true)) {
        EngineLock lock(mutex_);
        mutex_.wait_for(lock, kSleep, [&] { return is_over() || !taken_.load(); });
      }
    }
  }
  /// Returns whether who waits for it may go on.
  [[nodiscard]] static bool may_go_on(const HandleState& pending) {
    return pending.done.load(std::memory_order_acquire) ||
           pending.enqueued.load(std::memory_order_acquire);
  }
  /// Blocks until that is so, and throws what it failed with.
  void wait_for(HandleState& pending);
  /// Sees to it that what there may be to drive is driven: small work by this thread, unless
  /// another has the turn.
  void drive_or_call(bool small_work);
  /// Calls the coordination thread, once for all that gathers until it comes: what has been
  /// announced goes to the other hosts with what comes next, as a thread that waits or polls takes
  /// it there.
  void call_for_burst();

 private:
  friend class Turn;
  static constexpr std::chrono::milliseconds kSleep{100};
  static constexpr std::chrono::milliseconds kShortestSleep{1};
  /// A leader looks for messages, which ring no doorbell, also while its ranks have nothing to do.
  static constexpr std::chrono::milliseconds kIdleLeaderSleep{10};

  void hand_over(const Turn& turn) noexcept;
  void release() noexcept;
  void idle_wait(const Turn& turn, std::uint32_t seen_doorbell, unsigned idle_rounds);
  /// So does a rank that must look again for batches that are over (Backend::look_again).
  [[nodiscard]] std::chrono::milliseconds idle_sleep() const {
    return parts_.transport || looks_again_ ? kIdleLeaderSleep : kSleep;
  }
  /// Returns `pause`, or as long as it is until there is trouble to look for, which another thread
  /// may be about to do.
  [[nodiscard]] std::chrono::nanoseconds until_trouble(std::chrono::nanoseconds pause) const {
    const auto time = engine_.time_of_trouble();
    return time == Clock::time_point::max()
               ? pause
               : std::clamp<std::chrono::nanoseconds>(time - Clock::now(), kShortestSleep, pause);
  }
  /// Returns whether functions of the program wait for results, which it must then look for itself.
  [[nodiscard]] bool is_watching() const { return mutex_.continuations().are_waiting(); }
  void let_gather();
  void coordinate();
  /// Drives a while as the coordination thread. Returns how long it may sleep then.
  std::chrono::microseconds coordinate_once(Turn turn);

  const EngineParts& parts_;
  Board& board_;
  EngineMutex& mutex_;
  CallerThreads& callers_;
  Burst& burst_;
  EngineEvents& engine_;
  ShortWait short_wait_;
  Pauses polls_;            ///< of the thread that has the turn
  const bool looks_again_;  ///< a backend wants it
  std::atomic<bool> taken_{false};
  std::atomic<bool> has_missed_turn_{
      false};  ///< the coordination thread was woken while another had the turn
  std::atomic<bool> stop_{false};
  std::atomic<bool> in_order_{false};
  std::atomic<bool> die_{false};
  std::thread thread_;
};

inline void Turn::end() noexcept {
  if (loop_ == nullptr) return;
  loop_->hand_over(*this);
  loop_ = nullptr;
}

}  // namespace hvd
