#include "hvd/engine/core/engine_lock.h"

namespace hvd {

void EngineMutex::perform(AfterUnlock after) {
  if (after.own_threads) changed_.notify_all();
  if (after.waiters) board_.bells().ring_waiters();
  ring_workers(after);
  after.ended.clear();
  after.owners.clear();
}

void EngineMutex::ring_workers(const AfterUnlock& after) {
  const int self = board_.self();
  const auto ring = [&](int rank) {
    if (rank == self && here_ != nullptr && &here_->mutex_ == this) {
      here_->has_left_out_ = true;
    } else {
      board_.bells().ring_worker(rank);
    }
  };
  if (after.all_workers) {
    for (int rank = 0; rank < board_.ranks(); ++rank) ring(rank);
    return;
  }
  if (after.leader) ring(0);
  if (after.worker) ring(self);
}

}  // namespace hvd
