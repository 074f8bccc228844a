#include "ops/shm/memory/staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "hvd/errors.h"
#include "ops/shm/memory/stream_copy.h"

namespace hvd {

namespace {
// bit of a location: a block of the backend's, not the user's memory
constexpr std::uint64_t kStaged = std::uint64_t{1} << 62;
// also: the block is pinned, it stays when what it held is released
constexpr std::uint64_t kKept = std::uint64_t{1} << 61;
// also: the block holds a Shown, which describes exposed memory
constexpr std::uint64_t kShown = std::uint64_t{1} << 60;
// the other bits are a word of the overflow, not an offset in the arena
constexpr std::uint64_t kBeyond = std::uint64_t{1} << 59;
constexpr std::uint64_t kOffset = kBeyond - 1;
// no memory at all: the other bits are a number
constexpr std::uint64_t kNowhere = kStaged | kShown | kBeyond;
bool is_nowhere(std::uint64_t location) { return (location & kNowhere) == kNowhere; }

/// A rank's description of memory that it exposes: the others may read it where it is.
struct alignas(64) Shown {
  const std::byte* memory;  // an address of the owner's
  std::size_t relays;       // that follow
  [[nodiscard]] Relay* relay(std::size_t number) {
    return reinterpret_cast<Relay*>(this + 1) + number;
  }
};
static_assert(alignof(Relay) <= alignof(Shown));
}  // namespace

Staging::Staging(DomainMemory memory, std::shared_ptr<Arena> arena, int self)
    : memory_(std::move(memory)),
      arena_(std::move(arena)),
      self_(self),
      overflow_(std::make_shared<Overflow>(memory_.processes, self,
                                           [arena = arena_] { return arena && arena->is_over(); })),
      peers_(memory_.processes, self, memory_.direct_copies) {
  owner_ = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<Overflow>>>(
      memory_.owner, overflow_);
}

std::optional<std::uint64_t> Staging::find(const void* address) const {
  if (!arena_ || !arena_->contains(address)) return std::nullopt;
  return arena_->offset(address);
}

std::byte* Staging::take(std::size_t bytes) {
  std::byte* const block = arena_->try_allocate(bytes);
  if (block != nullptr) staged_bytes_.fetch_add(arena_->size_of(block), std::memory_order_relaxed);
  return block;
}

void Staging::give(std::uint64_t location) noexcept {
  staged_bytes_.fetch_sub(arena_->free(arena_->at(location & kOffset)), std::memory_order_relaxed);
}

std::uint64_t Staging::stage(const void* input, std::size_t bytes) {
  if (!arena_) throw BackendError("a rank without shared memory cannot stage a tensor there");
  std::byte* const block = take(bytes);
  const std::uint64_t location =
      (block != nullptr ? arena_->offset(block) : overflow_->allocate(bytes) | kBeyond) | kStaged;
  if (input != nullptr && bytes > 0) std::memcpy(address(self_, location), input, bytes);
  return location;
}

std::optional<std::uint64_t> Staging::show(const void* memory, std::size_t bytes,
                                           std::size_t relays, std::size_t readers) {
  if (!arena_ || !peers_.can_be_read(memory, bytes)) return std::nullopt;
  if (readers > Relay::kMostReaders ||
      staged_bytes() + relays * sizeof(Relay) > limit(Limit::RelayedTogetherBytes))
    relays = 0;
  std::byte* block = take(sizeof(Shown) + relays * sizeof(Relay));
  if (block == nullptr && relays > 0) {
    relays = 0;
    block = take(sizeof(Shown));
  }
  if (block == nullptr) return std::nullopt;
  auto* const shown = new (block) Shown{static_cast<const std::byte*>(memory), relays};
  for (std::size_t number = 0; number < relays; ++number)
    new (shown->relay(number)) Relay(relays == 1 ? readers : 1);
  return arena_->offset(block) | kStaged | kShown;
}

RelayEnd Staging::relay_end(int index, std::uint64_t location, std::size_t reader) {
  if (!is_staged(location) || (location & kShown) == 0 || is_nowhere(location)) return {};
  auto* const shown = reinterpret_cast<Shown*>(address(index, location));
  if (shown->relays == 0) return {};
  return shown->relays == 1 ? RelayEnd{shown->relay(0), reader} : RelayEnd{shown->relay(reader), 0};
}

Access Staging::access(int index, std::uint64_t location) {
  if (!is_users(location)) return Access::Copied;
  const bool is_shown = (location & kShown) != 0;
  return is_shown && reinterpret_cast<const Shown*>(address(index, location))->relays > 0
             ? Access::Ring
             : Access::Read;
}

std::uint64_t Staging::nowhere() {
  return kNowhere | (nowheres_.fetch_add(1, std::memory_order_relaxed) & kOffset);
}

bool Staging::is_users(std::uint64_t location) {
  return !is_staged(location) || ((location & kShown) != 0 && !is_nowhere(location));
}

bool Staging::is_staged(std::uint64_t location) { return (location & kStaged) != 0; }

std::optional<std::uint64_t> Staging::keep(std::size_t bytes) {
  if (!arena_) return std::nullopt;
  const std::byte* const block = take(bytes);
  if (block == nullptr) return std::nullopt;
  return arena_->offset(block) | kStaged | kKept;
}

void Staging::drop(std::uint64_t location) noexcept {
  const std::lock_guard lock(mutex_);
  const auto used = std::find_if(deferred_.begin(), deferred_.end(),
                                 [&](const Deferred& d) { return d.location == location; });
  if (used == deferred_.end()) return give(location);
  used->location &= ~kKept;  // goes when its batch is over
  deferred_kept_.fetch_sub(1, std::memory_order_relaxed);
}

bool Staging::is_free(std::uint64_t location,
                      const std::function<bool(std::uint64_t sequence)>& is_over) {
  if (deferred_kept_.load(std::memory_order_relaxed) == 0) return true;
  release_over(is_over);
  const std::lock_guard lock(mutex_);
  return std::none_of(deferred_.begin(), deferred_.end(),
                      [&](const Deferred& d) { return d.location == location; });
}

std::uint64_t Staging::own_location(std::uint64_t number) {
  return kStaged | kKept | kBeyond | (number & kOffset);
}

bool Staging::is_own(std::uint64_t location) {
  return (location & (kKept | kBeyond)) == (kKept | kBeyond);
}

bool Staging::is_kept(std::uint64_t location) { return (location & kKept) != 0; }

void Staging::release(std::uint64_t location) noexcept {
  if (!is_staged(location) || is_kept(location) || is_nowhere(location)) return;
  if ((location & kBeyond) != 0) return overflow_->free(location & kOffset);
  give(location);
}

void Staging::take_out(std::uint64_t location, void* output, std::size_t bytes) {
  if (!is_staged(location)) return;
  if (bytes > 0) std::memcpy(output, address(self_, location), bytes);
  release(location);
}

void Staging::release_later(std::uint64_t sequence, std::uint64_t location) {
  if (!is_staged(location) || is_nowhere(location)) return;
  if (is_kept(location)) deferred_kept_.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  deferred_.push_back({sequence, location});
}

void Staging::release_over(const std::function<bool(std::uint64_t sequence)>& is_over) {
  const std::lock_guard lock(mutex_);
  std::erase_if(deferred_, [&](const Deferred& deferred) {
    if (!is_over(deferred.sequence)) return false;
    if (is_kept(deferred.location)) deferred_kept_.fetch_sub(1, std::memory_order_relaxed);
    release(deferred.location);
    return true;
  });
}

std::byte* Staging::address(int index, std::uint64_t location) {
  if ((location & kBeyond) != 0) return overflow_->address(index, location & kOffset);
  return memory_.arenas[static_cast<std::size_t>(index)].data() + (location & kOffset);
}

const std::byte* Staging::address_here(int index, std::uint64_t location) {
  const std::byte* const place = address(index, location);
  if ((location & kShown) == 0) return place;
  return peers_.is_here(index) ? reinterpret_cast<const Shown*>(place)->memory : nullptr;
}

bool Staging::read(int index, std::uint64_t location, std::size_t skipped, void* to,
                   std::size_t bytes, bool past_caches) {
  if (bytes == 0) return true;
  if (const std::byte* const here = address_here(index, location); here != nullptr) {
    if (to != here + skipped)
      (past_caches ? stream_copy : plain_copy)(static_cast<std::byte*>(to), here + skipped, bytes);
    return true;
  }
  return peers_.read(
      index, to, reinterpret_cast<const Shown*>(address(index, location))->memory + skipped, bytes);
}

}  // namespace hvd
