#pragma once
/// The ports through which repeated operations (hvd/engine/fast_path/fast_path.h) reach memory:
/// blocks that are pinned to an operation. SlotMemory has those of operations within a domain,
/// LeaderMemory those of operations of all ranks of several domains. A backend may implement
/// either; one that does not has no part in the fast path. Any thread calls them, one at a time but
/// for `drop`, `pull` and `finish_reading`, which any may call meanwhile. They own the blocks.
// Tested in tests/ops/shm/pulled_blocks_test.cc, tests/ops/p2p/direct_memory_test.cc

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "hvd/backend.h"
#include "hvd/base/wire.h"

#pragma GCC visibility push(default)
namespace hvd {

/// A FastPathMemory pins a block for each repeated operation.
class FastPathMemory {
 public:
  virtual ~FastPathMemory() = default;
  /// Pins a block of this rank's own that all ranks of the domain see, until `drop`. Returns where
  /// it is, as Backend::prepare would have; none where such an operation cannot be done so.
  virtual std::optional<std::uint64_t> keep(const BatchTraits& traits, std::size_t bytes) = 0;
  /// Gives a pinned block back.
  virtual void drop(std::uint64_t location) noexcept = 0;
  /// Returns whether the block may be filled: not while others read what it held for a batch.
  virtual bool is_free(std::uint64_t location) = 0;
  /// Returns the address of a pinned block of the rank with this index in the domain; null if the
  /// location is no pinned block's.
  virtual std::byte* kept(int index, std::uint64_t location) = 0;
};

/// A SlotMemory does operations within a domain: one rank for all, or each rank its part out of
/// blocks that are leased for a round (hvd/engine/fast_path/pulled_rounds.h).
class SlotMemory : public FastPathMemory {
 public:
  /// Does the operation for all ranks of the set, in its order. Their blocks, which hold inputs of
  /// `count` elements, then hold results: Allgather all inputs one after the other; Alltoall the
  /// rows for the rank, from each; all others (Reducescatter too) `count` elements. `parts`: of
  /// Alltoall, how many elements each rank gets from each.
  virtual void run_for_all(const BatchTraits& traits, std::int64_t count,
                           std::span<std::byte* const> blocks,
                           std::span<const std::int64_t> parts) = 0;

  /// The most ranks that take part in a round with leased blocks.
  static constexpr std::size_t kMostPullers = 11;
  /// Leases a block that holds an input of so many bytes for one round. Returns where it is, as
  /// Backend::prepare would have; none if there is no room. A rank whose input nobody reads leases
  /// 0 bytes.
  virtual std::optional<std::uint64_t> lend(std::size_t bytes) = 0;
  /// Returns whether the location is what `lend` has returned, on whatever rank.
  virtual bool is_lent(std::uint64_t location) = 0;
  /// Ends a lease: the round is over for this rank, the block's owner. The block is leased again
  /// once so many ranks have called `finish_reading`, and no batch reads from it.
  virtual void take_back(std::uint64_t location, std::uint32_t readers) noexcept = 0;
  /// Frees the blocks whose lease is over and that nobody reads any more.
  virtual void trim() noexcept = 0;
  /// Writes this rank's result to `output`, with the same bits as a batch would. `blocks`: those of
  /// the set's ranks, in its order; of a Broadcast the root's alone. `parts`: of Alltoall and
  /// Reducescatter, how many elements each rank gets from each.
  virtual void pull(const BatchTraits& traits, std::int64_t count,
                    std::span<const std::byte* const> blocks, std::span<const std::int64_t> parts,
                    void* output) = 0;
  /// Says that this rank needs these blocks no more.
  virtual void finish_reading(std::span<const std::byte* const> blocks) noexcept = 0;
};

/// A LeaderMemory does operations of all ranks of several domains, in two steps: a domain's
/// contribution, and the result from all of them.
class LeaderMemory : public FastPathMemory {
 public:
  /// Returns the most that any domain contributes to such an operation, in bytes.
  virtual std::size_t contribution_bytes(const BatchTraits& traits, std::int64_t count) = 0;
  /// Appends to `message` what this domain contributes. `blocks`: of its ranks, as in
  /// SlotMemory::run_for_all.
  virtual void contribute(const BatchTraits& traits, std::int64_t count,
                          std::span<const std::byte* const> blocks, Bytes& message) = 0;
  /// Does the operation for all ranks of this domain. `contributions`: by domain, this one's too.
  /// `parts`: as in SlotMemory::run_for_all. Throws WireError if one has a wrong length.
  virtual void combine(const BatchTraits& traits, std::int64_t count,
                       std::span<const std::span<const std::byte>> contributions,
                       std::span<std::byte* const> blocks, std::span<const std::int64_t> parts) = 0;
};

}  // namespace hvd
#pragma GCC visibility pop
