#pragma once
/// Collectives on host memory among ranks of several domains. What a domain's ranks share goes through their arenas, as in
/// ShmBackend; between domains travel MPI messages between pairs of ranks, never collectives, so that any number of batches can be
/// under way, nothing blocks, and a failed world can drop what it has begun. Messages are found again by their tag: process set, order
/// of the batch in it, phase. A rank that is the only one of its domain in the set works on the user's memory and needs no arena.
/// Ranks that have joined take no part; one that is left alone in its domain by them still works in its arena, because its tensors were
/// brought there before anybody knew.
/// The algorithms: mpi_*_execution.h.
/// Owns the communicator, the buffers and, between `prepare` and the end of the batch, the staging blocks. Calls MPI from the driver
/// only (MPI_THREAD_SERIALIZED). Throws BackendError: MPI's own words, or the arena full.

#include "hvd/backend.h"
#include "hvd/negotiation/board.h"
#include "hvd/stats.h"
#include "hvd/topology.h"
#include "ops/mpi/exchange.h"
#include "ops/partition.h"
#include "ops/shm/staging.h"

namespace hvd {

class MpiBackend final : public Backend {
 public:
  /// `comm`: all ranks of the world, in their order, for this backend alone. `arena` may be null where the domain is one rank.
  MpiBackend(MpiComm comm, Topology topology, DomainMemory memory, std::shared_ptr<Arena> arena, Board& board,
             std::shared_ptr<StatsCounters> stats);

  std::string_view name() const override { return "mpi"; }
  /// What `host_supports` names, of CPU tensors; any process set.
  bool supports(const BatchTraits& traits) const override;
  std::uint64_t prepare(const BatchTraits& traits, BatchMember& member) override;
  void release(const BatchTraits& traits, std::uint64_t location) noexcept override;
  std::unique_ptr<Execution> launch(Batch batch) override;
  void abort() noexcept override;

  // ---- for the executions
  [[nodiscard]] Exchange& exchange() { return exchange_; }
  [[nodiscard]] Staging& staging() { return staging_; }
  [[nodiscard]] Board& board() const { return board_; }
  [[nodiscard]] StatsCounters& stats() const { return *stats_; }
  [[nodiscard]] Arrangement arrange(std::span<const int> ranks) const;
  [[nodiscard]] int domain_index(int rank) const;
  /// Of messages of phase 0 or 1 of a batch.
  [[nodiscard]] int tag(const Batch& batch, unsigned phase) const;

 private:
  const Topology topology_;
  Staging staging_;
  Board& board_;
  std::shared_ptr<StatsCounters> stats_;
  unsigned order_bits_ = 0, set_bits_ = 0;  // of a tag
  Exchange exchange_;
  bool aborted_ = false;
};

}  // namespace hvd
