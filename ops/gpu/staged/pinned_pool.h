#pragma once
/// A PinnedPool is host memory that a GPU copies from and to by itself: slabs from this rank's
/// arena, each registered with CUDA once (cudaHostRegister) and handed out in blocks. From memory
/// that is not registered CUDA copies by way of a small buffer of its own, on the calling thread,
/// at a fraction of the rate.
///
/// Whole slabs, which only this pool uses, and not the arena where a block happens to lie: a copy
/// of memory that is registered in part is refused, and other users of the arena give pages back to
/// the system, while a registration goes on naming those that it has found. Slabs stay until the
/// end. Where CUDA registers none, or the arena has no room, there is no block.
///
/// Any thread may use it. It owns the slabs and their registrations, and keeps the memory that they
/// lie in. It never fails.
// Tested in tests/ops/gpu/staged/staged_backend_test.cc, tests/gpu/staged_gpu_test.cc

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "ops/gpu/api/call.h"
#include "ops/shm/memory/arena.h"

namespace hvd::gpu {

class PinnedPool {
 public:
  static constexpr std::chrono::milliseconds kLimit{10'000};
  /// `owner`: what the arena's memory lives by; may be null. `limit`: how long the destructor waits
  /// for CUDA to let go of a slab, which may wait for the device; one that it does not let go of
  /// stays, with the memory that it lies in, until the process ends. `refused` is told why CUDA
  /// registers nothing, if it does not; may be empty.
  PinnedPool(const GpuApi& table, int device, std::shared_ptr<Arena> arena,
             std::shared_ptr<void> owner, Remark refused = {},
             std::chrono::milliseconds limit = kLimit);
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  /// Returns at least `bytes`, aligned to 64, or null.
  std::byte* allocate(std::size_t bytes);
  void free(std::byte* block) noexcept;

 private:
  struct Slab {
    std::byte* base = nullptr;
    std::size_t bytes = 0;
    std::unique_ptr<Arena> blocks;
  };
  [[nodiscard]] bool grow(std::size_t bytes);

  const GpuApi& table_;
  const int device_;
  const std::shared_ptr<Arena> arena_;
  const std::shared_ptr<void> owner_;
  const Remark tell_refused_;
  const std::chrono::milliseconds limit_;
  std::mutex mutex_;  // of the rest
  std::vector<Slab> slabs_;
  bool refused_ = false;  ///< by CUDA, which is not asked again
};

}  // namespace hvd::gpu
