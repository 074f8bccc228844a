// The copy kernels on a real GPU against the host oracle, then their speed on ResNet-50's
// gradients. A plain program: prints what it found, returns 1 if anything differs, 77 (a skip)
// where there is no GPU.
//
//   Right: the cases of tests/support/oracle/copy_cases.h.
//   Speed: bytes read plus bytes written over the time of the fastest of 20 launches; "of copy"
//   against cudaMemcpyAsync of the same bytes,
//   device to device, counted the same way. Below 85 % is a failure where tensors lie as LibTorch
//   aligns them.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#include "ops/gpu/kernels/kernels.h"
#include "tests/support/gpu/gpu.h"
#include "tests/support/oracle/copy_cases.h"

namespace {

using hvd::DataType;
using hvd::element_bytes;
using namespace hvd::gpu;
using namespace hvd::test;

/// The number of cases that came out wrong.
int compare_all() {
  int cases = 0, failures = 0;
  test::for_each_copy_case(true, [&](const test::CopyCase& tried) {
    ++cases;
    const auto failure = test::copy_failure(tried, [](const test::CopyCase& same,
                                                      const test::CopyMemory& memory) {
      std::vector<std::byte> got = same.in_place ? memory.src : memory.dst;
      const DeviceMemory src(memory.src.size()), separate(got.size());
      std::byte* dst = same.in_place ? src.data() : separate.data();
      require(cudaMemcpy(src.data(), memory.src.data(), memory.src.size(), cudaMemcpyHostToDevice),
              "cudaMemcpy");
      require(cudaMemcpy(dst, got.data(), got.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
      const auto items = memory.items(same, src.data(), dst);
      require(launch_batched_copy(same.job(items), nullptr), "launch_batched_copy");
      require(cudaMemcpy(got.data(), dst, got.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
      return got;
    });
    if (!failure) return;
    ++failures;
    std::printf("FAILED %s\n", failure->c_str());
  });
  std::printf("%d cases compared with the host, %d failures\n", cases, failures);
  return failures;
}

/// The 161 tensors of ResNet-50's gradient list.
std::vector<std::int64_t> resnet50() {
  std::vector<std::int64_t> counts{64 * 3 * 49, 64, 64};
  std::int64_t in = 64;
  const auto convolution = [&](std::int64_t from, std::int64_t to, std::int64_t window) {
    counts.insert(counts.end(), {from * to * window, to, to});
  };
  for (const auto& [width, blocks] :
       std::vector<std::pair<std::int64_t, int>>{{64, 3}, {128, 4}, {256, 6}, {512, 3}}) {
    for (int block = 0; block < blocks; ++block) {
      convolution(in, width, 1);
      convolution(width, width, 9);
      convolution(width, width * 4, 1);
      if (block == 0) convolution(in, width * 4, 1);
      in = width * 4;
    }
  }
  counts.insert(counts.end(), {2048 * 1000, 1000});
  return counts;
}

int measure() {
  const auto counts = resnet50();
  std::size_t elements = 0;
  for (const std::int64_t count : counts)
    elements += (static_cast<std::size_t>(count) + 63) / 64 * 64;
  DeviceMemory tensors(elements * 4 + counts.size() * 512), buffer(elements * 4);
  require(cudaMemset(tensors.data(), 0, elements * 4), "cudaMemset");
  require(cudaMemset(buffer.data(), 0, elements * 4), "cudaMemset");
  std::size_t sum = 0;
  for (const std::int64_t count : counts) sum += static_cast<std::size_t>(count);
  const double gigabytes = static_cast<double>(sum) * 1e-9;
  const double limit = 2 * 4 * gigabytes / fastest([&] {
                         require(cudaMemcpyAsync(buffer.data(), tensors.data(), sum * 4,
                                                 cudaMemcpyDeviceToDevice, nullptr),
                                 "copy");
                       });
  std::printf("ResNet-50: %zu tensors, %zu elements; cudaMemcpy device to device %.0f GB/s\n",
              counts.size(), sum, limit);

  constexpr double kLeast = 85;
  int failures = 0;
  const auto report = [&](const char* what, DataType from, DataType to, double factor, bool unpack,
                          std::size_t skew) {
    std::vector<CopyItem> items;
    std::size_t at = 0;
    // the tensors as PyTorch allocates them, 512-byte aligned
    for (const std::int64_t count : counts) {
      const std::size_t element = element_bytes(unpack ? to : from);
      std::byte* tensor = tensors.data() + at * 4 + skew * element;
      std::byte* piece = buffer.data() + at * element_bytes(unpack ? from : to);
      items.push_back(unpack ? CopyItem{piece, tensor, count} : CopyItem{tensor, piece, count});
      at += (static_cast<std::size_t>(count) + 63) / 64 * 64;
    }
    const double seconds = fastest([&] {
      require(
          launch_batched_copy(
              {.items = items, .from = from, .to = to, .factor = factor, .divisor = 1}, nullptr),
          "launch");
    });
    const double rate =
        static_cast<double>(element_bytes(from) + element_bytes(to)) * gigabytes / seconds;
    const bool too_slow = skew == 0 && 100 * rate / limit < kLeast;
    failures += too_slow ? 1 : 0;
    std::printf("  %-42s %7.1f us %6.0f GB/s %5.1f %% of copy%s\n", what, seconds * 1e6, rate,
                100 * rate / limit, too_slow ? " FAILED" : "");
  };
  using enum DataType;
  report("pack float32", Float32, Float32, 1, false, 0);
  report("unpack float32", Float32, Float32, 1, true, 0);
  report("pack float32, scaled", Float32, Float32, 0.25, false, 0);
  report("unpack float32, scaled", Float32, Float32, 0.25, true, 0);
  report("pack float32 as float16, scaled", Float32, Float16, 0.25, false, 0);
  report("unpack float16 as float32, scaled", Float16, Float32, 0.25, true, 0);
  report("pack float32 as bfloat16", Float32, BFloat16, 1, false, 0);
  report("pack float16", Float16, Float16, 1, false, 0);
  report("pack float16, scaled", Float16, Float16, 0.25, false, 0);
  report("pack float32, sources off by 4 bytes", Float32, Float32, 1, false, 1);
  report("unpack float32, destinations off by 4 bytes", Float32, Float32, 1, true, 1);
  return failures;
}

}  // namespace

int main() { return run_on_gpu(compare_all, measure); }
