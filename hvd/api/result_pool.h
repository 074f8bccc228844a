#pragma once
/// A ResultPool has the memory for results that are new each time: when one ends, its block is
/// cached for the next of about that size, which then needs no new pages of the system. One that a
/// child sees which was forked meanwhile waits until that has ended. Any thread; blocks may end in
/// any, also after the pool, and in a process that was forked from this one, where nothing happens
/// then. The pool owns what it keeps; the blocks in use belong to their users. Where it has no room
/// it says so by null, and ordinary memory is to be taken.

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "hvd/base/process.h"
#include "hvd/base/visible.h"

namespace hvd {

/// The source of a pool's blocks. Any thread. It lives until the last block has been given back.
class ResultMemory {
 public:
  virtual ~ResultMemory() = default;
  /// Returns `bytes`, a multiple of the size of a page, or null where there is no room.
  virtual std::byte* allocate(std::size_t bytes) = 0;
  /// Gives block and pages back to the system.
  virtual void give_back(std::byte* block, std::size_t bytes) noexcept = 0;
  /// Returns whether a child that is forked from this process sees later writes to the blocks.
  [[nodiscard]] virtual bool is_seen_by_children() const { return false; }
};

class HVD_BETWEEN_LIBRARIES ResultPool : public std::enable_shared_from_this<ResultPool> {
 public:
  /// Results of fewer bytes have ordinary memory, which the C library recycles well enough.
  static constexpr std::size_t kLeastBytes = 256 << 10;
  struct Limits {
    std::size_t kept_bytes;  ///< of blocks that nobody uses
    std::size_t all_bytes;   ///< of these and those in use
  };

  ResultPool(std::shared_ptr<ResultMemory> memory, Limits limits);
  ~ResultPool();
  ResultPool(const ResultPool&) = delete;
  ResultPool& operator=(const ResultPool&) = delete;

  /// Returns uninitialised memory of at least `bytes`, aligned to a page. Null for what is small,
  /// what is larger than all that the pool may keep, and where blocks in use leave no room.
  std::shared_ptr<void> allocate(std::size_t bytes);
  [[nodiscard]] std::size_t kept_bytes() const;

 private:
  struct Block {
    std::byte* memory;
    std::size_t bytes;
  };
  using Blocks = std::list<Block>;
  /// A block that a child still sees.
  struct Seen {
    Block block;
    std::uint64_t born, ended;  // the last forks before
  };
  std::byte* take(std::size_t& bytes);
  std::byte* make(std::size_t bytes);
  [[nodiscard]] Blocks drop_oldest(std::size_t until_kept);
  void give_back(const Blocks& blocks) noexcept;
  std::shared_ptr<void> owned(Block block);
  void end(const Seen& block) noexcept;
  Blocks keep(Blocks& back);
  Blocks keep_unseen();

  const std::shared_ptr<ResultMemory> memory_;
  const Limits limits_;
  const MadeHere made_;
  mutable std::mutex mutex_;
  Blocks kept_;                                            // the oldest first
  std::multimap<std::size_t, Blocks::iterator> by_bytes_;  // of `kept_`
  std::vector<Seen> seen_;
  std::size_t kept_bytes_ = 0, all_bytes_ = 0;
};

}  // namespace hvd
