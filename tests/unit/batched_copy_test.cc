// The code of the copy kernels, run on the host: each thread of each block in turn, against the oracle. What CUDA's headers would give is
// given here, so that the index arithmetic is tested where there is no GPU; tests/gpu tests the same cases on one.
#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "tests/support/copy_cases.h"

// CUDA's, as far as the kernel uses it.
namespace {

struct alignas(8) uint2 {
  std::array<std::uint32_t, 2> words;
};
struct alignas(16) uint4 {
  std::array<std::uint32_t, 4> words;
};
using __half = hvd::nccl::test::Half;                                                     // NOLINT: CUDA's name
using __nv_bfloat16 = hvd::nccl::test::Bfloat;                                            // NOLINT
inline float __half2float(__half value) { return static_cast<float>(value); }             // NOLINT
inline float __bfloat162float(__nv_bfloat16 value) { return static_cast<float>(value); }  // NOLINT
inline __half __float2half_rn(float value) { return static_cast<__half>(value); }         // NOLINT
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }    // NOLINT

std::uint64_t wide_loads = 0;  // of whole groups, as one access
std::uint64_t wide_stores = 0;
std::uint64_t misaligned = 0;  // would be a fault on the device

template <class Word>
Word __ldcs(const Word* from) {  // NOLINT
  ++wide_loads;
  if (reinterpret_cast<std::uintptr_t>(from) % alignof(Word) != 0) ++misaligned;
  return *from;
}
template <class Word>
void __stwb(Word* to, Word value) {  // NOLINT
  ++wide_stores;
  if (reinterpret_cast<std::uintptr_t>(to) % alignof(Word) != 0) ++misaligned;
  *to = value;
}

}  // namespace

#define HVD_DEVICE inline
#define HVD_UNROLL
#include "ops/nccl/batched_copy_kernel.h"

namespace hvd::nccl::test {
namespace {

struct InTurn {
  int* launches;

  template <class S, class D, class Op, int kCapacity>
  CudaCode launch(const device::Table<kCapacity>& table, const Op& op, std::uint32_t chunks) const {
    ++*launches;
    for (std::uint32_t block = 0; block < chunks; ++block) {
      for (int thread = 0; thread < device::kThreads; ++thread) device::copy_block<S, D>(table, op, block, thread);
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
      CHECK(device::copy_job(tried.job(items), InTurn{&launches}) == CudaCode::Success);
      return std::vector<std::byte>(dst.base, dst.base + (tried.in_place ? memory.src : memory.dst).size());
    });
    CHECK_MESSAGE(!failure, failure.value_or(""));
    CHECK(launches == (static_cast<int>(tried.counts.size()) + kItemsPerLaunch - 1) / kItemsPerLaunch);
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
  CHECK(device::copy_job({.items = items}, InTurn{&launches}) == CudaCode::Success);
  CHECK(wide_loads == 1024);
  CHECK(wide_stores == 1024);
  const std::vector<CopyItem> askew{{src + 1, dst, 4096}};
  wide_loads = wide_stores = 0;
  CHECK(device::copy_job({.items = askew}, InTurn{&launches}) == CudaCode::Success);
  CHECK(wide_loads == 0);
  CHECK(wide_stores == 1024);
}

TEST_CASE("batched copy: what is refused and what is nothing") {
  int launches = 0;
  const std::vector<CopyItem> empty{{nullptr, nullptr, 0}, {nullptr, nullptr, 0}};
  CHECK(device::copy_job({.items = empty}, InTurn{&launches}) == CudaCode::Success);
  CHECK(device::copy_job({}, InTurn{&launches}) == CudaCode::Success);
  CHECK(launches == 0);
  CHECK(device::copy_job({.items = {}, .from = DataType::Float64, .to = DataType::Float16}, InTurn{&launches}) == CudaCode::InvalidValue);
  CHECK(device::copy_job({.items = {}, .from = DataType::Bool, .to = DataType::Bool, .factor = 2}, InTurn{&launches}) ==
        CudaCode::InvalidValue);
  CHECK(device::copy_job({.items = {}, .divisor = 0}, InTurn{&launches}) == CudaCode::InvalidValue);
}

}  // namespace hvd::nccl::test
