#include "ops/nccl/lent_memory.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace hvd::nccl {

std::shared_ptr<void> LentMemory::lend(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (closed_ || bytes == 0) return nullptr;
  auto best = idle_.end();
  for (auto block = idle_.begin(); block != idle_.end(); ++block) {
    const bool fits = (*block)->bytes() >= bytes && (*block)->bytes() / 2 <= std::max(bytes, kDeviceGranularity);
    if (fits && (best == idle_.end() || (*block)->bytes() < (*best)->bytes())) best = block;
  }
  if (best != idle_.end()) {
    out_.push_back(std::move(*best));
    idle_.erase(best);
  } else {
    const DeviceGuard guard(table_, device_);
    const std::size_t rounded = (bytes + kDeviceGranularity - 1) / kDeviceGranularity * kDeviceGranularity;
    void* data = nullptr;
    if (table_.mem_alloc(&data, rounded) != NcclCode::Success) return nullptr;
    out_.push_back(std::make_unique<FusionMemory>(table_, data, rounded));
  }
  return {out_.back()->data(), [self = shared_from_this()](const void* block) { self->take_back(block); }};
}

void LentMemory::take_back(const void* block) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(out_.begin(), out_.end(), [&](const auto& memory) { return memory->data() == block; });
  if (found == out_.end()) return;
  if (closed_) {
    const DeviceGuard guard(table_, device_);
    out_.erase(found);
  } else {
    idle_.push_back(std::move(*found));
    out_.erase(found);
  }
}

bool LentMemory::has(const void* begin, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto* at = static_cast<const std::byte*>(begin);
  return std::any_of(out_.begin(), out_.end(), [&](const auto& memory) {
    const auto* from = static_cast<const std::byte*>(memory->data());
    return std::less_equal<>()(from, at) && std::less_equal<>()(at + bytes, from + memory->bytes());
  });
}

void LentMemory::close(bool free) noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  if (!free)
    for (const auto* list : {&out_, &idle_})
      for (const auto& memory : *list) memory->leak();
  const DeviceGuard guard(table_, device_);
  idle_.clear();
}

}  // namespace hvd::nccl
