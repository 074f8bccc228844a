#pragma once
/// The board's lock: a mutex in the memory that the ranks of a domain share, with the index of the
/// rank that has it beside it. Its owner may die or be stopped while it has it: who waits for it
/// finds out, and says so. Any thread of the rank.

#include <pthread.h>

#include <atomic>
#include <string_view>

#include "hvd/negotiation/board/patience.h"

namespace hvd {

/// Makes a mutex for several processes that tells its next owner when the last has died with it.
void make_robust_mutex(pthread_mutex_t& mutex);

class PatientLock {
 public:
  static constexpr int kNobody = PatientWait::kNobody;

  /// `mutex`, `owner`, the index of the rank that has it or kNobody, and `awaited`, that of the
  /// rank which the owner waits for meanwhile, are in shared memory; `self`: this rank's index.
  PatientLock(pthread_mutex_t& mutex, std::atomic<int>& owner, std::atomic<int>& awaited, int self,
              const Patience& patience, const BoardReports& board)
      : mutex_(mutex),
        owner_(owner),
        awaited_(awaited),
        self_(self),
        patience_(patience),
        board_(board) {}

  /// Locks and unlocks, as Board::lock and Board::unlock say.
  void lock();
  void unlock();
  /// Returns a wait of this rank for another one. `how` that keeps the others, for messages.
  [[nodiscard]] PatientWait make_wait(std::string_view how) const {
    return {patience_, board_, how};
  }
  /// This rank waits for that one. If it has the lock, that one is what keeps those who wait for
  /// it; kNobody: it waits no more.
  void await(int index) {
    if (owner_.load(std::memory_order_relaxed) == self_)
      awaited_.store(index, std::memory_order_relaxed);
  }

 private:
  void wait();
  void own(int result);
  [[nodiscard]] int culprit() const;

  pthread_mutex_t& mutex_;
  std::atomic<int>& owner_;
  std::atomic<int>& awaited_;
  const int self_;
  const Patience& patience_;
  const BoardReports& board_;
};

}  // namespace hvd
