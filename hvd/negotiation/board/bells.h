#pragma once
/// The bells of a board: words on which threads of the domain's ranks sleep, and how whoever has
/// news for them learns that it must ring. Any thread. Nothing fails.
// Tested in tests/hvd/negotiation/board_test.cc

#include <atomic>
#include <chrono>
#include <cstdint>

#include "hvd/base/futex.h"
#include "hvd/negotiation/board/board_view.h"

namespace hvd {

class Bells {
 public:
  explicit Bells(const BoardView& board) : board_(board) {}

  /// The word that user threads waiting for a result sleep on, all ranks together.
  FutexWord& wait_doorbell() const;
  /// Wakes the sleepers of `wait_doorbell`, if any, and the coordination threads that watch it.
  void ring_waiters();
  /// Marks a thread that is going to wait for `wait_doorbell` for as long as it lives. It must look
  /// for results once more then.
  class Watcher {
   public:
    explicit Watcher(const Bells& bells);
    ~Watcher();
    Watcher(const Watcher&) = delete;
    Watcher& operator=(const Watcher&) = delete;

   private:
    std::atomic<std::uint32_t>& watchers_;
  };
  /// Marks the coordination thread of this rank likewise: whoever rings `wait_doorbell` rings its
  /// `work_doorbell` too. It must look for results once more before it sleeps. One for each rank.
  class WorkerWatch {
   public:
    explicit WorkerWatch(const Bells& bells);
    ~WorkerWatch();
    WorkerWatch(const WorkerWatch&) = delete;
    WorkerWatch& operator=(const WorkerWatch&) = delete;

   private:
    const BoardView board_;
    const Watcher watcher_;
  };
  /// Returns, after an arrival, whether somebody watches the bell, and may have looked before it.
  [[nodiscard]] bool has_watchers() const;
  /// The same as `ring_waiters`, after `give_results`, for threads that look for results
  /// themselves: it costs nothing where none of them watches the bell.
  void ring_watchers();
  /// Sleeps on `wait_doorbell` unless it has rung since `seen`.
  void sleep_waiting(std::uint32_t seen, std::chrono::nanoseconds timeout);
  /// The word that the coordination thread of `rank` sleeps on.
  FutexWord& work_doorbell(int rank) const;
  void ring_worker(int rank);
  void ring_all_workers();
  void sleep_working(std::uint32_t seen, std::chrono::nanoseconds timeout);

  /// The leader: a thread of it looks at arrivals from now on, or will do so once more.
  void set_leader_looks(bool looks);
  /// Returns, after an arrival, whether the leader sees it without being woken.
  [[nodiscard]] bool leader_looks() const;

 private:
  const BoardView board_;
};

}  // namespace hvd
