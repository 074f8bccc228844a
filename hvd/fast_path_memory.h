#pragma once
/// FastPathMemory is the port through which the fast path (hvd/engine/fast_path.h) works: blocks that all ranks of the domain see, in which
/// one of them does a small operation for all. A backend may implement it; one that does not has no part in the fast path.
/// Any thread calls it, one at a time. It owns the blocks.

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
