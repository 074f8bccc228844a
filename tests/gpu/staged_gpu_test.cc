// The memory that staged tensors go through, on a device: it is registered with CUDA once, copies
// of it are whole, run behind a stream without the host and at a rate of their own, and afterwards
// nothing of it is registered. And a thread without a context is lent one. A plain program: prints
// what it found, returns 1 if anything is wrong, 77 (a skip) where there is no GPU.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "ops/gpu/api/handles.h"
#include "ops/gpu/staged/pinned_pool.h"
#include "tests/support/gpu/gpu.h"

namespace {

using namespace hvd::gpu;
using hvd::test::DeviceMemory;
using hvd::test::fastest;
using hvd::test::require;

int failures = 0;

void expect(bool condition, const std::string& what) {
  if (condition) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

bool is_registered(const void* memory) {
  cudaPointerAttributes attributes{};
  require(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes");
  return attributes.type == cudaMemoryTypeHost;
}

double rate(std::byte* host, const DeviceMemory& device, std::size_t bytes) {
  const double seconds = fastest([&] {
    require(cudaMemcpyAsync(host, device.data(), bytes, cudaMemcpyDefault, nullptr),
            "cudaMemcpyAsync");
    require(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  });
  return static_cast<double>(bytes) / seconds * 1e-9;
}

int compare() {
  constexpr std::size_t kArena = std::size_t{512} << 20, kBlock = std::size_t{64} << 20;
  const std::shared_ptr<void> memory(
      ::operator new(kArena, std::align_val_t(4096)),
      [](void* taken) { ::operator delete(taken, std::align_val_t(4096)); });
  auto* const begin = static_cast<std::byte*>(memory.get());
  std::memset(begin, 0, kArena);
  const auto arena = std::make_shared<hvd::Arena>(std::span(begin, kArena));
  const DeviceMemory device(kBlock);
  std::byte* block = nullptr;
  {
    PinnedPool pool(*linked_gpu_api(), 0, arena, memory);
    std::byte* const small = pool.allocate(1000);
    block = pool.allocate(kBlock);
    expect(small != nullptr && block != nullptr, "memory that CUDA registers");
    if (block == nullptr) return failures;
    expect(is_registered(small) && is_registered(block) && is_registered(block + kBlock - 1),
           "both blocks to be registered");
    for (std::size_t i = 0; i < kBlock; ++i) block[i] = static_cast<std::byte>(i * 7 + i / 4096);
    const std::vector<std::byte> before(block, block + kBlock);
    require(linked_gpu_api()->memcpy_async(device.data(), block, kBlock, nullptr),
            "cudaMemcpyAsync");
    require(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    std::memset(block, 0, kBlock);
    require(linked_gpu_api()->memcpy_async(block, device.data(), kBlock, nullptr),
            "cudaMemcpyAsync");
    require(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    expect(std::memcmp(block, before.data(), kBlock) == 0, "a block to come back as it went");
    std::vector<std::byte> ordinary(kBlock);
    const double registered = rate(block, device, kBlock),
                 pageable = rate(ordinary.data(), device, kBlock);
    std::printf(
        "64 MiB to the host: %.1f GB/s to registered memory, %.1f GB/s to ordinary memory\n",
        registered, pageable);
    expect(registered >= pageable, "copies to registered memory not to be slower");
    pool.free(small);
    pool.free(block);
  }
  expect(!is_registered(block), "nothing to be registered afterwards");
  expect(arena->used_bytes() == 0, "the arena to have its memory back");
  return failures;
}

/// A thread is lent the context of the device, and then has none again.
int lend_context() {
  std::thread([] {
    expect(linked_gpu_api()->push_device(0) == CudaCode::Success, "a context to be lent");
    int current = -1;
    require(cudaGetDevice(&current), "cudaGetDevice");
    expect(current == 0, "device 0 to be current");
    {
      const DeviceMemory some(1 << 20);
      expect(some.data() != nullptr, "memory");
    }
    expect(linked_gpu_api()->pop_device() == CudaCode::Success, "the context to be taken back");
    bool exists = false;
    expect(linked_gpu_api()->has_context(0, &exists) == CudaCode::Success && exists,
           "the process to have a context on device 0");
    int devices = 0;
    require(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    if (devices < 2) {
      std::printf("(one GPU: a thread on another one, without a context there, was not tried)\n");
      return;
    }
    expect(linked_gpu_api()->has_context(1, &exists) == CudaCode::Success && !exists,
           "no context on device 1 yet");
    std::thread([] {
      const CallContext other{.table = linked_gpu_api(), .rank = 0, .device = 1, .tensors = {}};
      { const DeviceGuard guard(other); }  // device 0 is used: it is set again
      int now = -1;
      require(cudaGetDevice(&now), "cudaGetDevice");
      expect(now == 0, "the thread to be on the device that it was on");
      expect(linked_gpu_api()->push_device(1) == CudaCode::Success,
             "the other device's context to be lent");
      require(cudaGetDevice(&now), "cudaGetDevice");
      expect(now == 1, "the other device to be current");
      expect(linked_gpu_api()->pop_device() == CudaCode::Success, "it to be taken back");
      require(cudaGetDevice(&now), "cudaGetDevice");
      expect(now == 0, "the first device to be current again");
    }).join();
  }).join();
  return 0;
}

}  // namespace

int main() {
  try {
    return hvd::test::run_on_gpu([] { return compare() + lend_context(); },
                                 [] { return failures; });
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
}
