// The kernel that makes results of an abort unusable, on a GPU: nothing is written while the mark
// is not set, and every byte once the host has set it, also where it does so while the stream is on
// its way. And what it costs behind a batch. Prints what it found, returns 1 if anything is wrong,
// 77 (a skip) where there is no GPU.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "ops/gpu/api/gpu_api.h"
#include "tests/support/gpu/gpu.h"

namespace {

using namespace hvd::gpu;
using hvd::test::DeviceMemory;
using hvd::test::require;

constexpr std::size_t kBytes = std::size_t{3} << 20;

/// The mark, where the device reads it.
std::uint32_t* make_mark() {
  void* memory = nullptr;
  require(linked_gpu_api()->host_malloc(&memory, sizeof(std::uint32_t)), "cudaHostAlloc");
  return static_cast<std::uint32_t*>(memory);
}

/// Odd addresses and sizes, more items than one launch takes.
std::vector<PoisonItem> items_in(std::byte* memory) {
  std::vector<PoisonItem> items;
  for (std::size_t i = 0; i < 200; ++i) items.push_back({memory + i * 1000 + 1, i * 4 + 1});
  items.push_back({memory + 300'001, kBytes - 300'002});
  return items;
}

int compare() {
  int failures = 0;
  std::uint32_t* const mark = make_mark();
  for (const bool set : {false, true}) {
    const DeviceMemory memory(kBytes);
    require(cudaMemset(memory.data(), 7, kBytes), "cudaMemset");
    const auto items = items_in(memory.data());
    std::vector<std::uint8_t> expected(kBytes, 7), got(kBytes);
    if (set)
      for (const auto& [begin, bytes] : items)
        std::memset(expected.data() + (static_cast<std::byte*>(begin) - memory.data()), 0xff,
                    bytes);
    *static_cast<volatile std::uint32_t*>(mark) = set ? 1 : 0;
    require(launch_poison({.items = items, .mark = mark, .dtype = hvd::DataType::Float32}, nullptr),
            "launch_poison");
    require(cudaMemcpy(got.data(), memory.data(), kBytes, cudaMemcpyDefault), "cudaMemcpy");
    if (got != expected) {
      ++failures;
      std::printf("FAILED: with the mark %s the bytes are not what they should be\n",
                  set ? "set" : "not set");
    }
  }
  require(linked_gpu_api()->host_free(mark), "cudaFreeHost");
  std::printf("%d of 2 comparisons failed\n", failures);
  return failures;
}

int measure() {
  std::uint32_t* const mark = make_mark();
  const DeviceMemory memory(kBytes);
  const std::vector<PoisonItem> items{{memory.data(), kBytes}};
  const PoisonJob job{.items = items, .mark = mark, .dtype = hvd::DataType::Float32};
  const double seconds =
      hvd::test::fastest([&] { require(launch_poison(job, nullptr), "launch_poison"); });
  std::printf("  behind a batch of 3 MiB that was not aborted: %.1f us\n", seconds * 1e6);
  require(linked_gpu_api()->host_free(mark), "cudaFreeHost");
  return 0;
}

}  // namespace

int main() { return hvd::test::run_on_gpu(compare, measure); }
