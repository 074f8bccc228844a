#include "hvd/engine/engine_lock.h"

namespace hvd {

void EngineMutex::perform(AfterUnlock after) {
  if (after.own_threads) changed_.notify_all();
  if (after.waiters) {
    board_.ring_waiters();
  } else if (after.watchers) {
    board_.ring_watchers();
  }
  if (after.all_workers) {
    board_.ring_all_workers();
  } else {
    if (after.leader) board_.ring_worker(0);
    if (after.worker) board_.ring_worker(board_.self());
  }
  after.ended.clear();
  after.owners.clear();
}

}  // namespace hvd
