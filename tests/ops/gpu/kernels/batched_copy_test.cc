// The code of the copy kernels, run on the host: each thread of each block in turn, against the
// oracle. What CUDA's headers would give is given here, so that the index arithmetic is tested
// where there is no GPU; tests/gpu tests the same cases on one.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/support/gpu/checks/poisoned_memory.h"
#include "tests/support/gpu/cuda_on_host.h"
#include "tests/support/oracle/copy_cases.h"

// After what it needs.
#include "ops/gpu/kernels/batched_copy_kernel.h"

namespace hvd::gpu::test {
namespace {

struct CopyInTurn {
  int* launches;

  template <class S, class D, class Op, int kCapacity>
  CudaCode launch(const device::Table<kCapacity>& table, const Op& op, std::uint32_t chunks) const {
    ++*launches;
    for (std::uint32_t block = 0; block < chunks; ++block) {
      for (int thread = 0; thread < device::kThreads; ++thread)
        device::copy_block<S, D>(table, op, block, thread);
    }
    return CudaCode::Success;
  }
};

/// Of one tensor, the chunks about these elements.
struct CopyAbout {
  std::vector<std::int64_t> elements;

  template <class S, class D, class Op, int kCapacity>
  CudaCode launch(const device::Table<kCapacity>& table, const Op& op, std::uint32_t chunks) const {
    for (const std::int64_t element : elements) {
      const std::int64_t middle = element / device::kChunkElements<S, D>;
      for (std::int64_t block = std::max<std::int64_t>(middle - 1, 0);
           block <= std::min<std::int64_t>(middle, chunks - 1); ++block)
        for (int thread = 0; thread < device::kThreads; ++thread)
          device::copy_block<S, D>(table, op, static_cast<std::uint32_t>(block), thread);
    }
    return CudaCode::Success;
  }
};

/// Memory on a 256-byte boundary, as a device has it.
struct Aligned {
  explicit Aligned(const std::vector<std::byte>& bytes) : memory(bytes.size() + 256) {
    base = memory.data() + (256 - reinterpret_cast<std::uintptr_t>(memory.data()) % 256) % 256;
    std::copy(bytes.begin(), bytes.end(), base);
  }
  std::vector<std::byte> memory;
  std::byte* base;
};

}  // namespace

TEST_CASE("batched copy: the kernel's code, thread by thread") {
  int cases = 0, launches = 0;
  for_each_copy_case(false, [&](const CopyCase& tried) {
    ++cases;
    const auto failure = copy_failure(tried, [&](const CopyCase&, const CopyMemory& memory) {
      const Aligned src(memory.src), dst(tried.in_place ? memory.src : memory.dst);
      const auto items = memory.items(tried, tried.in_place ? dst.base : src.base, dst.base);
      launches = 0;
      CHECK(device::copy_job(tried.job(items), CopyInTurn{&launches}) == CudaCode::Success);
      return std::vector<std::byte>(dst.base,
                                    dst.base + (tried.in_place ? memory.src : memory.dst).size());
    });
    CHECK_MESSAGE(!failure, failure.value_or(""));
    CHECK(launches ==
          (static_cast<int>(tried.counts.size()) + kItemsPerLaunch - 1) / kItemsPerLaunch);
  });
  CHECK(cases > 500);
  CHECK(misaligned == 0);
}

TEST_CASE("batched copy: aligned tensors are read and written 16 bytes at a time") {
  std::vector<float> storage(4096 + 64);
  float* src = storage.data();
  while (reinterpret_cast<std::uintptr_t>(src) % 16 != 0) ++src;
  std::vector<float> result(4096 + 64);
  float* dst = result.data();
  while (reinterpret_cast<std::uintptr_t>(dst) % 16 != 0) ++dst;
  int launches = 0;
  const std::vector<CopyItem> items{{src, dst, 4096}};
  wide_loads = wide_stores = 0;
  CHECK(device::copy_job({.items = items}, CopyInTurn{&launches}) == CudaCode::Success);
  CHECK(wide_loads == 1024);
  CHECK(wide_stores == 1024);
  const std::vector<CopyItem> askew{{src + 1, dst, 4096}};
  wide_loads = wide_stores = 0;
  CHECK(device::copy_job({.items = askew}, CopyInTurn{&launches}) == CudaCode::Success);
  CHECK(wide_loads == 0);
  CHECK(wide_stores == 1024);
}

TEST_CASE("batched copy: counts beyond 2^31 and 2^32, whose memory is mostly never touched") {
  constexpr std::int64_t k31 = std::int64_t{1} << 31, k32 = std::int64_t{1} << 32;
  for (const std::int64_t count : {k31 + 1000, k32 + 1000}) {
    const PoisonedMemory from(static_cast<std::size_t>(count) * 2),
        to(static_cast<std::size_t>(count) * 2);
    auto* const src = static_cast<std::uint16_t*>(from.data());
    auto* const dst = static_cast<std::uint16_t*>(to.data());
    const std::vector<std::int64_t> edges{0, k31 / 2, k31, k32 / 2, k32, count - 1};
    const auto for_each = [&](const auto& use) {
      for (const std::int64_t edge : edges)
        for (std::int64_t i = edge - 500; i < edge + 500; ++i)
          if (i >= 0 && i < count) use(i);
    };
    for_each([&](std::int64_t i) { src[i] = static_cast<std::uint16_t>(i * 7 + (i >> 16)); });
    const std::vector<CopyItem> items{{src, dst, count}};
    CHECK(device::copy_job({.items = items, .from = DataType::Float16, .to = DataType::Float16},
                           CopyAbout{edges}) == CudaCode::Success);
    int wrong = 0;
    for_each([&](std::int64_t i) { wrong += dst[i] == src[i] ? 0 : 1; });
    CHECK(wrong == 0);
  }
}

TEST_CASE("batched copy: what is refused and what is nothing") {
  int launches = 0;
  const std::vector<CopyItem> empty{{nullptr, nullptr, 0}, {nullptr, nullptr, 0}};
  CHECK(device::copy_job({.items = empty}, CopyInTurn{&launches}) == CudaCode::Success);
  CHECK(device::copy_job({}, CopyInTurn{&launches}) == CudaCode::Success);
  CHECK(launches == 0);
  CHECK(device::copy_job({.items = {}, .from = DataType::Float64, .to = DataType::Float16},
                         CopyInTurn{&launches}) == CudaCode::InvalidValue);
  CHECK(device::copy_job({.items = {}, .from = DataType::Bool, .to = DataType::Bool, .factor = 2},
                         CopyInTurn{&launches}) == CudaCode::InvalidValue);
  CHECK(device::copy_job({.items = {}, .divisor = 0}, CopyInTurn{&launches}) ==
        CudaCode::InvalidValue);
}

}  // namespace hvd::gpu::test
