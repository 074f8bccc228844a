// The code of the reduction kernel, run on the host: each thread of each block in turn, against the
// host's scalar kernels, bit for bit. What CUDA's headers would give is given here; tests/gpu tests
// the same cases on a GPU.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tests/support/gpu/checks/poisoned_memory.h"
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

/// Of one item, the chunks about these elements.
struct ReduceAbout {
  std::vector<std::int64_t> elements;

  template <class T, class Fold>
  CudaCode launch(const reduction::Table& table, const Fold& fold, std::uint32_t chunks) const {
    for (const std::int64_t element : elements) {
      const std::int64_t middle = element / reduction::kChunkElements<T>;
      for (std::int64_t block = std::max<std::int64_t>(middle - 1, 0);
           block <= std::min<std::int64_t>(middle, chunks - 1); ++block)
        for (int thread = 0; thread < reduction::kThreads; ++thread)
          reduction::reduce_block<T>(table, fold, static_cast<std::uint32_t>(block), thread);
    }
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

TEST_CASE("shared reduce: counts beyond 2^31 and 2^32, whose memory is mostly never touched") {
  constexpr std::int64_t k31 = std::int64_t{1} << 31, k32 = std::int64_t{1} << 32;
  for (const std::int64_t count : {k31 + 1000, k32 + 1000}) {
    const PoisonedMemory first(static_cast<std::size_t>(count)),
        second(static_cast<std::size_t>(count)), sums(static_cast<std::size_t>(count));
    auto* const a = static_cast<std::int8_t*>(first.data());
    auto* const b = static_cast<std::int8_t*>(second.data());
    const auto* const sum = static_cast<const std::int8_t*>(sums.data());
    const std::vector<std::int64_t> edges{0, k31, k32, count - 1};
    const auto for_each = [&](const auto& use) {
      for (const std::int64_t edge : edges)
        for (std::int64_t i = edge - 500; i < edge + 500; ++i)
          if (i >= 0 && i < count) use(i);
    };
    for_each([&](std::int64_t i) {
      a[i] = static_cast<std::int8_t>(i % 41);
      b[i] = static_cast<std::int8_t>((i >> 20) % 43);
    });
    const std::vector<const void*> inputs{a, b};
    const std::vector<void*> outputs{sums.data()};
    ReduceJob job;
    job.inputs = inputs;
    job.outputs = outputs;
    job.counts = std::span(&count, 1);
    job.ins = 2;
    job.outs = 1;
    job.dtype = DataType::Int8;
    job.op = ReduceOp::Sum;
    CHECK(reduction::reduce_job(job, ReduceAbout{edges}) == CudaCode::Success);
    int wrong = 0;
    for_each([&](std::int64_t i) { wrong += sum[i] == a[i] + b[i] ? 0 : 1; });
    CHECK(wrong == 0);
  }
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
