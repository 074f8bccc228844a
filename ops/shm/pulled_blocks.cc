#include "ops/shm/pulled_blocks.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <numeric>

#include "hvd/fast_path_memory.h"
#include "ops/host_ops.h"
#include "ops/kernels/reduce.h"

namespace hvd {

namespace {

constexpr std::size_t kLeastBytes = 32 << 10;

/// The counter before the input: who has read that counts itself.
struct alignas(64) Readers {
  std::atomic<std::uint32_t> finished{0};
};

Readers& readers_of(const std::byte* input) {
  return *reinterpret_cast<Readers*>(const_cast<std::byte*>(input) - sizeof(Readers));
}

}  // namespace

bool PulledBlocks::is_free(const Block& block) {
  if (block.is_lent) return false;
  const Readers& readers = readers_of(staging_.address(staging_.self(), block.location));
  return readers.finished.load(std::memory_order_acquire) >= block.readers &&
         staging_.is_free(block.location, is_over_);
}

std::optional<std::uint64_t> PulledBlocks::lend_free(std::size_t bytes) {
  const auto found = std::find_if(blocks_.rbegin(), blocks_.rend(), [&](const Block& block) {
    return block.bytes == bytes && is_free(block);
  });
  if (found == blocks_.rend()) return std::nullopt;
  found->is_lent = true;
  readers_of(staging_.address(staging_.self(), found->location))
      .finished.store(0, std::memory_order_relaxed);
  return found->location;
}

std::optional<std::uint64_t> PulledBlocks::make(std::size_t bytes) {
  if (all_bytes_ + bytes > kMostBytes) return std::nullopt;
  blocks_.reserve(blocks_.size() + 1);
  const auto kept = staging_.keep(sizeof(Readers) + bytes);
  if (!kept) return std::nullopt;
  new (staging_.address(staging_.self(), *kept)) Readers;
  blocks_.push_back({*kept + sizeof(Readers), bytes, 0, true});
  all_bytes_ += bytes;
  return blocks_.back().location;
}

std::optional<std::uint64_t> PulledBlocks::lend(std::size_t bytes) {
  const std::size_t rounded = std::max(kLeastBytes, std::bit_ceil(bytes));
  if (const auto location = lend_free(rounded)) return location;
  if (const auto location = make(rounded)) return location;
  trim();
  return make(rounded);
}

void PulledBlocks::take_back(std::uint64_t location, std::uint32_t readers) noexcept {
  const auto found = std::find_if(blocks_.begin(), blocks_.end(),
                                  [&](const Block& block) { return block.location == location; });
  if (found == blocks_.end()) return;
  found->is_lent = false;
  found->readers = readers;
  std::rotate(found, found + 1, blocks_.end());
}

void PulledBlocks::trim() noexcept {
  std::erase_if(blocks_, [this](const Block& block) {
    if (!is_free(block)) return false;
    staging_.drop(block.location - sizeof(Readers));
    all_bytes_ -= block.bytes;
    return true;
  });
}

/// Each rank begins with its own part and goes on with that of the next: not all with the same.
void PulledBlocks::pull(const BatchTraits& traits, std::int64_t count,
                        std::span<const std::byte* const> blocks,
                        std::span<const std::int64_t> parts, void* output) {
  const auto self = static_cast<std::size_t>(traits.set->rank);
  const auto own = parts.empty() ? count : parts[self];
  const std::size_t bytes = bytes_of(traits, own);
  if (own == 0) return;
  if (traits.kind == OpKind::Broadcast) {
    std::memcpy(output, blocks.front(), bytes);
    return;
  }
  const auto before =
      parts.empty()
          ? std::int64_t{0}
          : std::accumulate(parts.begin(), parts.begin() + traits.set->rank, std::int64_t{0});
  const std::size_t skipped = bytes_of(traits, before);
  if (traits.kind == OpKind::Reducescatter) {
    std::array<const void*, SlotMemory::kMostPullers> inputs;
    for (std::size_t i = 0; i < blocks.size(); ++i) inputs[i] = blocks[i] + skipped;
    const std::array<void*, 1> outputs{output};
    kernels::reduce(reduction_of(traits), std::span(inputs).first(blocks.size()), outputs,
                    static_cast<std::size_t>(own));
    return;
  }
  for (std::size_t turn = 0; turn < blocks.size(); ++turn) {
    const std::size_t place = (self + turn) % blocks.size();
    std::memcpy(static_cast<std::byte*>(output) + place * bytes, blocks[place] + skipped, bytes);
  }
}

void PulledBlocks::finish_reading(std::span<const std::byte* const> blocks) noexcept {
  for (const std::byte* const block : blocks)
    readers_of(block).finished.fetch_add(1, std::memory_order_release);
}

}  // namespace hvd
