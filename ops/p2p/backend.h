#pragma once
/// P2pBackend has the collectives on host memory among ranks of several domains. What a domain's
/// ranks share goes through their arenas, as in ShmBackend; between domains travel messages between
/// pairs of ranks, never collectives, so that any number of batches can be under way, nothing
/// blocks, and a failed world can drop what it has begun. Messages are found again by their tag:
/// process set, order of the batch in it, phase. The algorithms are in *_execution.h.
///
/// A rank that is the only one of its domain in the set works on the user's memory and needs no
/// arena. Ranks that have joined take no part; one that is left alone in its domain by them still
/// works in its arena, because its tensors were brought there before anybody knew.
///
/// It owns the wire, the buffers and, between `prepare` and the end of the batch, the staging
/// blocks. Only the thread that has the turn calls the wire. It throws what the wire throws, and
/// BackendError: no more memory to share, or more process sets than the wire has tags for.

#include "hvd/backend.h"
#include "ops/p2p/context.h"
#include "ops/p2p/direct_memory.h"

namespace hvd {

class P2pBackend final : public Backend {
 public:
  /// `wire`: between all ranks of the world, for this backend alone. `arena` may be null where the
  /// domain is one rank.
  P2pBackend(std::unique_ptr<PointToPoint> wire, Topology topology, DomainMemory memory,
             std::shared_ptr<Arena> arena, Board& board, std::shared_ptr<StatsCounters> stats);

  std::string_view name() const override { return context_.wire_name(); }
  /// Returns whether `host_supports` names it, for CPU tensors; any process set.
  bool supports(const BatchTraits& traits) const override;
  std::uint64_t prepare(const BatchTraits& traits, BatchMember& member) override;
  void release(const BatchTraits& traits, std::uint64_t location) noexcept override;
  std::unique_ptr<Execution> launch(Batch batch) override;
  LeaderMemory* leader_memory() override { return &direct_; }
  void look_again() override { context_.exchange().wire().look_again(); }
  bool looks_again() const override { return context_.looks_again(); }
  bool abort() noexcept override;

 private:
  P2pContext context_;
  DirectMemory direct_;
  bool aborted_ = false;
};

}  // namespace hvd
