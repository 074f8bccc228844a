#pragma once
/// A Burst is what the program's threads have started without waiting for it, since one of them has
/// waited or polled: its operations travel together. Also what of it has gathered, for the next
/// thread that waits, polls or drives, or else for the coordination thread. Any thread, no lock.
// Tested in tests/hvd/engine/what_if_burst_test.cc

#include <atomic>
#include <cstdint>

namespace hvd {

class Burst {
 public:
  /// Counts an operation: of the fast path, or one that is negotiated.
  void add_fast() { fast_.fetch_add(1, std::memory_order_relaxed); }
  void add_negotiated() { negotiated_.fetch_add(1, std::memory_order_relaxed); }
  /// Ends it: a thread waits, or polls.
  void end() {
    fast_.store(0, std::memory_order_relaxed);
    negotiated_.store(0, std::memory_order_relaxed);
  }
  /// Returns how many operations it has of the fast path, or in all.
  [[nodiscard]] std::uint32_t fast() const { return fast_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint32_t count() const {
    return fast() + negotiated_.load(std::memory_order_relaxed);
  }

  /// Says whether there may be rounds in which this rank has arrived last, and that nobody has
  /// ended. Under the engine's mutex.
  void set_complete(bool complete) { complete_.store(complete, std::memory_order_relaxed); }
  [[nodiscard]] bool has_complete() const { return complete_.load(std::memory_order_relaxed); }
  /// Says that something is announced and has not been passed on. Returns whether it is the first
  /// since `begin_to_drive`.
  bool announce() { return !announced_.exchange(true); }
  /// Begins to drive. Whoever drives calls it before it reads the log. Returns whether something
  /// has been announced since the last time.
  bool begin_to_drive() { return announced_.load() && announced_.exchange(false); }
  /// Returns whether there is something to be ended or passed on.
  [[nodiscard]] bool is_gathering() const { return has_complete() || announced_.load(); }

 private:
  std::atomic<std::uint32_t> fast_{0};
  std::atomic<std::uint32_t> negotiated_{0};
  std::atomic<bool> complete_{false};
  std::atomic<bool> announced_{false};
};

}  // namespace hvd
