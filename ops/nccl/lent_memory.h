#pragma once
/// Room card: device memory that users keep tensors in, so that NCCL reduces them where they are: from ncclMemAlloc, registered with each
/// communicator that uses it. Any thread, but for `find`, which is the driver's. Shared by the backend and by what it has lent.
///
/// A block that comes back is lent again, and freed only with the backend: taking its registrations back is a call on communicators, which
/// belong to the driver. Blocks that are still out then are freed when they come back.

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "ops/nccl/fusion_buffer.h"

namespace hvd::nccl {

class LentMemory : public std::enable_shared_from_this<LentMemory> {
 public:
  LentMemory(const NcclTable& table, int device) : table_(table), device_(device) {}

  /// At least `bytes`; null when the GPU has no more.
  std::shared_ptr<void> lend(std::size_t bytes);
  /// The block that these bytes lie in; null if they do not.
  [[nodiscard]] std::shared_ptr<FusionMemory> find(const void* begin, std::size_t bytes) const;
  /// The communicators have been aborted. `free`: whether the device is done with the blocks.
  void close(bool free) noexcept;

 private:
  void take_back(const void* block) noexcept;

  const NcclTable& table_;
  const int device_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<FusionMemory>> out_, idle_;
  bool closed_ = false;
};

}  // namespace hvd::nccl
