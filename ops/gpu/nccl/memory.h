#pragma once
/// The device memory that NCCL works on.
///
/// Batches are packed into a FusionBuffer, one per stream, grown when a batch needs more. It is
/// from ncclMemAlloc, and registered with each communicator that uses it if that is wanted ("User
/// Buffer Registration", NCCL's documentation). Several batches in flight share it, as the pack of
/// a batch comes after the unpack of the one before on the stream; an outgrown one is freed when
/// the stream has passed the point where it was replaced. It is for the thread that has the turn,
/// and fails with BackendError, which says how much was asked for.
///
/// All ranks of a communicator make a symmetric window, with equally many bytes each. So there is
/// one buffer per stream and set of ranks then, because such ranks see the same batches and grow it
/// at the same ones; it takes what it needs or fails; and what was outgrown stays until the end.
/// NCCL gives a window's memory back when it is deregistered, not when its communicator is aborted
/// (2.28): after a failure it stays with the process.
///
/// LentMemory, from cudaMalloc, is what users keep tensors in, so that NCCL reduces them where they
/// are. Any thread may use it. The backend and what it has lent share it. No communicator knows it:
/// NCCL wants all ranks' buffers of a call registered, at the same place, or none of them, and
/// whether a rank's tensors are in such memory is its own affair. A block that comes back is lent
/// again, in the order of the user's stream; it is freed with the backend, or when it comes back
/// after that, by cudaFree, which waits until the device is done with it.
// Tested in tests/ops/gpu/nccl/nccl_memory_test.cc, tests/ops/gpu/nccl/nccl_backend_test.cc

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "ops/gpu/api/call.h"
#include "ops/gpu/api/handles.h"
#include "ops/gpu/nccl/communicator.h"

namespace hvd::gpu {

/// Registration says what NCCL is told of a buffer.
enum class Registration : std::uint8_t {
  None,
  Buffer,  ///< ncclCommRegister: each rank for itself
  Window,  ///< ncclCommWindowRegister: a symmetric window of all ranks
};

/// Returns whether this rank's NCCL has windows whose kernels end when they are aborted. Up
/// to 2.29.6 the barriers of the kernels over symmetric windows do not look whether they are: after
/// a failure they wait for ever, and whoever waits for their stream with them.
bool has_windows(const GpuApi& table);
/// Returns what was wanted, as far as NCCL has it; without windows, buffers. `windows`: whether all
/// ranks have them (`has_windows`).
Registration registration_of(Registration wanted, bool windows);

/// One piece of device memory and its registrations.
class FusionMemory {
 public:
  /// `remark` is told what registrations take; it outlives this.
  FusionMemory(const GpuApi& table, void* data, std::size_t bytes, Registration registration,
               const Remark& remark)
      : table_(&table), data_(data), bytes_(bytes), registration_(registration), remark_(&remark) {}
  /// Aborted communicators have forgotten their registrations.
  ~FusionMemory();
  FusionMemory(const FusionMemory&) = delete;
  FusionMemory& operator=(const FusionMemory&) = delete;

  /// Registers it, once with each communicator. Where NCCL has no use for a window it is registered
  /// as a buffer.
  void register_with(const CallContext& site, const std::shared_ptr<Communicator>& communicator);

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
  /// `threshold_bytes`: up to here it grows in powers of two; a batch that needs more gets what it
  /// needs. `remark` is told what memory and registrations take; it outlives the buffer.
  FusionBuffer(std::size_t threshold_bytes, Registration registration, const Remark& remark)
      : threshold_bytes_(threshold_bytes), registration_(registration), remark_(remark) {}

  /// At least `bytes`, aligned to 16, for work that is enqueued on `stream` from now on. Contents
  /// are not kept when it grows.
  std::byte* reserve(const CallContext& site, std::size_t bytes, const Stream& stream,
                     const std::vector<std::shared_ptr<Communicator>>& communicators);
  std::size_t capacity_bytes() const { return current_ ? current_->bytes() : 0; }

 private:
  struct Outgrown {
    std::unique_ptr<FusionMemory> memory;
    Event passed;
  };
  void grow(const CallContext& site, std::size_t bytes, const Stream& stream);
  std::unique_ptr<FusionMemory> allocate(const CallContext& site, std::size_t wanted_bytes,
                                         std::size_t needed_bytes);

  const std::size_t threshold_bytes_;
  const Registration registration_;
  const Remark& remark_;
  std::unique_ptr<FusionMemory> current_;
  std::vector<Outgrown> outgrown_;
};

class LentMemory : public std::enable_shared_from_this<LentMemory> {
 public:
  LentMemory(const GpuApi& table, int device) : table_(table), device_(device) {}

  /// At least `bytes`; null when the GPU has no more.
  std::shared_ptr<void> lend(std::size_t bytes);
  /// Returns whether these bytes lie in one of the blocks that are out.
  [[nodiscard]] bool has(const void* begin, std::size_t bytes) const;
  /// Frees what is not out, and from now on what comes back, for a device that has come to rest;
  /// nothing is lent any more. Without it the memory stays with the process.
  void close() noexcept;

 private:
  struct Block {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  std::optional<Block> take_idle(std::size_t bytes);
  std::optional<Block> make(std::size_t bytes);
  bool free_idle();
  void take_back(const void* data) noexcept;
  void free(const std::vector<Block>& blocks) const noexcept;

  const GpuApi& table_;
  const int device_;
  mutable std::mutex mutex_;  // of the rest
  std::vector<Block> out_, idle_;
  bool closed_ = false;
};

}  // namespace hvd::gpu
