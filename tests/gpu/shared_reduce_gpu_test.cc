// The reduction kernel of ranks that share a GPU, on a real one: against the host oracle, then its
// speed. A plain program: prints what it found, returns 1 if anything differs, 77 (a skip) where
// there is no GPU.
//
//   Right: the cases of tests/support/oracle/reduce_cases.h, bit for bit.
//   Speed: 4 ranks' buffers of 64 MiB reduced in place: bytes read plus bytes written over the time
//   of the fastest of 20 launches; "of
//   copy" against cudaMemcpyAsync, device to device, counted the same way. The target is 70 %.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "ops/gpu/kernels/kernels.h"
#include "tests/support/gpu/gpu.h"
#include "tests/support/oracle/reduce_cases.h"

namespace {

using hvd::DataType;
using hvd::ReduceOp;
using namespace hvd::gpu;
using namespace hvd::test;

int compare_all() {
  int cases = 0, failures = 0;
  test::for_each_reduce_case([&](const test::ReduceCase& tried) {
    ++cases;
    test::ReduceMemory memory(tried), expected = memory;
    const DeviceMemory device(memory.bytes().size());
    std::vector<std::byte> got(memory.bytes().size());
    require(cudaMemcpy(device.data(), memory.bytes().data(), got.size(), cudaMemcpyHostToDevice),
            "cudaMemcpy");
    require(launch_shared_reduce(memory.job(tried, device.data()), nullptr),
            "launch_shared_reduce");
    require(cudaMemcpy(got.data(), device.data(), got.size(), cudaMemcpyDeviceToHost),
            "cudaMemcpy");
    memory.replace(got);
    require(test::reduce_job_on_host(expected.job(tried)), "the oracle");
    const auto failure = memory.difference(tried, expected);
    if (!failure) return;
    ++failures;
    std::printf("FAILED %s\n", failure->c_str());
  });
  std::printf("%d cases compared with the host, %d failures\n", cases, failures);
  return failures;
}

int measure() {
  constexpr int kRanks = 4;
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  const DeviceMemory memory(kRanks * kBytes);
  require(cudaMemset(memory.data(), 0, kRanks * kBytes), "cudaMemset");
  const double half = kRanks * static_cast<double>(kBytes) / 2;
  const double limit =
      2 * half / fastest([&] {
        require(cudaMemcpyAsync(memory.data() + kRanks * kBytes / 2, memory.data(),
                                static_cast<std::size_t>(half), cudaMemcpyDeviceToDevice, nullptr),
                "cudaMemcpyAsync");
      });
  std::printf("cudaMemcpy device to device %.0f GB/s\n", limit * 1e-9);
  for (const DataType dtype :
       {DataType::Float32, DataType::Float16, DataType::BFloat16, DataType::Float64}) {
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      outputs.push_back(memory.data() + rank * kBytes);
      inputs.push_back(outputs.back());
    }
    const auto count = static_cast<std::int64_t>(kBytes / hvd::element_bytes(dtype));
    ReduceJob job;
    job.inputs = inputs;
    job.outputs = outputs;
    job.counts = std::span(&count, 1);
    job.ins = job.outs = kRanks;
    job.dtype = dtype;
    job.op = ReduceOp::Average;
    job.divisor = kRanks;
    const double seconds =
        fastest([&] { require(launch_shared_reduce(job, nullptr), "launch_shared_reduce"); });
    const double rate = 2 * kRanks * static_cast<double>(kBytes) / seconds;
    std::printf("  %-10s 4 ranks x 64 MiB in place %8.1f us %6.0f GB/s %5.1f %% of copy\n",
                std::string(name_of(dtype)).c_str(), seconds * 1e6, rate * 1e-9,
                100 * rate / limit);
  }
  return 0;  // what counts is what ranks get: tests/gpu_limits.py
}

}  // namespace

int main() { return run_on_gpu(compare_all, measure); }
