#pragma once
/// ShmContext is what ShmBackend and its executions share: memory of the domain, the board, and who
/// is where. It owns the staging blocks and refers to the board. It is for the thread that has the
/// turn; `staging` also for those that submit. It fails with BackendError.
// Tested in tests/contract/suite.cc

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "hvd/base/waits.h"
#include "hvd/negotiation/board/board.h"
#include "hvd/topology.h"
#include "ops/shm/memory/staging.h"
#include "ops/shm/piece_exchange.h"

namespace hvd {

class ShmContext {
 public:
  ShmContext(DomainMemory memory, std::shared_ptr<Arena> arena, Board& board, Topology topology)
      : topology_(std::move(topology)),
        staging_(std::move(memory), std::move(arena), topology_.domain_index),
        board_(board) {}

  [[nodiscard]] int rank() const { return topology_.rank; }
  [[nodiscard]] const Topology& topology() const { return topology_; }
  [[nodiscard]] Staging& staging() { return staging_; }
  [[nodiscard]] Board& board() const { return board_; }
  /// Gives the others a moment to complete the batch, about as long as to fall asleep and be woken
  /// takes. Returns whether they have.
  [[nodiscard]] bool linger(const BatchState& batch) const {
    return wait_until([&] { return batch.complete.load(std::memory_order_acquire); }, waits::kBatch,
                      topology_.has_core());
  }
  [[nodiscard]] PieceExchange exchange(bool past_caches) const {
    return PieceExchange(topology_.has_core(), past_caches);
  }
  /// Returns memory for one call of `advance`, kept from one to the next.
  std::byte* scratch(std::size_t bytes) {
    if (scratch_.size() < bytes) scratch_.resize(bytes);
    return scratch_.data();
  }

 private:
  const Topology topology_;
  Staging staging_;
  Board& board_;
  std::vector<std::byte> scratch_;
};

}  // namespace hvd
