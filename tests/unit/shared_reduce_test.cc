// The code of the reduction kernel, run on the host: each thread of each block in turn, against the host's scalar kernels, bit for bit.
// What CUDA's headers would give is given here; tests/gpu tests the same cases on a GPU.
#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "tests/support/reduce_cases.h"

// CUDA's, as far as the kernel uses it.
namespace {

struct alignas(16) uint4 {
  std::array<std::uint32_t, 4> words;
};
using __half = hvd::nccl::test::Half;                                                     // NOLINT: CUDA's name
using __nv_bfloat16 = hvd::nccl::test::Bfloat;                                            // NOLINT
inline float __half2float(__half value) { return static_cast<float>(value); }             // NOLINT
inline float __bfloat162float(__nv_bfloat16 value) { return static_cast<float>(value); }  // NOLINT
inline __half __float2half_rn(float value) { return static_cast<__half>(value); }         // NOLINT
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }    // NOLINT

std::uint64_t wide_accesses = 0;
std::uint64_t misaligned = 0;  // would be a fault on the device

uint4 __ldcs(const uint4* from) {  // NOLINT
  ++wide_accesses;
  if (reinterpret_cast<std::uintptr_t>(from) % alignof(uint4) != 0) ++misaligned;
  return *from;
}
void __stwb(uint4* to, uint4 value) {  // NOLINT
  ++wide_accesses;
  if (reinterpret_cast<std::uintptr_t>(to) % alignof(uint4) != 0) ++misaligned;
  *to = value;
}

}  // namespace

#define HVD_DEVICE inline
#define HVD_UNROLL
#include "ops/nccl/shared_reduce_kernel.h"

namespace hvd::nccl::test {
namespace {

struct InTurn {
  int* launches;

  template <class T, class Fold>
  CudaCode launch(const reduction::Table& table, const Fold& fold, std::uint32_t chunks) const {
    ++*launches;
    for (std::uint32_t block = 0; block < chunks; ++block)
      for (int thread = 0; thread < reduction::kThreads; ++thread) reduction::reduce_block<T>(table, fold, block, thread);
    return CudaCode::Success;
  }
};

}  // namespace

TEST_CASE("shared reduce: the kernel's code, thread by thread") {
  int cases = 0, launches = 0;
  for_each_reduce_case([&](const ReduceCase& tried) {
    ++cases;
    CAPTURE(tried.text());
    ReduceMemory memory(tried);
    ReduceMemory expected = memory;
    int used = 0;
    REQUIRE(reduction::reduce_job(memory.job(tried), InTurn{&used}) == CudaCode::Success);
    REQUIRE(reduce_job_on_host(expected.job(tried)) == CudaCode::Success);
    const auto failure = memory.difference(tried, expected);
    CHECK_MESSAGE(!failure, *failure);
    launches += used;
  });
  CHECK(cases > 500);
  CHECK(launches > cases);
  CHECK(wide_accesses > 0);
  CHECK(misaligned == 0);
}

TEST_CASE("shared reduce: what is not supported is refused, nothing is launched for nothing") {
  ReduceJob job;
  int launches = 0;
  for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Product, ReduceOp::Average, ReduceOp::Adasum}) {
    job.dtype = op == ReduceOp::Adasum ? DataType::Float32 : DataType::Bool;
    job.op = op;
    CHECK(reduction::reduce_job(job, InTurn{&launches}) == CudaCode::InvalidValue);
  }
  job.op = ReduceOp::Sum;
  job.dtype = DataType::Float32;
  CHECK(reduction::reduce_job(job, InTurn{&launches}) == CudaCode::Success);
  job.ins = kMostSharers + 1;
  CHECK(reduction::reduce_job(job, InTurn{&launches}) == CudaCode::InvalidValue);
  CHECK(launches == 0);
}

}  // namespace hvd::nccl::test
