#include "hvd/negotiation/board/bells.h"

#include "hvd/negotiation/board/layout.h"

namespace hvd {

namespace {

void ring(FutexWord& bell, const std::atomic<std::uint32_t>& sleepers) {
  bell.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(bell);
}

void sleep_on(FutexWord& bell, std::atomic<std::uint32_t>& sleepers, std::uint32_t seen,
              std::chrono::nanoseconds timeout) {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (bell.load(std::memory_order_seq_cst) == seen) futex_wait(bell, seen, timeout);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace

void Bells::set_leader_looks(bool looks) {
  board_.header().leader_looks.store(looks ? 1 : 0, std::memory_order_relaxed);
  full_fence();  // between that and the last look, as in `leader_looks`
}
bool Bells::leader_looks() const {
  full_fence();
  return board_.header().leader_looks.load(std::memory_order_relaxed) != 0;
}

FutexWord& Bells::wait_doorbell() const { return board_.header().wait_doorbell; }
void Bells::ring_waiters() {
  ring(board_.header().wait_doorbell, board_.header().wait_sleepers);
  if (board_.header().watching_workers.load(std::memory_order_seq_cst) == 0) return;
  for (int rank = 0; rank < board_.ranks(); ++rank)
    if (board_.area(rank).watches.load(std::memory_order_seq_cst) != 0) ring_worker(rank);
}
Bells::Watcher::Watcher(const Bells& bells) : watchers_(bells.board_.header().watchers) {
  watchers_.fetch_add(1, std::memory_order_seq_cst);
  full_fence();  // between that and the look for results, as in `ring_watchers`
}
Bells::Watcher::~Watcher() { watchers_.fetch_sub(1, std::memory_order_relaxed); }
Bells::WorkerWatch::WorkerWatch(const Bells& bells)
    : board_([&bells] {
        bells.board_.area(bells.board_.self()).watches.store(1, std::memory_order_seq_cst);
        bells.board_.header().watching_workers.fetch_add(1, std::memory_order_seq_cst);
        return bells.board_;
      }()),
      watcher_(bells) {}
Bells::WorkerWatch::~WorkerWatch() {
  board_.header().watching_workers.fetch_sub(1, std::memory_order_relaxed);
  board_.area(board_.self()).watches.store(0, std::memory_order_relaxed);
}
bool Bells::has_watchers() const {
  full_fence();  // between what came and the look: a watcher counts itself, then looks for it
  return board_.header().watchers.load(std::memory_order_relaxed) > 0;
}
void Bells::ring_watchers() {
  if (has_watchers()) ring_waiters();
}
void Bells::sleep_waiting(std::uint32_t seen, std::chrono::nanoseconds timeout) {
  sleep_on(board_.header().wait_doorbell, board_.header().wait_sleepers, seen, timeout);
}
FutexWord& Bells::work_doorbell(int rank) const { return board_.area(rank).work_doorbell; }
void Bells::ring_worker(int rank) {
  ring(board_.area(rank).work_doorbell, board_.area(rank).work_sleepers);
}
void Bells::ring_all_workers() {
  for (int rank = 0; rank < board_.ranks(); ++rank) ring_worker(rank);
}
void Bells::sleep_working(std::uint32_t seen, std::chrono::nanoseconds timeout) {
  sleep_on(board_.area(board_.self()).work_doorbell, board_.area(board_.self()).work_sleepers, seen,
           timeout);
}

}  // namespace hvd
