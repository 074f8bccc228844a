#include "hvd/api/result_pool.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "hvd/base/child_watch.h"

namespace hvd {

namespace {
constexpr std::size_t kPage = 4096;
// a result may get a block that is larger than itself by one part of so many
constexpr std::size_t kWasted = 4;
}  // namespace

ResultPool::ResultPool(std::shared_ptr<ResultMemory> memory, Limits limits)
    : memory_(std::move(memory)), limits_(limits) {}

ResultPool::~ResultPool() {
  if (made_.still_here()) give_back(kept_);
}

std::size_t ResultPool::kept_bytes() const {
  const std::lock_guard lock(mutex_);
  return kept_bytes_;
}

void ResultPool::give_back(const Blocks& blocks) noexcept {
  for (const Block& block : blocks) memory_->give_back(block.memory, block.bytes);
}

/// Takes a cached block, and makes `bytes` its size; null where none fits. Requires the mutex.
std::byte* ResultPool::take(std::size_t& bytes) {
  const auto least = by_bytes_.lower_bound(bytes);
  if (least == by_bytes_.end() || least->first > bytes + bytes / kWasted) return nullptr;
  // most of it may still be in a cache
  const auto last = std::prev(by_bytes_.upper_bound(least->first));
  const Block block = *last->second;
  kept_.erase(last->second);
  by_bytes_.erase(last);
  kept_bytes_ -= block.bytes;
  bytes = block.bytes;
  return block.memory;
}

/// Returns what to give back so that at most so many bytes are cached. Requires the mutex.
ResultPool::Blocks ResultPool::drop_oldest(std::size_t until_kept) {
  Blocks dropped;
  while (kept_bytes_ > until_kept) {
    const auto oldest = kept_.begin();
    const auto [first, last] = by_bytes_.equal_range(oldest->bytes);
    by_bytes_.erase(
        std::find_if(first, last, [&](const auto& entry) { return entry.second == oldest; }));
    kept_bytes_ -= oldest->bytes;
    all_bytes_ -= oldest->bytes;
    dropped.splice(dropped.end(), kept_, oldest);
  }
  return dropped;
}

std::shared_ptr<void> ResultPool::allocate(std::size_t bytes) {
  if (bytes < kLeastBytes || bytes > limits_.kept_bytes) return nullptr;
  std::size_t wanted = (bytes + kPage - 1) / kPage * kPage;
  std::byte* block = nullptr;
  bool fits = true;
  Blocks dropped;
  {
    const std::lock_guard lock(mutex_);
    if (!seen_.empty()) dropped = keep_unseen();
    block = take(wanted);
    const std::size_t used = all_bytes_ - kept_bytes_;
    if (block == nullptr) fits = wanted <= limits_.all_bytes && used <= limits_.all_bytes - wanted;
    if (block == nullptr && fits) {
      dropped.splice(dropped.end(), drop_oldest(limits_.all_bytes - wanted - used));
      all_bytes_ += wanted;
    }
  }
  give_back(dropped);
  if (block == nullptr && fits) block = make(wanted);
  return block != nullptr ? owned({block, wanted}) : nullptr;
}

/// Returns a block that is counted already, or null, and counts it no more.
std::byte* ResultPool::make(std::size_t bytes) {
  if (std::byte* const block = memory_->allocate(bytes); block != nullptr) return block;
  Blocks dropped;
  {
    const std::lock_guard lock(mutex_);
    dropped = drop_oldest(0);  // it may be what is in the way
  }
  give_back(dropped);
  if (std::byte* const block = memory_->allocate(bytes); block != nullptr) return block;
  const std::lock_guard lock(mutex_);
  all_bytes_ -= bytes;
  return nullptr;
}

std::shared_ptr<void> ResultPool::owned(Block block) {
  const bool seen = memory_->is_seen_by_children();
  const std::uint64_t born = seen ? ChildWatch::instance().begin() : 0;
  return {block.memory,
          [pool = weak_from_this(), memory = memory_, block, seen, born, made = MadeHere()](void*) {
            const InsideLibrary inside;
            if (!made.still_here()) return;
            const std::uint64_t ended = seen ? ChildWatch::instance().end() : 0;
            if (const auto running = pool.lock()) return running->end({block, born, ended});
            // What a child still sees stays as it is until the last block of the memory is gone.
            if (ChildWatch::instance().are_gone(born, ended))
              memory->give_back(block.memory, block.bytes);
          }};
}

void ResultPool::end(const Seen& block) noexcept {
  Blocks dropped;
  try {
    Blocks back{block.block};
    const std::lock_guard lock(mutex_);
    if (block.born != block.ended) {
      seen_.push_back(block);
    } else {
      dropped = keep(back);
    }
  } catch (const std::bad_alloc&) {  // the block is lost
  }
  give_back(dropped);
}

/// Returns what is to be given back for it. Requires the mutex.
ResultPool::Blocks ResultPool::keep(Blocks& back) {
  by_bytes_.emplace(back.front().bytes, back.begin());
  kept_bytes_ += back.front().bytes;
  kept_.splice(kept_.end(), back);
  return drop_oldest(limits_.kept_bytes);
}

/// Caches the blocks that no child sees any more. Returns those that give way. Requires the mutex.
ResultPool::Blocks ResultPool::keep_unseen() {
  Blocks dropped;
  std::erase_if(seen_, [&](const Seen& block) {
    if (!ChildWatch::instance().are_gone(block.born, block.ended)) return false;
    Blocks back{block.block};
    dropped.splice(dropped.end(), keep(back));
    return true;
  });
  return dropped;
}

}  // namespace hvd
