#include "ops/shm/memory/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {
constexpr std::size_t kLine = 64;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kPagedFrom = 64 << 10;

std::size_t rounded(std::size_t bytes) {
  const std::size_t unit = bytes >= kPagedFrom ? kPage : kLine;
  return (std::max<std::size_t>(bytes, 1) + unit - 1) / unit * unit;
}
}  // namespace

Arena::Arena(std::span<std::byte> memory, std::function<bool()> has_failed)
    : memory_(memory), has_failed_(std::move(has_failed)) {
  insert_free(0, memory.size());
}

void Arena::insert_free(std::size_t offset, std::size_t bytes) {
  free_by_offset_[offset] = bytes;
  free_by_size_.emplace(bytes, offset);
}

void Arena::erase_free(std::map<std::size_t, std::size_t>::iterator block) {
  auto [first, last] = free_by_size_.equal_range(block->second);
  free_by_size_.erase(
      std::find_if(first, last, [&](const auto& entry) { return entry.second == block->first; }));
  free_by_offset_.erase(block);
}

std::byte* Arena::allocate(std::size_t bytes) {
  if (std::byte* block = try_allocate(bytes); block != nullptr) return block;
  if (is_over()) throw BackendError("shared memory: the world has failed");
  throw BackendError(
      formatted("shared memory: no room for {} bytes among the {} reserved; raise HVD_ARENA_BYTES",
                bytes, memory_.size()));
}

std::byte* Arena::try_allocate(std::size_t bytes) {
  if (is_over()) return nullptr;
  const std::size_t wanted = rounded(bytes);
  const std::size_t alignment = wanted >= kPagedFrom ? kPage : kLine;
  const std::lock_guard lock(mutex_);
  // Best fit. A block may lose up to a page to alignment, so the first that is large enough may
  // still not do.
  for (auto entry = free_by_size_.lower_bound(wanted); entry != free_by_size_.end(); ++entry) {
    const auto block = free_by_offset_.find(entry->second);
    const std::size_t begin = block->first;
    const std::size_t end = begin + block->second;
    const std::size_t start = (begin + alignment - 1) / alignment * alignment;
    if (start + wanted > end) continue;
    erase_free(block);
    if (start > begin) insert_free(begin, start - begin);
    if (start + wanted < end) insert_free(start + wanted, end - start - wanted);
    used_[start] = {wanted, trims_};
    return memory_.data() + start;
  }
  return nullptr;
}

std::size_t Arena::size_of(const void* block) const {
  const std::lock_guard lock(mutex_);
  const auto used = used_.find(offset(block));
  return used == used_.end() ? 0 : used->second.bytes;
}

std::size_t Arena::free(void* block) noexcept {
  if (block == nullptr || is_over()) return 0;
  const std::lock_guard lock(mutex_);
  const auto used = used_.find(offset(block));
  if (used == used_.end()) return 0;
  std::size_t begin = used->first;
  const std::size_t freed = used->second.bytes;
  if (used->second.trims < trims_) give_pages_back(begin, freed);
  std::size_t bytes = freed;
  used_.erase(used);
  if (const auto next = free_by_offset_.find(begin + bytes); next != free_by_offset_.end()) {
    bytes += next->second;
    erase_free(next);
  }
  auto previous = free_by_offset_.lower_bound(begin);
  if (previous != free_by_offset_.begin()) {
    --previous;
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      bytes += previous->second;
      erase_free(previous);
    }
  }
  insert_free(begin, bytes);
  return freed;
}

void Arena::give_pages_back(std::size_t offset, std::size_t bytes) const noexcept {
  const std::size_t begin = (offset + kPage - 1) / kPage * kPage;
  const std::size_t end = (offset + bytes) / kPage * kPage;
  // Where the system refuses, the pages stay.
  if (begin < end) static_cast<void>(::madvise(memory_.data() + begin, end - begin, MADV_REMOVE));
}

void Arena::trim() noexcept {
  if (is_over()) return;
  const std::lock_guard lock(mutex_);
  ++trims_;
  for (const auto& [offset, bytes] : free_by_offset_) give_pages_back(offset, bytes);
}

std::size_t Arena::used_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t total = 0;
  for (const auto& [offset, used] : used_) total += used.bytes;
  return total;
}

}  // namespace hvd
