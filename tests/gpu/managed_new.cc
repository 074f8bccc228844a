// The memory of the contract suite where its tensors are to be a GPU's: everything the program
// allocates is CUDA managed memory, which the host's code and the device's kernels both reach. For
// contract_gpu_tests only. One block, cut into powers of two that come back to a list of their
// size. Before the GPU is found, and where there is none, it is ordinary memory.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>

namespace {

// of addresses; only what is used takes memory
constexpr std::size_t kBlock = std::size_t{8} << 30;
constexpr unsigned kSmallest = 6;  // 64 bytes

struct Free {
  Free* next;
};

class ManagedMemory {
 public:
  void* allocate(std::size_t bytes) {
    static thread_local bool inside = false;  // CUDA itself allocates
    if (inside) return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    const std::lock_guard lock(mutex_);
    if (begin_ == nullptr && !refused_) {
      void* block = nullptr;
      inside = true;
      require_concurrent_access();
      refused_ = cudaMallocManaged(&block, kBlock, cudaMemAttachGlobal) != cudaSuccess;
      inside = false;
      begin_ = static_cast<std::byte*>(block);
    }
    const unsigned size =
        std::max(kSmallest, static_cast<unsigned>(std::bit_width(bytes == 0 ? 0 : bytes - 1)));
    if (Free*& list = lists_[size]; list != nullptr) {
      Free* taken = list;
      list = taken->next;
      return taken;
    }
    const std::size_t room = std::size_t{1} << size;
    if (begin_ == nullptr || room > kBlock - used_)
      return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::byte* taken = begin_ + used_;
    used_ += room;
    return taken;
  }
  /// False: it is not from here.
  bool free(void* memory, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    auto* at = static_cast<std::byte*>(memory);
    if (begin_ == nullptr || at < begin_ || at >= begin_ + kBlock) return false;
    const unsigned size =
        std::max(kSmallest, static_cast<unsigned>(std::bit_width(bytes == 0 ? 0 : bytes - 1)));
    lists_[size] = new (memory) Free{lists_[size]};
    return true;
  }

 private:
  /// Host and device work on it at the same time, which not every system lets them (WSL2, some
  /// virtual GPUs): there this program is a skip.
  static void require_concurrent_access() {
    int devices = 0, device = 0, concurrent = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 ||
        cudaGetDevice(&device) != cudaSuccess)
      return;
    if (cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, device) ==
            cudaSuccess &&
        concurrent != 0)
      return;
    std::fputs("skipped: host and device cannot work on managed memory at the same time here\n",
               stderr);
    std::_Exit(77);
  }

  std::mutex mutex_;
  std::byte* begin_ = nullptr;
  bool refused_ = false;
  std::size_t used_ = 0;
  std::array<Free*, 64> lists_{};
};

ManagedMemory& managed() {
  alignas(ManagedMemory) static std::byte place[sizeof(ManagedMemory)];
  // never destroyed: others are destroyed after it
  static auto* const memory = new (place) ManagedMemory;
  return *memory;
}

/// In front of every block: its size, so that it finds its list again.
constexpr std::size_t kHead = 64;

}  // namespace

void* operator new(std::size_t bytes) {
  void* memory = managed().allocate(bytes + kHead);
  if (memory == nullptr) throw std::bad_alloc();
  *static_cast<std::size_t*>(memory) = bytes + kHead;
  return static_cast<std::byte*>(memory) + kHead;
}
void operator delete(void* memory) noexcept {
  if (memory == nullptr) return;
  void* block = static_cast<std::byte*>(memory) - kHead;
  if (!managed().free(block, *static_cast<std::size_t*>(block))) std::free(block);
}
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }
