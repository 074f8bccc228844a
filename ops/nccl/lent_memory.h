#pragma once
/// Room card: device memory that users keep tensors in, so that NCCL reduces them where they are; from ncclMemAlloc. Any thread. Shared by
/// the backend and by what it has lent.
///
/// It is registered with no communicator: NCCL wants all ranks' buffers of a call registered, at the same place in what was registered, or
/// none of them (User Buffer Registration, NCCL's documentation), and whether a rank's tensors are in such memory is its own affair.
/// A block that comes back is lent again, and freed only with the backend, when the device has come to rest. Blocks that are still out then
/// are freed when they come back.

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
  /// Whether these bytes lie in one of the blocks that are out.
  [[nodiscard]] bool has(const void* begin, std::size_t bytes) const;
  /// Nothing is lent any more. `free`: whether the device is done with the blocks.
  void close(bool free) noexcept;

 private:
  void take_back(const void* block) noexcept;

  const NcclTable& table_;
  const int device_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<FusionMemory>> out_, idle_;
  bool closed_ = false;
};

}  // namespace hvd::nccl
