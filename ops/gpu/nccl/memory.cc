#include "ops/gpu/nccl/memory.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "ops/gpu/api/call.h"

namespace hvd::gpu {

bool has_windows(const GpuApi& table) {
  constexpr int kFirst = 22907;
  int version = 0;
  return table.window_register && table.get_version(&version) == NcclCode::Success &&
         version >= kFirst;
}

Registration registration_of(Registration wanted, bool windows) {
  return wanted == Registration::Window && !windows ? Registration::Buffer : wanted;
}

FusionMemory::~FusionMemory() {
  for (const auto& [communicator, as, handle] : registrations_) {
    if (handle == nullptr || communicator->aborted()) continue;
    const auto& deregister =
        as == Registration::Window ? table_->window_deregister : table_->comm_deregister;
    deregister(communicator->get(), handle);
  }
  table_->mem_free(data_);
}

void FusionMemory::register_with(const CallContext& site,
                                 const std::shared_ptr<Communicator>& communicator) {
  const auto known = [&](const Registered& entry) { return entry.communicator == communicator; };
  if (std::any_of(registrations_.begin(), registrations_.end(), known)) return;
  auto& [owner, as, handle] = registrations_.emplace_back(communicator, registration_, nullptr);
  const MemoryUse use(site, *remark_);
  if (as == Registration::Window) {
    // NCCL 2.28 says Success while it is still at work.
    const NcclCode code = table_->window_register(communicator->get(), data_, bytes_, &handle);
    communicator->settle(site, code == NcclCode::Success ? NcclCode::InProgress : code,
                         "ncclCommWindowRegister");
    if (handle != nullptr)
      return use.say("a symmetric window of NCCL's over a fusion buffer takes besides", bytes_);
    // no window reaches from rank to rank here, which holds for all of them
    as = Registration::Buffer;
  }
  communicator->settle(site, table_->comm_register(communicator->get(), data_, bytes_, &handle),
                       "ncclCommRegister");
  use.say("the registration of a fusion buffer with NCCL takes besides", bytes_);
}

std::byte* FusionBuffer::reserve(const CallContext& site, std::size_t bytes, const Stream& stream,
                                 const std::vector<std::shared_ptr<Communicator>>& communicators) {
  if (registration_ != Registration::Window)
    std::erase_if(outgrown_,
                  [](const Outgrown& old) { return old.passed.query() == CudaCode::Success; });
  if (bytes > capacity_bytes()) grow(site, bytes, stream);
  if (registration_ != Registration::None)
    for (const auto& communicator : communicators)
      if (communicator->ranks() > 1) current_->register_with(site, communicator);
  return static_cast<std::byte*>(current_->data());
}

void FusionBuffer::grow(const CallContext& site, std::size_t bytes, const Stream& stream) {
  const std::size_t needed = in_whole_granules(bytes);
  const std::size_t wanted = std::max(needed, std::min(std::bit_ceil(needed), threshold_bytes_));
  auto larger = allocate(site, wanted, needed);
  if (current_ != nullptr) {
    Event passed(site);  // nobody asks after a window
    passed.record(site, stream);
    outgrown_.push_back({std::move(current_), std::move(passed)});
  }
  current_ = std::move(larger);
}

std::unique_ptr<FusionMemory> FusionBuffer::allocate(const CallContext& site,
                                                     std::size_t wanted_bytes,
                                                     std::size_t needed_bytes) {
  const MemoryUse use(site, remark_);
  void* data = nullptr;
  std::size_t bytes = wanted_bytes;
  NcclCode code = site.table->mem_alloc(&data, bytes);
  if (code != NcclCode::Success && needed_bytes < wanted_bytes &&
      registration_ != Registration::Window) {
    bytes = needed_bytes;
    code = site.table->mem_alloc(&data, bytes);
  }
  if (code != NcclCode::Success && relieve_memory()) code = site.table->mem_alloc(&data, bytes);
  if (code != NcclCode::Success) {
    std::size_t free_bytes = 0, total_bytes = 0;
    const bool known = site.table->mem_info(&free_bytes, &total_bytes) == CudaCode::Success;
    const std::string room =
        known ? formatted(" ({} of {} are free)", to_mib(free_bytes), to_mib(total_bytes))
              : std::string();
    fail(site, "ncclMemAlloc",
         formatted("{} (NCCL error {}): {} were asked for as fusion buffer{}; lower the fusion "
                   "threshold or free device memory",
                   site.table->nccl_error(code, nullptr), static_cast<int>(code), to_mib(bytes),
                   room));
  }
  use.say("a fusion buffer of NCCL's takes", bytes);
  return std::make_unique<FusionMemory>(*site.table, data, bytes, registration_, remark_);
}

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
    const bool fits =
        block->bytes >= bytes && block->bytes / 2 <= std::max(bytes, kDeviceGranularity);
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
    const DeviceGuard guard(
        CallContext{.table = &table_, .rank = -1, .device = device_, .tensors = {}});
    const std::size_t rounded = in_whole_granules(bytes);
    void* data = nullptr;
    const auto attempt = [&] { return table_.device_malloc(&data, rounded) == CudaCode::Success; };
    if (attempt() || (free_idle() && attempt()) || (relieve_memory() && attempt()))
      return Block{static_cast<std::byte*>(data), rounded};
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
    const auto found = std::find_if(out_.begin(), out_.end(),
                                    [&](const Block& block) { return block.data == data; });
    (closed_ ? over : idle_).push_back(*found);
    out_.erase(found);
  }
  free(over);
}

bool LentMemory::has(const void* begin, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto* at = static_cast<const std::byte*>(begin);
  return std::any_of(out_.begin(), out_.end(), [&](const Block& block) {
    return std::less_equal<>()(block.data, at) &&
           std::less_equal<>()(at + bytes, block.data + block.bytes);
  });
}

void LentMemory::close() noexcept {
  std::vector<Block> over;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    over.swap(idle_);
  }
  free(over);
}

void LentMemory::free(const std::vector<Block>& blocks) const noexcept {
  if (blocks.empty()) return;  // a process without GPU tensors never touches its GPU
  const DeviceGuard guard(table_, device_);
  for (const Block& block : blocks) table_.device_free(block.data);
}

}  // namespace hvd::gpu
