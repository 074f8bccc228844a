#pragma once
/// This header has the memory that every rank of the domain sees. `DomainMemory` is the map: it
/// says where each rank's arena begins in this process. `Arena` hands out blocks of this rank's
/// own; any thread may use it. The addresses are reserved at once and take memory when first used;
/// freed blocks are kept for the next tensor of that size, as their pages are already there, until
/// the arena is trimmed. Once the world has failed nothing is given back, and nothing more is
/// handed out: a rank that was stopped and goes on writes to where it was about to, be that a
/// batch's block or a user's. It fails with BackendError when the reserved addresses are used up,
/// or the world has failed.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace hvd {

struct DomainMemory {
  std::span<std::byte> board;
  std::vector<std::span<std::byte>> arenas;  ///< by the rank's index in the domain
  std::shared_ptr<void> owner;               ///< unmaps when released
  std::vector<pid_t> processes;  ///< by index, of the ranks; empty where all are of this process
  bool direct_copies = false;    ///< the ranks may read one another's ordinary memory
  bool slow_copies = false;  ///< but copies by way of shared memory that is in the cache are faster
};

class Arena {
 public:
  /// `has_failed`: whether its world has; empty where no other rank writes to the memory.
  explicit Arena(std::span<std::byte> memory, std::function<bool()> has_failed = {});

  /// Returns at least `bytes`, aligned to 64 (4096 from 64 KiB on). Throws BackendError.
  std::byte* allocate(std::size_t bytes);
  /// Returns the same, or null instead of throwing. Never touches the memory: it may be a device's.
  std::byte* try_allocate(std::size_t bytes);
  /// Returns how many bytes are free now that were not.
  std::size_t free(void* block) noexcept;
  /// Gives the pages of what is free back to the system, for all ranks, and those of the blocks
  /// that are used now when they are freed: they are new ones, of zeros, when they are handed out
  /// again. Of a shared mapping alone.
  void trim() noexcept;
  /// Returns how many bytes a block takes.
  [[nodiscard]] std::size_t size_of(const void* block) const;

  [[nodiscard]] bool contains(const void* address) const {
    return address >= memory_.data() && address < memory_.data() + memory_.size();
  }
  [[nodiscard]] std::uint64_t offset(const void* address) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(address) - memory_.data());
  }
  [[nodiscard]] std::byte* at(std::uint64_t offset) const { return memory_.data() + offset; }
  [[nodiscard]] std::size_t used_bytes() const;
  [[nodiscard]] bool is_over() const { return has_failed_ && has_failed_(); }

 private:
  std::span<std::byte> memory_;
  const std::function<bool()> has_failed_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_by_offset_;     // offset -> bytes
  std::multimap<std::size_t, std::size_t> free_by_size_;  // bytes -> offset
  struct Used {
    std::size_t bytes;
    std::uint64_t trims;  ///< how many there had been
  };
  std::map<std::size_t, Used> used_;  // by offset
  std::uint64_t trims_ = 0;
  void give_pages_back(std::size_t offset, std::size_t bytes) const noexcept;
  void insert_free(std::size_t offset, std::size_t bytes);
  void erase_free(std::map<std::size_t, std::size_t>::iterator block);
};

}  // namespace hvd
