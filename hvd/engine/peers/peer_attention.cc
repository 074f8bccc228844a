#include "hvd/engine/peers/peer_attention.h"

#include <utility>

namespace hvd {

void PeerAttention::begin_to_look() {
  lookers_.fetch_add(1);
  update(false);
}

void PeerAttention::count_open(bool elsewhere, int by) {
  // Written under the mutex alone. What becomes more is seen before `lookers_` is read: who ends to
  // look does it the other way round.
  const std::size_t now = open_.load(std::memory_order_relaxed) + static_cast<std::size_t>(by);
  open_.store(now, by > 0 ? std::memory_order_seq_cst : std::memory_order_relaxed);
  if (elsewhere) elsewhere_.fetch_add(static_cast<std::size_t>(by));
}

void PeerAttention::set_work(bool work) {
  if (work != has_work_.load(std::memory_order_relaxed)) has_work_.store(work);
}

bool PeerAttention::update(bool for_room) {
  std::uint32_t when = Rings::kNobody;
  if (lookers_.load() == 0) {
    if (open_.load() > 0) when |= Rings::kForFrames;
    if (for_room) when |= Rings::kForRoom;
  }
  if (when == call_) return false;
  const std::uint32_t before = std::exchange(call_, when);
  parts_.board->rings().set_call(when);
  return (when & ~before) != 0;
}

}  // namespace hvd
