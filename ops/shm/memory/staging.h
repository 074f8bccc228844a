#pragma once
/// Staging brings a tensor into memory that every rank of the domain sees, and back. A location
/// says where it is: memory of the user inside this rank's arena, or a block of staging, which is
/// owned here until it is released: in the arena, or where that is full, in the overflow. Any
/// thread may use it. It fails with BackendError when the system has no more memory to share.

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "hvd/routes.h"
#include "ops/shm/memory/arena.h"
#include "ops/shm/memory/overflow.h"
#include "ops/shm/memory/peer_memory.h"
#include "ops/shm/memory/relay.h"

namespace hvd {

class Staging {
 public:
  /// `self`: this rank's index in the domain. `arena` may be null where no memory is shared.
  Staging(DomainMemory memory, std::shared_ptr<Arena> arena, int self);

  /// Returns the location of memory that lies in the arena already; none elsewhere.
  [[nodiscard]] std::optional<std::uint64_t> find(const void* address) const;
  /// Returns a block of `bytes`, filled from `input` unless that is null.
  std::uint64_t stage(const void* input, std::size_t bytes);
  /// Exposes `bytes` of the user's memory, which the other ranks read where it is, once it is
  /// agreed that they may. Returns the location; none where they may not. With so many rings
  /// (`relays`) through which this rank may help them, if there is space: one is for so many
  /// `readers`, of several each is for one.
  std::optional<std::uint64_t> show(const void* memory, std::size_t bytes, std::size_t relays = 0,
                                    std::size_t readers = 1);
  /// Returns where reader `reader` has the pieces of what the rank with this index exposes.
  [[nodiscard]] RelayEnd relay_end(int index, std::uint64_t location, std::size_t reader);
  /// Returns how the others get at what the rank with this index has said is there.
  [[nodiscard]] Access access(int index, std::uint64_t location);
  /// Returns the location of a tensor that nobody takes anything from: another one each time.
  [[nodiscard]] std::uint64_t nowhere();
  /// Returns whether the location is a block that is owned here, and may be released.
  [[nodiscard]] static bool is_staged(std::uint64_t location);
  /// Returns whether the tensor is in the user's memory, which must not go before all have read it.
  [[nodiscard]] static bool is_users(std::uint64_t location);
  /// Returns a pinned block, which stays until `drop`, whatever is released or taken out meanwhile.
  /// None where ranks do not share memory, or the arena is full.
  std::optional<std::uint64_t> keep(std::size_t bytes);
  void drop(std::uint64_t location) noexcept;
  /// Returns whether no batch that is not over reads from the pinned block.
  bool is_free(std::uint64_t location, const std::function<bool(std::uint64_t sequence)>& is_over);
  [[nodiscard]] static bool is_kept(std::uint64_t location);
  /// Returns a location that counts as pinned, of memory that is not this object's: the backend's,
  /// and no other rank's to see.
  [[nodiscard]] static std::uint64_t own_location(std::uint64_t number);
  [[nodiscard]] static bool is_own(std::uint64_t location);
  /// Gives a staged block back; does nothing for the user's own memory.
  void release(std::uint64_t location) noexcept;
  /// Copies a staged block to `output` and gives it back; does nothing for the user's own memory.
  void take_out(std::uint64_t location, void* output, std::size_t bytes);
  /// Gives a staged block back when batch `sequence` is over, at a later `release_over`.
  void release_later(std::uint64_t sequence, std::uint64_t location);
  void release_over(const std::function<bool(std::uint64_t sequence)>& is_over);
  /// Returns how many bytes of the arena its blocks take.
  [[nodiscard]] std::size_t staged_bytes() const {
    return staged_bytes_.load(std::memory_order_relaxed);
  }

  /// Returns where the tensor of the rank with this index in the domain is, in this process. Not of
  /// memory that is exposed.
  [[nodiscard]] std::byte* address(int index, std::uint64_t location);
  /// The same of any tensor; null if it must be fetched by `read`.
  [[nodiscard]] const std::byte* address_here(int index, std::uint64_t location);
  /// Copies `bytes` of that rank's tensor, which begin after `skipped`, to `to`. `past_caches`: so
  /// that they do not stay there, where that can be. Returns false if the rank's process has ended.
  bool read(int index, std::uint64_t location, std::size_t skipped, void* to, std::size_t bytes,
            bool past_caches = false);
  [[nodiscard]] int self() const { return self_; }
  /// Keeps the mappings alive.
  [[nodiscard]] const std::shared_ptr<void>& owner() const { return owner_; }

 private:
  /// Returns a block of the arena, or null.
  std::byte* take(std::size_t bytes);
  void give(std::uint64_t location) noexcept;

  DomainMemory memory_;
  std::shared_ptr<Arena> arena_;
  const int self_;
  std::shared_ptr<Overflow> overflow_;
  PeerMemory peers_;
  std::shared_ptr<void> owner_;
  struct Deferred {
    std::uint64_t sequence, location;
  };
  std::atomic<std::uint64_t> nowheres_{0};
  std::atomic<std::size_t> staged_bytes_{0};
  std::mutex mutex_;
  std::vector<Deferred> deferred_;
  std::atomic<std::size_t> deferred_kept_{0};
};

}  // namespace hvd
