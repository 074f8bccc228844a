// The code of the reduction kernel, run on the host: each thread of each block in turn, against the
// host's scalar kernels, bit for bit. What CUDA's headers would give is given here; tests/gpu tests
// the same cases on a GPU.
#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "tests/support/gpu/cuda_on_host.h"
#include "tests/support/oracle/reduce_cases.h"

// After what it needs.
#include "ops/gpu/kernels/shared_reduce_kernel.h"

namespace hvd::gpu::test {
namespace {

struct ReduceInTurn {
  int* launches;

  template <class T, class Fold>
  CudaCode launch(const reduction::Table& table, const Fold& fold, std::uint32_t chunks) const {
    ++*launches;
    for (std::uint32_t block = 0; block < chunks; ++block)
      for (int thread = 0; thread < reduction::kThreads; ++thread)
        reduction::reduce_block<T>(table, fold, block, thread);
    return CudaCode::Success;
  }
};

}  // namespace

TEST_CASE("shared reduce: the kernel's code, thread by thread") {
  int cases = 0, launches = 0;
  wide_loads = wide_stores = 0;
  for_each_reduce_case([&](const ReduceCase& tried) {
    ++cases;
    CAPTURE(tried.text());
    ReduceMemory memory(tried);
    ReduceMemory expected = memory;
    int used = 0;
    REQUIRE(reduction::reduce_job(memory.job(tried), ReduceInTurn{&used}) == CudaCode::Success);
    REQUIRE(reduce_job_on_host(expected.job(tried)) == CudaCode::Success);
    const auto failure = memory.difference(tried, expected);
    CHECK_MESSAGE(!failure, *failure);
    launches += used;
  });
  CHECK(cases > 500);
  CHECK(launches > cases);
  CHECK(wide_loads + wide_stores > 0);
  CHECK(misaligned == 0);
}

TEST_CASE("shared reduce: what is not supported is refused, nothing is launched for nothing") {
  ReduceJob job;
  int launches = 0;
  for (const ReduceOp op :
       {ReduceOp::Sum, ReduceOp::Product, ReduceOp::Average, ReduceOp::Adasum}) {
    job.dtype = op == ReduceOp::Adasum ? DataType::Float32 : DataType::Bool;
    job.op = op;
    CHECK(reduction::reduce_job(job, ReduceInTurn{&launches}) == CudaCode::InvalidValue);
  }
  job.op = ReduceOp::Sum;
  job.dtype = DataType::Float32;
  CHECK(reduction::reduce_job(job, ReduceInTurn{&launches}) == CudaCode::Success);
  job.ins = kMostSharers + 1;
  CHECK(reduction::reduce_job(job, ReduceInTurn{&launches}) == CudaCode::InvalidValue);
  CHECK(launches == 0);
}

}  // namespace hvd::gpu::test
