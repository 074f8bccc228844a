#pragma once
/// PulledBlocks are this rank's blocks of one-sided rounds (hvd/fast_path_memory.h): its input lies
/// in one for one round, and each rank that is to have something of it gets that itself. A block
/// belongs to no operation: it is leased for a round, and again once all have said that they have
/// read it, however late that is, and whatever has become of the operation. So two of a size serve
/// a repeated operation, they stay in the caches, and a loop of many names needs no more of them.
/// One thread at a time; `pull` and `finish_reading` any. It owns the blocks, which lie in the
/// arena. Where there is no room it leases none.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "hvd/backend.h"
#include "ops/shm/memory/staging.h"

namespace hvd {

class PulledBlocks {
 public:
  /// The most bytes of all blocks together.
  static constexpr std::size_t kMostBytes = std::size_t{32} << 20;
  using IsOver = std::function<bool(std::uint64_t sequence)>;

  PulledBlocks(Staging& staging, IsOver is_over)
      : staging_(staging), is_over_(std::move(is_over)) {}

  /// Returns where a block of so many bytes is; none if there is no room.
  std::optional<std::uint64_t> lend(std::size_t bytes);
  /// The block's round is over for this rank. It is leased again once so many have finished
  /// reading, and no batch reads from it.
  void take_back(std::uint64_t location, std::uint32_t readers) noexcept;
  /// Gives the arena back what nobody reads.
  void trim() noexcept;

  /// Copies this rank's part of the operation to `output` from the blocks of all ranks of the set,
  /// in its order, or of the root alone. `parts`: as SlotMemory::pull says.
  static void pull(const BatchTraits& traits, std::int64_t count,
                   std::span<const std::byte* const> blocks, std::span<const std::int64_t> parts,
                   void* output);
  static void finish_reading(std::span<const std::byte* const> blocks) noexcept;

 private:
  struct Block {
    std::uint64_t location;  // of the input; what the readers write lies before it
    std::size_t bytes;
    std::uint32_t readers;
    bool is_lent;
  };
  bool is_free(const Block& block);
  std::optional<std::uint64_t> lend_free(std::size_t bytes);
  std::optional<std::uint64_t> make(std::size_t bytes);

  Staging& staging_;
  IsOver is_over_;
  std::vector<Block> blocks_;  // what was returned last is the last
  std::size_t all_bytes_ = 0;
};

}  // namespace hvd
