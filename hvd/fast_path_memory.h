#pragma once
/// FastPathMemory is the port through which the fast path (hvd/engine/fast_path.h) works: blocks that all ranks of the domain see, in which
/// one of them does a small operation for all, or from which each takes what it needs. A backend may implement it; one that does not has
/// no part in the fast path. Any thread calls it, one at a time but for `drop`, `pull` and `finish_reading`, which any may call meanwhile.
/// It owns the blocks.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "hvd/backend.h"
#include "hvd/base/wire.h"
#include "hvd/errors.h"

#pragma GCC visibility push(default)
namespace hvd {

/// A FastPathMemory keeps a block for each small operation that comes back, and does the operation there.
class FastPathMemory {
 public:
  virtual ~FastPathMemory() = default;
  /// Returns where a block of this rank's own is that all ranks of the domain see, as Backend::prepare would have returned it; it stays
  /// until `drop`. None where such an operation cannot be done so.
  virtual std::optional<std::uint64_t> keep(const BatchTraits& traits, std::size_t bytes) = 0;
  /// Gives a kept block back.
  virtual void drop(std::uint64_t location) noexcept = 0;
  /// Returns whether the block may be filled: not while others read from it what it held for a batch.
  virtual bool is_free(std::uint64_t location) = 0;
  /// Returns the address of a kept block of the rank with this index in the domain; null if the location is no kept block's.
  virtual std::byte* kept(int index, std::uint64_t location) = 0;

  // ---- of Backend::fast_path_memory
  /// Does the operation for all ranks of the set, in its order. Their blocks, which hold inputs of `count` elements, then hold results:
  /// Allgather all inputs one after the other; Alltoall the rows for the rank, from each; all others (Reducescatter too) `count` elements.
  /// `parts`: of Alltoall, how many elements each rank gets from each.
  virtual void run_for_all(const BatchTraits& /*traits*/, std::int64_t /*count*/, std::span<std::byte* const> /*blocks*/,
                           std::span<const std::int64_t> /*parts*/) {
    throw BackendError("not an operation within a domain");
  }

  // ---- of Backend::fast_path_memory: rounds in which each rank takes what it needs from the others' blocks (hvd/engine/pulled_rounds.h)
  /// So many ranks at most take part in one.
  static constexpr std::size_t kMostPullers = 11;
  /// Returns where a block is that holds an input of so many bytes for one round, as Backend::prepare would have returned it. None if there
  /// is no room. Of no bytes: what a rank says whose input nobody reads.
  virtual std::optional<std::uint64_t> lend(std::size_t /*bytes*/) { return std::nullopt; }
  /// Returns whether the location is what `lend` has returned, on whatever rank.
  virtual bool is_lent(std::uint64_t /*location*/) { return false; }
  /// The block's round is over for this rank, its owner. It is lent again once so many ranks have called `finish_reading`, and no batch
  /// reads from it.
  virtual void take_back(std::uint64_t /*location*/, std::uint32_t /*readers*/) noexcept {}
  /// Frees what was lent and is read by nobody any more.
  virtual void trim() noexcept {}
  /// Writes this rank's result to `output`, with the same bits as a batch would. `blocks`: those of the set's ranks, in its order; of a
  /// Broadcast the root's alone. `parts`: of Alltoall and Reducescatter, how many elements each rank gets from each.
  virtual void pull(const BatchTraits& /*traits*/, std::int64_t /*count*/, std::span<const std::byte* const> /*blocks*/,
                    std::span<const std::int64_t> /*parts*/, void* /*output*/) {
    throw BackendError("not an operation whose ranks take what they need");
  }
  /// This rank needs these blocks no more.
  virtual void finish_reading(std::span<const std::byte* const> /*blocks*/) noexcept {}

  // ---- of Backend::direct_memory
  /// Returns the most that any domain contributes to such an operation, in bytes.
  virtual std::size_t contribution_bytes(const BatchTraits& /*traits*/, std::int64_t /*count*/) {
    throw BackendError("not an operation between domains");
  }
  /// Appends to `message` what this domain contributes. `blocks`: of its ranks, as in `run_for_all`.
  virtual void contribute(const BatchTraits& /*traits*/, std::int64_t /*count*/, std::span<std::byte* const> /*blocks*/,
                          Bytes& /*message*/) {
    throw BackendError("not an operation between domains");
  }
  /// Does the operation for all ranks of this domain. `contributions`: by domain, this one's too. Throws WireError if one of them is not
  /// as long as it must be.
  virtual void combine(const BatchTraits& /*traits*/, std::int64_t /*count*/, std::span<const std::span<const std::byte>> /*contributions*/,
                       std::span<std::byte* const> /*blocks*/) {
    throw BackendError("not an operation between domains");
  }
};

}  // namespace hvd
#pragma GCC visibility pop
