// A real communicator of one rank, again and again: made, memory registered with it or made a window, a collective in it, deregistered,
// aborted. Afterwards the GPU has as much free memory as before, and the thread the device and the capture mode that it had. A plain
// program: prints what it found, returns 1 if anything is wrong, 77 (a skip) where there is no GPU or no NCCL.
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "ops/gpu/nccl/fusion_buffer.h"
#include "tests/support/gpu.h"

namespace {

using namespace hvd::nccl;
using hvd::test::require;

constexpr std::size_t kBytes = std::size_t{32} << 20;
constexpr std::string_view kName = "one rank";
int failures = 0;

void expect(bool condition, const std::string& what) {
  if (condition) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

CallContext site() { return {.table = linked_gpu_api(), .rank = 0, .device = 0, .tensors = std::span(&kName, 1)}; }

std::size_t free_bytes() {
  std::size_t free = 0, total = 0;
  require(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

double mib(std::size_t more, std::size_t less) { return (static_cast<double>(more) - static_cast<double>(less)) / (1 << 20); }

/// One life of a communicator. The tensors are summed over one rank: they stay.
void live(Registration registration, bool nonblocking) {
  const DeviceGuard guard(site());
  Patience patience;
  patience.nonblocking = nonblocking;
  NcclUniqueId id;
  check(site(), site().table->get_unique_id(&id), "ncclGetUniqueId");
  const auto communicator = std::make_shared<Communicator>(site(), patience, 1, id, 0);
  Stream stream;
  stream.create(site());
  void* data = nullptr;
  check(site(), site().table->mem_alloc(&data, kBytes), "ncclMemAlloc");
  {
    FusionMemory memory(*site().table, data, kBytes, registration);
    if (registration != Registration::None) memory.register_with(site(), communicator);
    std::vector<float> values(1000, 3);
    require(cudaMemcpy(data, values.data(), 4000, cudaMemcpyHostToDevice), "cudaMemcpy");
    communicator->settle(
        site(), site().table->all_reduce(data, data, kBytes / 4, NcclType::Float32, NcclOp::Sum, communicator->get(), stream.get()),
        "ncclAllReduce");
    Event done(site());
    done.record(site(), stream);
    while (done.query() == CudaCode::NotReady) std::this_thread::sleep_for(std::chrono::microseconds(50));
    communicator->check_async(site());
    require(cudaMemcpy(values.data(), data, 4000, cudaMemcpyDeviceToHost), "cudaMemcpy");
    expect(values == std::vector<float>(1000, 3), "values to stay as they are");
  }
  communicator->abort();
}

int compare() {
  int device = -1;
  require(cudaGetDevice(&device), "cudaGetDevice");
  const std::size_t before_any = free_bytes();
  void* one = nullptr;
  require(site().table->mem_alloc(&one, 1) == NcclCode::Success ? cudaSuccess : cudaErrorUnknown, "ncclMemAlloc");
  std::printf("ncclMemAlloc of 1 byte takes %.1f MiB\n", mib(before_any, free_bytes()));
  site().table->mem_free(one);
  for (const bool nonblocking : {true, false}) {
    for (const Registration registration : {Registration::None, Registration::Buffer, Registration::Window}) {
      if (registration == Registration::Window && !site().table->window_register) continue;
      const std::string what =
          std::string(nonblocking ? "not blocking" : "blocking") + ", registration " + std::to_string(static_cast<int>(registration));
      live(registration, nonblocking);  // what NCCL and CUDA keep for good
      live(registration, nonblocking);
      const std::size_t before = free_bytes();
      constexpr int kLives = 10;
      for (int i = 0; i < kLives; ++i) live(registration, nonblocking);
      const double lost = mib(before, free_bytes());
      std::printf("%s: %.1f MiB less after %d communicators\n", what.c_str(), lost, kLives);
      expect(lost <= 8, what + ": memory to be back");
    }
  }
  int now = -1;
  require(cudaGetDevice(&now), "cudaGetDevice");
  expect(now == device, "the thread's device to be what it was");
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  require(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  expect(mode == cudaStreamCaptureModeGlobal, "the thread's capture mode to be what it was");
  return failures;
}

}  // namespace

int main() {
  if (!nccl_built()) {
    std::printf("SKIP: built without NCCL\n");
    return 77;
  }
  try {
    return hvd::test::run_on_gpu(compare, [] { return 0; });
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
}
