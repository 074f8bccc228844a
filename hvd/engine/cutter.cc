#include "hvd/engine/cutter.h"

#include <utility>

namespace hvd {

namespace {

constexpr std::uint32_t kMaxOpenBatches = 1;  // more would start batches that could have been fused

}  // namespace

Cutter::Cutter(const EngineParts& parts, NegotiationLog& log, EngineMutex& mutex)
    : parts_(parts), log_(log), mutex_(mutex), board_(*parts.board) {}

void Cutter::cut_if_idle(Transaction& log) {
  const Negotiator& table = log_.table();
  if (!table.has_agreed(Scope::Domain) || board_.open_batches() >= kMaxOpenBatches) return;
  if (board_.can_open(table.next_sequence(), kDataTypes)) {
    log.append(Negotiator::cut_record(Scope::Domain));
  } else {
    mutex_.wake_all_workers();  // a rank has not looked at its results for a long time; whoever departs last cuts
  }
}

bool Cutter::cut_world(const std::function<void()>& announce) {
  const Negotiator& table = log_.table();
  Transaction log(log_, kCutBytes);
  const auto first = table.next_sequence();
  // A domain that takes no part in what is cut needs no room for it.
  const bool opens = table.has_agreed(Scope::World) && table.takes_part_next(Scope::World);
  if (opens && !board_.can_open(first, kDataTypes)) {
    // A rank has not looked at its results for a long time. Said once, or those that can do nothing about it would never sleep.
    if (!std::exchange(told_of_no_room_, true)) mutex_.wake_all_workers();
    return false;
  }
  told_of_no_room_ = false;
  announce();
  log.append(Negotiator::cut_record(Scope::World));
  if (parts_.topology.domain == 0)
    for (auto sequence = first; sequence < table.next_sequence(); ++sequence) open_world_cuts_.push_back({sequence, opens});
  return true;
}

bool Cutter::is_world_idle() {
  std::erase_if(open_world_cuts_, [this](const WorldCut& cut) {
    return !cut.here || board_.is_over(cut.sequence) || board_.batch(cut.sequence).retired.load();
  });
  return open_world_cuts_.empty();
}

void Cutter::retire(const CutBatch& cut) {
  if (!board_.batch(cut.sequence).retired.load(std::memory_order_acquire)) {
    Transaction log(log_, kCutBytes);
    if (board_.retire_batch(cut.sequence, cut.scope == Scope::Domain)) cut_if_idle(log);
    mutex_.wake_waiters();
  }
  board_.depart(cut.sequence, log_.table().local_participants(cut.plan));
  if (cut.scope == Scope::World) mutex_.wake_leader();  // there may be room now for what the root has decided
  if (board_.is_over(cut.sequence)) {
    // A cut may have been put off because the ring had no room. Under the lock, so that whoever puts it off sees this departure, or
    // this rank sees what was put off.
    Transaction log(log_, kCutBytes);
    cut_if_idle(log);
  }
}

}  // namespace hvd
