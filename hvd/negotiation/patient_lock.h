#pragma once
/// The board's lock: a mutex in the memory that the ranks of a domain share, with the index of the rank that has it beside it. Its owner
/// may die or be stopped while it has it: who waits for it finds out, and says so. Any thread of the rank.

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace hvd {

class Board;

/// Makes a mutex for several processes that tells its next owner when the last has died with it.
void make_robust_mutex(pthread_mutex_t& mutex);

/// How long to wait for the lock in silence.
struct LockPatience {
  std::vector<int> ranks;                  ///< global ranks of the domain, for messages
  std::chrono::nanoseconds warn_after{0};  ///< again and again; 0: never
  std::chrono::nanoseconds fail_after{0};  ///< 0: never
};

class PatientLock {
 public:
  /// `mutex` and `owner` are in shared memory. The board's failure is set when the lock's owner is found dead, or stopped for too long.
  PatientLock(Board& board, pthread_mutex_t& mutex, std::atomic<int>& owner) : board_(board), mutex_(mutex), owner_(owner) {}

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

  Board& board_;
  pthread_mutex_t& mutex_;
  std::atomic<int>& owner_;
  LockPatience patience_;
};

}  // namespace hvd
