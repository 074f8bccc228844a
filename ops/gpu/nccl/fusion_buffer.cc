#include "ops/gpu/nccl/fusion_buffer.h"

#include <algorithm>
#include <bit>

#include "hvd/base/text.h"
#include "ops/gpu/api/memory_pressure.h"

namespace hvd::gpu {

FusionMemory::~FusionMemory() {
  for (const auto& [communicator, as, handle] : registrations_) {
    if (handle == nullptr || communicator->aborted()) continue;
    const auto& deregister = as == Registration::Window ? table_->window_deregister : table_->comm_deregister;
    deregister(communicator->get(), handle);
  }
  if (data_ != nullptr) table_->mem_free(data_);
}

void FusionMemory::register_with(const CallContext& site, const std::shared_ptr<Communicator>& communicator) {
  const auto known = [&](const Registered& entry) { return entry.communicator == communicator; };
  if (std::any_of(registrations_.begin(), registrations_.end(), known)) return;
  auto& [owner, as, handle] = registrations_.emplace_back(communicator, registration_, nullptr);
  const MemoryUse use(site, *remark_);
  if (as == Registration::Window) {
    // NCCL 2.28 says Success while it is still at work.
    const NcclCode code = table_->window_register(communicator->get(), data_, bytes_, &handle);
    communicator->settle(site, code == NcclCode::Success ? NcclCode::InProgress : code, "ncclCommWindowRegister");
    if (handle != nullptr) return use.say("a symmetric window of NCCL's over a fusion buffer takes besides", bytes_);
    as = Registration::Buffer;  // no window reaches from rank to rank here, which holds for all of them
  }
  communicator->settle(site, table_->comm_register(communicator->get(), data_, bytes_, &handle), "ncclCommRegister");
  use.say("the registration of a fusion buffer with NCCL takes besides", bytes_);
}

std::byte* FusionBuffer::reserve(const CallContext& site, std::size_t bytes, const Stream& stream,
                                 const std::vector<std::shared_ptr<Communicator>>& communicators) {
  if (registration_ != Registration::Window)
    std::erase_if(outgrown_, [](const Outgrown& old) { return old.passed.query() == CudaCode::Success; });
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

std::unique_ptr<FusionMemory> FusionBuffer::allocate(const CallContext& site, std::size_t wanted_bytes, std::size_t needed_bytes) {
  const MemoryUse use(site, remark_);
  void* data = nullptr;
  std::size_t bytes = wanted_bytes;
  NcclCode code = site.table->mem_alloc(&data, bytes);
  if (code != NcclCode::Success && needed_bytes < wanted_bytes && registration_ != Registration::Window) {
    bytes = needed_bytes;
    code = site.table->mem_alloc(&data, bytes);
  }
  if (code != NcclCode::Success && relieve_memory()) code = site.table->mem_alloc(&data, bytes);
  if (code != NcclCode::Success) {
    std::size_t free_bytes = 0, total_bytes = 0;
    const bool known = site.table->mem_info(&free_bytes, &total_bytes) == CudaCode::Success;
    const std::string room = known ? formatted(" ({} of {} are free)", to_mib(free_bytes), to_mib(total_bytes)) : std::string();
    fail(site, "ncclMemAlloc",
         formatted("{} (NCCL error {}): {} were asked for as fusion buffer{}; lower the fusion threshold or free device memory",
                   site.table->nccl_error(code, nullptr), static_cast<int>(code), to_mib(bytes), room));
  }
  use.say("a fusion buffer of NCCL's takes", bytes);
  return std::make_unique<FusionMemory>(*site.table, data, bytes, registration_, remark_);
}

void FusionBuffer::leak() noexcept {
  if (current_ != nullptr) current_->leak();
  for (auto& old : outgrown_) old.memory->leak();
}

}  // namespace hvd::gpu
