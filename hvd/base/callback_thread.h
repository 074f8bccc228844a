#pragma once
/// CallbackThread is the one thread of the process that calls functions of the program which were
/// given to `Handle::then`: one after the other, in the order in which they were posted. It holds
/// no lock meanwhile, and has nothing of an engine. It starts when it is first needed and ends with
/// the process. A process that was forked has none, and calls nothing that was posted before: one
/// starts there when one is needed. Any thread.
// Tested in tests/hvd/base/callback_thread_test.cc

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace hvd {

/// Functions that are called one after the other. None of them throws.
struct Callbacks {
  std::vector<std::function<void()>> functions;
  std::shared_ptr<void> kept;  ///< let go of after the last one
  /// Goes down by as many when they are over: called, with all that they owned destroyed, and
  /// `kept` let go of. Not null.
  std::shared_ptr<std::atomic<std::uint64_t>> left;
  std::shared_ptr<Callbacks> next;  ///< the queue's own
};

class CallbackThread {
 public:
  /// Starts the thread, unless it runs. Throws std::system_error if the system has none to give.
  static void start();
  /// Has them called. Requires that `start` has returned in this process.
  static void post(std::shared_ptr<Callbacks> callbacks) noexcept;
  /// Returns whether the calling thread is that thread.
  [[nodiscard]] static bool is_here();
  /// Waits until `left` is zero, for `patience` at most. Returns whether it is; in the thread
  /// itself at once.
  static bool wait_until_called(const std::atomic<std::uint64_t>& left,
                                std::chrono::nanoseconds patience);
};

}  // namespace hvd
