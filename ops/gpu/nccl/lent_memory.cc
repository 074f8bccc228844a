#include "ops/gpu/nccl/lent_memory.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "hvd/errors.h"
#include "ops/gpu/api/memory_pressure.h"

namespace hvd::gpu {

std::shared_ptr<void> LentMemory::lend(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  auto block = take_idle(bytes);
  if (!block) block = make(bytes);
  if (!block) return nullptr;
  const std::lock_guard lock(mutex_);
  out_.push_back(*block);
  return {block->data, [self = shared_from_this()](const void* data) { self->take_back(data); }};
}

/// The smallest that is large enough, and not too large.
std::optional<LentMemory::Block> LentMemory::take_idle(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  auto best = idle_.end();
  for (auto block = idle_.begin(); block != idle_.end(); ++block) {
    const bool fits = block->bytes >= bytes && block->bytes / 2 <= std::max(bytes, kDeviceGranularity);
    if (fits && (best == idle_.end() || block->bytes < best->bytes)) best = block;
  }
  if (best == idle_.end()) return std::nullopt;
  const Block found = *best;
  idle_.erase(best);
  return found;
}

/// Not under the mutex: it takes long, and the thread that has the turn asks for `has`.
std::optional<LentMemory::Block> LentMemory::make(std::size_t bytes) {
  try {
    const DeviceGuard guard(CallContext{.table = &table_, .rank = -1, .device = device_, .tensors = {}});
    const std::size_t rounded = in_whole_granules(bytes);
    void* data = nullptr;
    const auto attempt = [&] { return table_.device_malloc(&data, rounded) == CudaCode::Success; };
    if (attempt() || (free_idle() && attempt()) || (relieve_memory() && attempt())) return Block{static_cast<std::byte*>(data), rounded};
  } catch (const BackendError&) {  // no such device
  }
  return std::nullopt;
}

/// Returns whether there was anything.
bool LentMemory::free_idle() {
  std::vector<Block> idle;
  {
    const std::lock_guard lock(mutex_);
    idle.swap(idle_);
  }
  free(idle);
  return !idle.empty();
}

void LentMemory::take_back(const void* data) noexcept {
  std::vector<Block> over;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(out_.begin(), out_.end(), [&](const Block& block) { return block.data == data; });
    if (!given_up_) (closed_ ? over : idle_).push_back(*found);
    out_.erase(found);
  }
  free(over);
}

bool LentMemory::has(const void* begin, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto* at = static_cast<const std::byte*>(begin);
  return std::any_of(out_.begin(), out_.end(), [&](const Block& block) {
    return std::less_equal<>()(block.data, at) && std::less_equal<>()(at + bytes, block.data + block.bytes);
  });
}

void LentMemory::close(bool free) noexcept {
  std::vector<Block> over;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    given_up_ = !free;
    over.swap(idle_);
  }
  if (free) this->free(over);
}

void LentMemory::free(const std::vector<Block>& blocks) const noexcept {
  if (blocks.empty()) return;  // a process without GPU tensors never touches its GPU
  const DeviceGuard guard(table_, device_);
  for (const Block& block : blocks) table_.device_free(block.data);
}

}  // namespace hvd::gpu
