#pragma once
/// PullExecution runs a batch in which each rank takes what it needs out of the others' inputs, which stay as they are: allgather,
/// alltoall, reducescatter, and broadcast, where all take from the root. Inputs lie in shared memory, or in ordinary memory that is shown
/// to the other ranks (Staging::show); each rank writes its own output alone. The thread that has the turn drives it. It fails with
/// BackendError when memory that was shown cannot be read.

#include <cstdint>

#include "hvd/backend.h"
#include "hvd/negotiation/board.h"
#include "ops/shm/context.h"

namespace hvd {

class PullExecution final : public Execution {
 public:
  PullExecution(ShmContext& context, Batch batch);
  Progress advance() override;

 private:
  /// 32 MiB of cache; in times of MPI's speed without and with, beside MPI's own buffers: 2 ranks, 4 MiB: allgather 0.93 and 1.02, alltoall
  /// 0.90 and 1.13, broadcast 0.87 and 1.22; 4 ranks on 2 cores: alltoall 0.91 and 1.11. (Alone, 2 ranks, 4 MiB: 87 and 93 us.)
  static constexpr std::size_t kLeastStreamed = std::size_t{8} << 20;
  [[nodiscard]] std::uint64_t my_location(const BatchMember& member) const;
  [[nodiscard]] std::uint64_t location_of(const BatchMember& member, std::size_t place) const;
  [[nodiscard]] int index_of(std::size_t place) const { return context_.domain_index(batch_.ranks[place]); }
  // These return false if the process of a rank has ended: then there is nothing left to wait for but that the world fails.
  bool pull();
  bool copy(const BatchMember& member);
  bool take_from_root(const BatchMember& member);
  void give(PieceExchange& exchange, const BatchMember& member);
  bool run(PieceExchange& exchange, const BatchMember& member);
  [[nodiscard]] std::size_t place_of(int rank) const;
  /// Returns whether what ranks get of the batch is so much that its beginning has left the caches before its end is there.
  [[nodiscard]] bool leaves_caches(std::size_t bytes_of_a_rank) const { return bytes_of_a_rank * batch_.ranks.size() >= kLeastStreamed; }
  /// Returns the number as a reader that the rank in this place has for the owner in that one.
  static std::size_t reader_number(std::size_t place, std::size_t owner) { return place < owner ? place : place - 1; }
  bool reduce(const BatchMember& member);

  ShmContext& context_;
  Batch batch_;
  BatchState& state_;
  bool tried_ = false;
  bool pulled_ = false;
  bool readers_are_there_ = true;  ///< this rank helps who reads from it, and does not wait for them at each member
};

}  // namespace hvd
