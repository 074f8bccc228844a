#include "ops/gpu/staged/pinned_pool.h"

#include <algorithm>
#include <span>
#include <utility>

#include "ops/gpu/api/handles.h"

namespace hvd::gpu {

namespace {
constexpr std::size_t kFirstSlab = std::size_t{32} << 20;
// registered memory takes pages at once
constexpr std::size_t kLargestGrowth = std::size_t{128} << 20;
// from here on the arena gives whole pages
constexpr std::size_t kPage = std::size_t{64} << 10;
}  // namespace

PinnedPool::PinnedPool(const GpuApi& table, int device, std::shared_ptr<Arena> arena,
                       std::shared_ptr<void> owner, Remark refused, std::chrono::milliseconds limit)
    : table_(table),
      device_(device),
      arena_(std::move(arena)),
      owner_(std::move(owner)),
      tell_refused_(std::move(refused)),
      limit_(limit) {}

PinnedPool::~PinnedPool() {
  for (Slab& slab : slabs_) {
    const bool is_over =
        within(limit_, [&table = table_, device = device_, base = slab.base, owner = owner_] {
          const DeviceGuard guard(table, device);
          table.host_unregister(base);
        });
    if (is_over) arena_->free(slab.base);
  }
}

std::byte* PinnedPool::allocate(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  for (const Slab& slab : slabs_)
    if (std::byte* const block = slab.blocks->try_allocate(bytes); block != nullptr) return block;
  return grow(bytes) ? slabs_.back().blocks->try_allocate(bytes) : nullptr;
}

bool PinnedPool::grow(std::size_t bytes) {
  if (refused_) return false;
  std::size_t total = 0;
  for (const Slab& slab : slabs_) total += slab.bytes;
  const std::size_t needed = (std::max<std::size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  std::size_t got = std::max(needed, std::clamp(total, kFirstSlab, kLargestGrowth));
  std::byte* base = arena_->try_allocate(got);
  if (base == nullptr) base = arena_->try_allocate(got = needed);
  if (base == nullptr) return false;
  const DeviceGuard guard(table_, device_);
  if (const CudaCode code = table_.host_register(base, got); code != CudaCode::Success) {
    refused_ = true;
    arena_->free(base);
    if (tell_refused_) tell_refused_("cudaHostRegister says " + table_.cuda_error(code));
    return false;
  }
  slabs_.push_back({base, got, std::make_unique<Arena>(std::span(base, got))});
  return true;
}

void PinnedPool::free(std::byte* block) noexcept {
  const std::lock_guard lock(mutex_);
  const auto slab = std::find_if(slabs_.begin(), slabs_.end(), [&](const Slab& candidate) {
    return candidate.blocks->contains(block);
  });
  slab->blocks->free(block);
}

}  // namespace hvd::gpu
