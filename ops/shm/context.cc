#include "ops/shm/context.h"

#include <algorithm>
#include <utility>

#include "hvd/base/waits.h"

namespace hvd {

ShmContext::ShmContext(DomainMemory memory, std::shared_ptr<Arena> arena, Board& board, Topology topology)
    : topology_(std::move(topology)), staging_(std::move(memory), std::move(arena), topology_.domain_index), board_(board) {}

int ShmContext::domain_index(int rank) const {
  const auto& ranks = topology_.domain_ranks;
  return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

bool ShmContext::linger(const BatchState& batch) const {
  return wait_until([&] { return batch.complete.load(std::memory_order_acquire); }, waits::kBatch, topology_.has_core());
}

std::byte* ShmContext::scratch(std::size_t bytes) {
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  return scratch_.data();
}

}  // namespace hvd
