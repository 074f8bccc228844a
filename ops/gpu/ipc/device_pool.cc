#include "ops/gpu/ipc/device_pool.h"

#include <algorithm>
#include <span>

#include "ops/gpu/api/call.h"

namespace hvd::gpu {

namespace {
constexpr std::size_t kFirstSlab = std::size_t{32} << 20;
constexpr std::size_t kLargestGrowth = std::size_t{1} << 30;
}  // namespace

DevicePool::~DevicePool() {
  if (slabs_.empty()) return;  // a process without GPU tensors never touches its GPU
  const DeviceGuard guard(*site_.table, site_.device);
  for (const Slab& slab : slabs_) site_.table->device_free(slab.base);
}

std::byte* DevicePool::allocate(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  for (const Slab& slab : slabs_)
    if (std::byte* block = slab.blocks->try_allocate(bytes); block != nullptr) return block;
  return grow(bytes) ? slabs_.back().blocks->try_allocate(bytes) : nullptr;
}

bool DevicePool::grow(std::size_t bytes) {
  if (slabs_.size() == SharedControl::kSlabs) return false;
  const DeviceGuard guard(site_);
  std::size_t total = 0;
  for (const Slab& slab : slabs_) total += slab.bytes;
  const std::size_t needed = in_whole_granules(bytes);
  const std::size_t wanted = std::max(needed, std::clamp(total, kFirstSlab, kLargestGrowth));
  void* base = nullptr;
  std::size_t got = wanted;
  CudaCode code = site_.table->device_malloc(&base, got);
  if (code == CudaCode::OutOfMemory && needed < wanted) {
    got = needed;
    code = site_.table->device_malloc(&base, got);
  }
  if (code == CudaCode::OutOfMemory && relieve_memory())
    code = site_.table->device_malloc(&base, got);
  if (code == CudaCode::OutOfMemory) return false;
  check(site_, code, "cudaMalloc");
  const CudaCode exported = site_.table->ipc_get_memory(&control_.slabs[slabs_.size()], base);
  if (exported != CudaCode::Success) site_.table->device_free(base);
  check_sharing(site_, exported, "cudaIpcGetMemHandle");
  auto* begin = static_cast<std::byte*>(base);
  slabs_.push_back({begin, got, std::make_unique<Arena>(std::span(begin, got))});
  return true;
}

void DevicePool::free(void* block) noexcept {
  const std::lock_guard lock(mutex_);
  for (const Slab& slab : slabs_)
    if (slab.blocks->contains(block)) {
      slab.blocks->free(block);
      return;
    }
}

std::optional<PoolPlace> DevicePool::find(const void* address) const {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < slabs_.size(); ++i)
    if (slabs_[i].blocks->contains(address)) return PoolPlace{i, slabs_[i].blocks->offset(address)};
  return std::nullopt;
}

std::byte* DevicePool::at(const PoolPlace& place) const {
  const std::lock_guard lock(mutex_);
  return slabs_.at(place.slab).base + place.offset;
}

std::size_t DevicePool::slabs() const {
  const std::lock_guard lock(mutex_);
  return slabs_.size();
}

void OwnEvents::make(const CallContext& site) {
  while (turns_.size() < SharedControl::kEvents) {
    const std::size_t number = turns_.size();
    Turn made{Event::interprocess(site), Event::interprocess(site)};
    check_sharing(site, site.table->ipc_get_event(&control_.packed[number], made.packed.get()),
                  "cudaIpcGetEventHandle");
    check_sharing(site, site.table->ipc_get_event(&control_.reduced[number], made.reduced.get()),
                  "cudaIpcGetEventHandle");
    turns_.push_back(std::move(made));
  }
}

std::byte* Peers::memory(const CallContext& site, int index, const PoolPlace& place) {
  void*& base = slabs_[{index, place.slab}];
  if (base == nullptr) {
    know(site);
    check_sharing(site,
                  table_->ipc_open_memory(
                      &base, controls_.at(static_cast<std::size_t>(index))->slabs.at(place.slab)),
                  "cudaIpcOpenMemHandle");
  }
  return static_cast<std::byte*>(base) + place.offset;
}

CudaEvent* Peers::event(const CallContext& site, const IpcHandle& handle) {
  CudaEvent*& opened = events_[&handle];
  if (opened == nullptr) {
    know(site);
    check_sharing(site, table_->ipc_open_event(&opened, handle), "cudaIpcOpenEventHandle");
  }
  return opened;
}

CudaEvent* Peers::packed(const CallContext& site, int index, std::size_t turn) {
  return event(site, controls_.at(static_cast<std::size_t>(index))->packed.at(turn));
}
CudaEvent* Peers::reduced(const CallContext& site, int index, std::size_t turn) {
  return event(site, controls_.at(static_cast<std::size_t>(index))->reduced.at(turn));
}

void Peers::close() noexcept {
  if (!events_.empty() || !slabs_.empty()) close_opened();
  events_.clear();
  slabs_.clear();
  controls_[static_cast<std::size_t>(self_)]->closed.store(true, std::memory_order_release);
}

void Peers::close_opened() noexcept {
  const DeviceGuard guard(*table_, device_);
  for (const auto& [handle, opened] : events_)
    if (opened != nullptr) table_->event_destroy(opened);
  for (const auto& [place, base] : slabs_)
    if (base != nullptr) table_->ipc_close_memory(base);
}

bool Peers::all_closed() const {
  return std::all_of(controls_.begin(), controls_.end(), [](const SharedControl* control) {
    return control->closed.load(std::memory_order_acquire);
  });
}

}  // namespace hvd::gpu
