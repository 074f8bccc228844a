#pragma once
/// P2pContext is what P2pBackend and its executions (*_execution.h) share: messages between ranks,
/// memory of the domain, who is where, and the tags by which messages are found again: process set,
/// order of the batch in it, phase. It owns the wire and the staging blocks, and refers to the
/// board. It is for the thread that has the turn; `staging` also for those that submit. It fails
/// with BackendError.
// Tested in tests/ops/p2p/backend_test.cc

#include <memory>
#include <span>

#include "hvd/backend.h"
#include "hvd/negotiation/board/board.h"
#include "hvd/stats.h"
#include "hvd/topology.h"
#include "ops/p2p/exchange.h"
#include "ops/partition.h"
#include "ops/shm/memory/staging.h"

namespace hvd {

class P2pContext {
 public:
  /// `wire`: between all ranks of the world, for this alone. `arena` may be null where the domain
  /// is one rank.
  P2pContext(std::unique_ptr<PointToPoint> wire, Topology topology, DomainMemory memory,
             std::shared_ptr<Arena> arena, Board& board, std::shared_ptr<StatsCounters> stats);

  [[nodiscard]] const Topology& topology() const { return topology_; }
  [[nodiscard]] int rank() const { return topology_.rank; }
  /// Returns whether this rank speaks for its domain, and so drives the wire, every 10 ms at least,
  /// also while nothing of its own is under way.
  [[nodiscard]] bool leads() const { return topology_.domain_index == 0; }
  [[nodiscard]] std::string_view wire_name() const { return exchange_.wire().name(); }
  [[nodiscard]] bool looks_again() const { return exchange_.wire().looks_again(); }
  [[nodiscard]] Exchange& exchange() { return exchange_; }
  [[nodiscard]] Staging& staging() { return staging_; }
  [[nodiscard]] Board& board() const { return board_; }
  [[nodiscard]] StatsCounters& stats() const { return *stats_; }
  [[nodiscard]] Arrangement arrange(std::span<const int> ranks) const;
  [[nodiscard]] int domain_of(int rank) const {
    return topology_.domain_of_rank[static_cast<std::size_t>(rank)];
  }
  /// Returns the tag of messages of phase 0 or 1 of a batch. Throws BackendError if there are more
  /// process sets than the wire has tags for.
  [[nodiscard]] int tag(const Batch& batch, unsigned phase) const;

 private:
  const Topology topology_;
  Staging staging_;
  Board& board_;
  std::shared_ptr<StatsCounters> stats_;
  unsigned order_bits_ = 0, set_bits_ = 0;  // of a tag
  Exchange exchange_;
};

}  // namespace hvd
