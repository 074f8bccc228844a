// Ranks with tensors on GPUs, raw buffers: many small batches, and the death of one rank in the
// middle of its work. A plain program that each rank runs; returns 1 if anything is wrong, 77 (a
// skip) where there is no GPU. One process alone is a world of one.
//   ranks_gpu_test [many [WORDS]]    10,000 small batches one after the other, then several at once;
//                            every result compared; the backend's description must have the words
//   ranks_gpu_test fault     a kernel of the last rank reads what is not there, which breaks its
//                            CUDA context for good: all ranks get one error that says so, within
//                            30 s, and shutdown() ends
//   ranks_gpu_test kill      the last rank kills itself while its stream is held up; each of the
//                            others gets RankFailed within 30 s
// Start the last without mpirun, which would kill the others too: bash tests/support/shell/ranks.sh
// 4 ranks_gpu_test kill
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <hvd/hvd.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/gpu/gpu.h"

namespace {

using hvd::test::DeviceMemory;
using hvd::test::require;

constexpr std::size_t kTensors = 8;
constexpr std::size_t kLength = 67;

/// Tensors of one group, each in memory of its own.
struct Group {
  std::vector<std::unique_ptr<DeviceMemory>> memory;
  std::vector<hvd::Buffer> buffers;
  explicit Group(int device) {
    for (std::size_t i = 0; i < kTensors; ++i) {
      memory.push_back(std::make_unique<DeviceMemory>(kLength * sizeof(float)));
      buffers.push_back({memory.back()->data(),
                         hvd::DataType::Float32,
                         {static_cast<std::int64_t>(kLength)},
                         {hvd::DeviceKind::Cuda, device}});
    }
  }
};

float value(int rank, int round, std::size_t tensor) {
  return static_cast<float>(rank + 1 + round % 7 + static_cast<int>(tensor));
}

void write(const Group& group, int rank, int round) {
  for (std::size_t t = 0; t < kTensors; ++t) {
    const std::vector<float> values(kLength, value(rank, round, t));
    require(cudaMemcpy(group.buffers[t].data, values.data(), kLength * sizeof(float),
                       cudaMemcpyHostToDevice),
            "cudaMemcpy");
  }
  require(cudaStreamSynchronize(nullptr),
          // a small copy returns before it is there, and other streams wait for none
          "cudaStreamSynchronize");
}

int wrong(const Group& group, int round) {
  int found = 0;
  for (std::size_t t = 0; t < kTensors; ++t) {
    float sum = 0;
    for (int rank = 0; rank < hvd::size(); ++rank) sum += value(rank, round, t);
    std::vector<float> values(kLength);
    require(cudaMemcpy(values.data(), group.buffers[t].data, kLength * sizeof(float),
                       cudaMemcpyDeviceToHost),
            "cudaMemcpy");
    for (const float got : values) found += got == sum ? 0 : 1;
  }
  return found;
}

/// Holds the default stream up, until the process is killed.
void CUDART_CB sleep_on(void* /*unused*/) { std::this_thread::sleep_for(std::chrono::seconds(60)); }

int many(int device, const std::string& words) {
  if (hvd::backend_description().find(words) == std::string::npos) {
    std::printf("FAILED: not by '%s': %s\n", words.c_str(), hvd::backend_description().c_str());
    return 1;
  }
  const Group group(device);
  constexpr int kTensorsOfAll = static_cast<int>(kTensors), kBatches = 10000,
                kRounds = kBatches / kTensorsOfAll;
  const auto reduce = [&group](std::size_t t) {
    return hvd::allreduce_async(group.buffers[t], group.buffers[t],
                                {.name = std::to_string(t), .op = hvd::ReduceOp::Sum});
  };
  const auto before = hvd::stats().batches_run;
  std::chrono::duration<double, std::micro> took{};
  int failures = 0;
  for (int round = 0; round < kRounds; ++round) {
    write(group, hvd::rank(), round);
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t t = 0; t < kTensors; ++t) reduce(t).wait();
    took += std::chrono::steady_clock::now() - start;
    failures += wrong(group, round);
  }
  const auto batches = hvd::stats().batches_run - before;
  for (int round = 0; round < kRounds / 5; ++round) {  // several under way
    write(group, hvd::rank(), round);
    std::vector<hvd::Handle<void>> handles;
    for (std::size_t t = 0; t < kTensors; ++t) handles.push_back(reduce(t));
    for (const auto& handle : handles) handle.wait();
    failures += wrong(group, round);
  }
  if (hvd::rank() == 0)
    std::printf(
        "%d allreduces of %zu floats in %llu batches, %d ranks, %s: %d wrong values; %.1f us "
        "each\n",
        kBatches, kLength, static_cast<unsigned long long>(batches), hvd::size(),
        hvd::backend_description().c_str(), failures, took.count() / kBatches);
  return failures == 0 && batches >= kBatches ? 0 : 1;
}

int kill(int device) {
  const Group group(device);
  const bool last = hvd::rank() == hvd::size() - 1;
  const auto start = std::chrono::steady_clock::now();
  std::string said;
  try {
    for (int round = 0; round < 100000; ++round) {
      write(group, hvd::rank(), round);
      if (round == 200 && last) {
        const auto handle = hvd::grouped_allreduce_async(
            group.buffers, group.buffers, {.name = "layer", .op = hvd::ReduceOp::Sum});
        require(cudaLaunchHostFunc(nullptr, sleep_on, nullptr), "cudaLaunchHostFunc");
        if (void* const hold = dlsym(RTLD_DEFAULT, "hvd_double_hold"); hold != nullptr)
          reinterpret_cast<void (*)()>(hold)();  // not in the midst of what virtual GPUs share
        ::raise(SIGKILL);
      }
      hvd::grouped_allreduce(group.buffers, group.buffers,
                             {.name = "layer", .op = hvd::ReduceOp::Sum});
    }
  } catch (const hvd::RankFailed& error) {
    said = error.what();
  } catch (const std::exception& error) {
    std::printf("rank %d: FAILED: another error: %s\n", hvd::rank(), error.what());
    return 1;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  const bool named = said.find("rank " + std::to_string(hvd::size() - 1)) != std::string::npos;
  std::printf("rank %d: %s after %.1f s: %s\n", hvd::rank(),
              named && took.count() < 30 ? "passed" : "FAILED", took.count(), said.c_str());
  std::fflush(stdout);
  ::_exit(named && took.count() < 30 ? 0 : 1);  // what is stuck on the device ends with the process
}

/// Returns what an allreduce throws, or "".
std::string error_of(const Group& group) {
  try {
    hvd::grouped_allreduce(group.buffers, group.buffers,
                           {.name = "layer", .op = hvd::ReduceOp::Sum});
  } catch (const hvd::Error& error) {
    return error.what();
  }
  return "";
}

int fault(int device) {
  // Never freed: CUDA waits for the device, and a stream may wait for a rank that does nothing
  // more.
  const Group& group = *new Group(device);
  const DeviceMemory& own = *new DeviceMemory(64);
  const int rank = hvd::rank(), last = hvd::size() - 1;
  write(group, rank, 0);
  std::string said = error_of(group);
  if (said.empty() && rank == last) {
    const std::vector<hvd::gpu::CopyItem> items{
        {reinterpret_cast<const void*>(64), own.data(), 16}};
    require(hvd::gpu::launch_batched_copy({.items = items}, nullptr), "launch_batched_copy");
  }
  const auto start = std::chrono::steady_clock::now();
  for (int round = 0; said.empty(); ++round) {
    said = error_of(group);
    if (round == 20 && rank == last) static_cast<void>(cudaStreamSynchronize(nullptr));
  }
  const std::string again = error_of(group);
  hvd::shutdown();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  const std::string named = "failed on rank " + std::to_string(last);
  const std::size_t at = said.find(named);
  const bool once = at != std::string::npos && said.find(named, at + 1) == std::string::npos;
  const bool well = once && !again.empty() && took.count() < 30;
  std::printf("rank %d: %s after %.1f s: %s\n", rank, well ? "passed" : "FAILED", took.count(),
              said.c_str());
  return well ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("SKIP: no GPU\n");
    return 77;
  }
  ::alarm(240);  // a hang is a failure
  const std::string mode = argc > 1 ? argv[1] : "many";
  try {
    hvd::init();
    const int device = hvd::local_rank() % devices;
    require(cudaSetDevice(device), "cudaSetDevice");
    return mode == "kill"    ? kill(device)
           : mode == "fault" ? fault(device)
                             : many(device, argc > 2 ? argv[2] : "");
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
}
