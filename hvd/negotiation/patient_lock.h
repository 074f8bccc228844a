#pragma once
/// The board's lock: a mutex in the memory that the ranks of a domain share, with the index of the rank that has it beside it. Its owner
/// may die or be stopped while it has it: who waits for it finds out, and says so. Any thread of the rank.

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/errors.h"

namespace hvd {

/// Makes a mutex for several processes that tells its next owner when the last has died with it.
void make_robust_mutex(pthread_mutex_t& mutex);

/// How long to wait for the lock in silence.
struct LockPatience {
  std::vector<int> ranks;                  ///< global ranks of the domain, for messages
  std::chrono::nanoseconds warn_after{0};  ///< again and again; 0: never
  std::chrono::nanoseconds fail_after{0};  ///< 0: never
};

/// What the lock asks of the board around it, and tells it, when its owner is found dead, or stopped for too long.
struct LockReports {
  std::function<std::optional<int>()> find_dead;   ///< returns the index of a rank that has died, if any has
  std::function<void(const Status&)> set_failure;  ///< ends the world
  std::function<void()> throw_failure = [] {};     ///< throws what has ended the world, if anything has
};

class PatientLock {
 public:
  static constexpr int kNobody = -1;

  /// `mutex` and `owner`, the index of the rank that has it or kNobody, are in shared memory; `self`: this rank's index.
  PatientLock(pthread_mutex_t& mutex, std::atomic<int>& owner, int self, LockReports board)
      : mutex_(mutex), owner_(owner), self_(self), board_(std::move(board)) {}

  /// Before another thread of this rank uses the lock.
  void set_patience(LockPatience patience) { patience_ = std::move(patience); }
  /// As Board::lock and Board::unlock.
  void lock();
  void unlock();

 private:
  void wait();
  void own(int result);
  [[nodiscard]] std::string name_of_rank(int index) const;
  [[nodiscard]] std::string stalled_text(std::chrono::nanoseconds waited) const;

  pthread_mutex_t& mutex_;
  std::atomic<int>& owner_;
  const int self_;
  const LockReports board_;
  LockPatience patience_;
};

}  // namespace hvd
