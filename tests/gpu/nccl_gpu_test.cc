// A real communicator of one rank, again and again: made, memory registered with it or made a
// window, a collective in it, deregistered, aborted. Afterwards the GPU has as much free memory as
// before, and the thread the device and the capture mode that it had. What memory and windows are
// rounded up to is printed, and what a small collective costs with a blocking communicator and with
// one that is not. A plain program: prints what it found, returns 1 if anything is wrong, 77 (a
// skip) where there is no GPU or no NCCL.
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "ops/gpu/nccl/memory.h"
#include "tests/support/gpu/gpu.h"

namespace {

using namespace hvd::gpu;
using hvd::test::require;

constexpr std::size_t kBytes = std::size_t{32} << 20;
constexpr std::string_view kName = "one rank";
const Remark nobody;
int failures = 0;

void expect(bool condition, const std::string& what) {
  if (condition) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

CallContext site() {
  return {.table = linked_gpu_api(), .rank = 0, .device = 0, .tensors = std::span(&kName, 1)};
}

std::size_t free_bytes() {
  std::size_t free = 0, total = 0;
  require(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

/// Small copies return before they are there, and NCCL's stream does not wait for the default one.
void copy_there(void* to, const void* from, std::size_t bytes) {
  require(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  require(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

double mib(std::size_t more, std::size_t less) {
  return (static_cast<double>(more) - static_cast<double>(less)) / (1 << 20);
}

std::map<Registration, bool> said;

/// A communicator and a stream.
struct Alone {
  explicit Alone(bool nonblocking) {
    patience.nonblocking = nonblocking;
    NcclUniqueId id;
    check(site(), site().table->get_unique_id(&id), "ncclGetUniqueId");
    communicator = std::make_unique<Communicator>(site(), patience, 1, id, 0, "test");
    stream.create(site());
  }
  void sum(void* data) const {
    communicator->settle(site(),
                         site().table->all_reduce(data, data, 1, NcclType::Float32, NcclOp::Sum,
                                                  communicator->get(), stream.get()),
                         "ncclAllReduce");
  }
  void wait() const {
    Event done(site());
    done.record(site(), stream);
    while (done.query() == CudaCode::NotReady) std::this_thread::yield();
  }
  Patience patience;
  std::unique_ptr<Communicator> communicator;
  Stream stream;
};

/// What a call takes of the host until the next may be made: NCCL starts a thread for each where it
/// may not block.
void time_calls(bool nonblocking) {
  const DeviceGuard guard(site());
  const Alone alone(nonblocking);
  const hvd::test::DeviceMemory data(4);
  constexpr int kCalls = 1000;
  for (int i = 0; i < 10; ++i) alone.sum(data.data());
  alone.wait();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) alone.sum(data.data());
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  alone.wait();
  std::printf("%s communicator of one rank: %.1f us of the host for each small allreduce\n",
              nonblocking ? "not blocking" : "blocking", took.count() / kCalls);
}

/// One life of a communicator. The tensors are summed over one rank: they stay.
void live(Registration registration, bool nonblocking) {
  const DeviceGuard guard(site());
  Patience patience;
  patience.nonblocking = nonblocking;
  NcclUniqueId id;
  check(site(), site().table->get_unique_id(&id), "ncclGetUniqueId");
  const auto communicator = std::make_shared<Communicator>(site(), patience, 1, id, 0, "test");
  Stream stream;
  stream.create(site());
  void* data = nullptr;
  check(site(), site().table->mem_alloc(&data, kBytes), "ncclMemAlloc");
  {
    FusionMemory memory(*site().table, data, kBytes, registration, nobody);
    const std::size_t before = free_bytes();
    if (registration != Registration::None) memory.register_with(site(), communicator);
    if (registration != Registration::None && !said[registration]) {
      said[registration] = true;
      std::printf("%s 32 MiB takes %.1f MiB besides\n",
                  registration == Registration::Window ? "a window over" : "the registration of",
                  mib(before, free_bytes()));
    }
    std::vector<float> values(1000, 3);
    copy_there(data, values.data(), 4000);
    communicator->settle(site(),
                         site().table->all_reduce(data, data, kBytes / 4, NcclType::Float32,
                                                  NcclOp::Sum, communicator->get(), stream.get()),
                         "ncclAllReduce");
    Event done(site());
    done.record(site(), stream);
    while (done.query() == CudaCode::NotReady)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
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
  require(site().table->mem_alloc(&one, 1) == NcclCode::Success ? cudaSuccess : cudaErrorUnknown,
          "ncclMemAlloc");
  std::printf("ncclMemAlloc of 1 byte takes %.1f MiB\n", mib(before_any, free_bytes()));
  site().table->mem_free(one);
  for (const bool nonblocking : {true, false}) {
    for (const Registration registration :
         {Registration::None, Registration::Buffer, Registration::Window}) {
      if (registration == Registration::Window && !site().table->window_register) continue;
      const std::string what = std::string(nonblocking ? "not blocking" : "blocking") +
                               ", registration " + std::to_string(static_cast<int>(registration));
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
  for (const bool nonblocking : {true, false}) time_calls(nonblocking);
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
