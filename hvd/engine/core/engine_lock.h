#pragma once
/// The engine's mutex, with what must wait until it is free again: wake-ups, and the ends of
/// entries, which run users' code (the owners of their memory). A part that holds the lock lists
/// them; whoever releases it does them.
// Tested in tests/hvd/engine/engine_test.cc, tests/thread_safety.sh

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "hvd/engine/core/continuations.h"
#include "hvd/engine/core/ledger.h"
#include "hvd/negotiation/board/board.h"
#include "hvd/negotiation/values/capabilities.h"

namespace hvd {

class EngineMutex {
 public:
  explicit EngineMutex(Board& board) : board_(board) {}

  // ---- listed under the lock, done after it
  /// Wakes threads of this rank that wait for a result or for the turn.
  void wake_own_threads() HVD_REQUIRES(engine_mutex) {
    // who begins to wait later looks first
    if (waiting_ > 0) after_.own_threads = after_.any = true;
  }
  /// Wakes user threads of all ranks of the domain that wait for a result.
  void wake_waiters() HVD_REQUIRES(engine_mutex) { after_.waiters = after_.any = true; }
  /// The same, where results were given to them that they look for themselves.
  void wake_watchers() HVD_REQUIRES(engine_mutex) { results_given_ = true; }
  /// Wakes the coordination thread of this rank.
  void wake_worker() HVD_REQUIRES(engine_mutex) { after_.worker = after_.any = true; }
  /// Wakes those of all ranks of the domain.
  void wake_all_workers() HVD_REQUIRES(engine_mutex) { after_.all_workers = after_.any = true; }
  /// Wakes that of the domain's leader.
  void wake_leader() HVD_REQUIRES(engine_mutex) { after_.leader = after_.any = true; }
  /// Destroys an entry that has ended.
  void destroy(std::unique_ptr<Entry> entry) HVD_REQUIRES(engine_mutex) {
    after_.ended.push_back(std::move(entry));
    after_.any = true;
  }

  /// Lets go of users' memory.
  void destroy(std::shared_ptr<void> owner) HVD_REQUIRES(engine_mutex) {
    after_.owners.push_back(std::move(owner));
    after_.any = true;
  }

  /// Returns the functions of the program that follow the ends of operations.
  [[nodiscard]] Continuations& continuations() { return continuations_; }
  [[nodiscard]] const Continuations& continuations() const { return continuations_; }

  /// Marks this thread, for as long as it lives, as one that has the turn or is going to wait for a
  /// result at once: the coordination thread of this rank need not be woken for what it lists.
  /// Those of one thread end in the reverse order.
  class Driver {
   public:
    explicit Driver(const EngineMutex& mutex)
        : mutex_(mutex), before_(std::exchange(here_, this)) {}
    ~Driver() { here_ = before_; }
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;
    /// Returns whether the coordination thread would have been woken otherwise.
    [[nodiscard]] bool has_left_out() const { return has_left_out_; }

   private:
    friend class EngineMutex;
    const EngineMutex& mutex_;
    Driver* before_;
    bool has_left_out_ = false;
  };

  /// Waits until somebody calls `wake_own_threads`, `is_over` holds, or the time is up. `lock` is
  /// this mutex's.
  template <class IsOver>
  void wait_for(class EngineLock& lock, std::chrono::nanoseconds time, IsOver is_over)
      HVD_REQUIRES(engine_mutex);

 private:
  friend class EngineLock;
  struct AfterUnlock {
    bool any = false;
    bool own_threads = false, waiters = false, worker = false, all_workers = false, leader = false;
    std::vector<std::unique_ptr<Entry>> ended;
    std::vector<std::shared_ptr<void>> owners;
  };
  void perform(AfterUnlock after);
  void ring_workers(const AfterUnlock& after);

  static inline thread_local constinit Driver* here_ = nullptr;

  std::mutex mutex_;
  std::condition_variable changed_;
  Board& board_;
  AfterUnlock after_;
  Continuations continuations_;
  bool results_given_ = false;  ///< not in `after_`: mostly it is all that there is to do
  int waiting_ = 0;             ///< threads in `wait_for`
};

/// Holds the engine's mutex, and does what was listed once it is released.
class HVD_SCOPED_CAPABILITY EngineLock {
 public:
  explicit EngineLock(EngineMutex& mutex) HVD_ACQUIRE(engine_mutex)
      : mutex_(mutex), lock_(mutex.mutex_) {}
  ~EngineLock() HVD_RELEASE() {
    if (lock_.owns_lock()) unlock();
  }
  EngineLock(const EngineLock&) = delete;
  EngineLock& operator=(const EngineLock&) = delete;

  void unlock() HVD_RELEASE() {
    const bool results_given = std::exchange(mutex_.results_given_, false);
    if (mutex_.after_.any) {
      auto after = std::exchange(mutex_.after_, {});
      lock_.unlock();
      mutex_.perform(std::move(after));
    } else {
      lock_.unlock();
    }
    if (results_given) mutex_.board_.bells().ring_watchers();
  }
  void lock() HVD_ACQUIRE() { lock_.lock(); }

 private:
  friend class EngineMutex;
  EngineMutex& mutex_;
  std::unique_lock<std::mutex> lock_;
};

template <class IsOver>
void EngineMutex::wait_for(EngineLock& lock, std::chrono::nanoseconds time,
                           IsOver is_over) HVD_NO_THREAD_SAFETY_ANALYSIS {
  ++waiting_;
  changed_.wait_for(lock.lock_, time, is_over);
  --waiting_;
}

}  // namespace hvd
