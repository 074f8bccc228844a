#pragma once
/// The two kinds of execution of a ShmBackend: gets, and an allreduce whose chunks are claimed. The
/// thread that has the turn drives them.
// Tested in tests/ops/shm/peer_memory_test.cc, tests/ops/shm/staging_mpi_test.cc,
// tests/contract/cases/allreduce_cases.cc

#include <cstdint>
#include <memory>

#include "hvd/backend.h"
#include "hvd/negotiation/board/board.h"
#include "hvd/routes.h"
#include "ops/shm/context.h"

namespace hvd {

/// PullExecution runs a batch of one-sided gets: each rank takes what it needs out of the others'
/// inputs, which stay as they are: allgather, alltoall, reducescatter, and broadcast, where all
/// take from the root. Inputs lie in shared memory, or in ordinary memory that is exposed to the
/// other ranks (Staging::show); each rank writes its own output alone. It fails with BackendError
/// when memory that was exposed cannot be read.
class PullExecution final : public Execution {
 public:
  PullExecution(ShmContext& context, Batch batch);
  Progress advance() override;
  [[nodiscard]] std::optional<Route> route() const override { return Route::EachItsPart; }
  /// Returns that of the first tensor's input, of a Broadcast the root's; it may differ for empty
  /// ones and those of other ranks.
  [[nodiscard]] Access access() const override;

 private:
  [[nodiscard]] std::uint64_t my_location(const BatchMember& member) const;
  [[nodiscard]] std::uint64_t location_of(const BatchMember& member, std::size_t place) const;
  [[nodiscard]] int index_of(std::size_t place) const {
    return context_.topology().index_here(batch_.ranks[place]);
  }
  // These return false if the process of a rank has ended: then there is nothing left to wait for
  // but that the world fails.
  bool pull();
  bool copy(const BatchMember& member);
  bool take(PieceExchange& exchange, const BatchMember& member, std::size_t place,
            std::size_t skipped, std::span<std::byte> to, bool past_caches);
  void give(PieceExchange& exchange, const BatchMember& member);
  bool run(PieceExchange& exchange, const BatchMember& member);
  [[nodiscard]] std::size_t place_of(int rank) const;
  /// Returns whether what ranks get of the batch is so much that its beginning has left the caches
  /// before its end is there.
  [[nodiscard]] bool leaves_caches(std::size_t bytes_of_a_rank) const {
    return routes::is_past_caches(bytes_of_a_rank * batch_.ranks.size());
  }
  /// Returns the number as a reader that the rank in this place has for the owner in that one.
  static std::size_t reader_number(std::size_t place, std::size_t owner) {
    return place < owner ? place : place - 1;
  }
  bool reduce(const BatchMember& member);

  ShmContext& context_;
  Batch batch_;
  BatchState& state_;
  bool tried_ = false;
  bool pulled_ = false;
  bool readers_are_there_ = true;  ///< this rank helps its readers, and waits for no member's
};

/// Makes an allreduce among ranks that share memory: whatever rank has time claims chunks of the
/// batch, reduces them in rank order, and writes the results into every rank's block, or its own
/// straight to the output. It fails with BackendError.
std::unique_ptr<Execution> make_claimed_execution(ShmContext& context, Batch batch);

}  // namespace hvd
