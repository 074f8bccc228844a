#pragma once
/// LentMemory is device memory that users keep tensors in, so that NCCL reduces them where they are; it is from cudaMalloc. Any thread may
/// use it. It is shared by the backend and by what it has leased.
///
/// It is registered with no communicator: NCCL wants all ranks' buffers of a call registered, at the same place in what was registered, or
/// none of them (User Buffer Registration, NCCL's documentation), and whether a rank's tensors are in such memory is its own affair.
/// A block that is returned is leased again, in the order of the user's stream; it is freed with the backend, or when it is returned after
/// that, by cudaFree, which waits until the device is done with it.
// Tested in tests/ops/gpu/nccl/nccl_memory_test.cc

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "ops/gpu/api/handles.h"

namespace hvd::gpu {

class LentMemory : public std::enable_shared_from_this<LentMemory> {
 public:
  LentMemory(const GpuApi& table, int device) : table_(table), device_(device) {}

  /// At least `bytes`; null when the GPU has no more.
  std::shared_ptr<void> lend(std::size_t bytes);
  /// Returns whether these bytes lie in one of the blocks that are out.
  [[nodiscard]] bool has(const void* begin, std::size_t bytes) const;
  /// Ends leasing. `free`: whether the device comes to rest; otherwise the memory is given up.
  void close(bool free) noexcept;

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
  bool closed_ = false, given_up_ = false;
};

}  // namespace hvd::gpu
