#pragma once
/// A FusionBuffer is the device memory that batches are packed into. There is one per stream, grown when a batch needs more; it is from
/// ncclMemAlloc, and registered with each communicator that uses it if that is wanted ("User Buffer Registration", NCCL's documentation).
/// It is for the thread that has the turn, and fails with BackendError, which says how much was asked for.
///
/// A symmetric window is made by all ranks of a communicator, with equally many bytes each. So there is one buffer per stream and set of
/// ranks then, because such ranks see the same batches and grow it at the same ones; it takes what it needs or fails; and what was outgrown
/// stays until the end. NCCL gives a window's memory back when it is deregistered, not when its communicator is aborted (2.28): after a
/// failure it stays with the process.
///
/// Several batches may be in flight over the one buffer: all of them run on one stream, so that the pack of a batch starts after the
/// unpack of the batch before it. A buffer that was outgrown is freed when the stream has passed the point where it was replaced.
// Tested in tests/ops/gpu/nccl/nccl_memory_test.cc, tests/gpu/nccl_gpu_test.cc

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "ops/gpu/api/handles.h"
#include "ops/gpu/api/memory_use.h"
#include "ops/gpu/nccl/communicator.h"

namespace hvd::gpu {

/// Registration says what NCCL is told of a buffer.
enum class Registration : std::uint8_t {
  None,
  Buffer,  ///< ncclCommRegister: each rank for itself
  Window,  ///< ncclCommWindowRegister: a symmetric window of all ranks
};

/// One piece of device memory and its registrations.
class FusionMemory {
 public:
  /// `remark` is told what registrations take; it outlives this.
  FusionMemory(const GpuApi& table, void* data, std::size_t bytes, Registration registration, const Remark& remark)
      : table_(&table), data_(data), bytes_(bytes), registration_(registration), remark_(&remark) {}
  /// Aborted communicators have forgotten their registrations.
  ~FusionMemory();
  FusionMemory(const FusionMemory&) = delete;
  FusionMemory& operator=(const FusionMemory&) = delete;

  /// Registers it, once with each communicator. Where NCCL has no use for a window it is registered as a buffer.
  void register_with(const CallContext& site, const std::shared_ptr<Communicator>& communicator);
  /// Never frees it: the device may still write there.
  void leak() noexcept { data_ = nullptr; }

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  const GpuApi* table_;
  void* data_;
  std::size_t bytes_;
  Registration registration_;
  const Remark* remark_;
  struct Registered {
    std::shared_ptr<Communicator> communicator;
    Registration as;
    void* handle;  ///< NCCL's to write until the communicator has settled or is aborted
  };
  std::deque<Registered> registrations_;  // they stay where they are
};

class FusionBuffer {
 public:
  /// `threshold_bytes`: up to here it grows in powers of two; a batch that needs more gets what it needs. `remark` is told what memory and
  /// registrations take; it outlives the buffer.
  FusionBuffer(std::size_t threshold_bytes, Registration registration, const Remark& remark)
      : threshold_bytes_(threshold_bytes), registration_(registration), remark_(remark) {}

  /// At least `bytes`, aligned to 16, for work that is enqueued on `stream` from now on. Contents are lost when it grows.
  std::byte* reserve(const CallContext& site, std::size_t bytes, const Stream& stream,
                     const std::vector<std::shared_ptr<Communicator>>& communicators);
  std::size_t capacity_bytes() const { return current_ ? current_->bytes() : 0; }
  /// Drops it without freeing; for a device that does not come to rest.
  void leak() noexcept;

 private:
  struct Outgrown {
    std::unique_ptr<FusionMemory> memory;
    Event passed;
  };
  void grow(const CallContext& site, std::size_t bytes, const Stream& stream);
  std::unique_ptr<FusionMemory> allocate(const CallContext& site, std::size_t wanted_bytes, std::size_t needed_bytes);

  const std::size_t threshold_bytes_;
  const Registration registration_;
  const Remark& remark_;
  std::unique_ptr<FusionMemory> current_;
  std::vector<Outgrown> outgrown_;
};

}  // namespace hvd::gpu
