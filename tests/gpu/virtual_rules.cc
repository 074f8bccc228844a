// CUDA's rules as the virtual GPUs have them (tests/gpu/double): what is refused there as on a GPU.
// A plain program for two virtual GPUs; prints what is wrong, and returns 1 then.
#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <functional>
#include <thread>
#include <vector>

#include "tests/support/gpu/gpu.h"

namespace {

using hvd::test::DeviceMemory;
using hvd::test::require;

int failures = 0;

void expect(bool condition, const char* what) {
  if (condition) return;
  ++failures;
  std::printf("FAILED: %s\n", what);
}
void refused(cudaError_t error, cudaError_t expected, const char* what) {
  expect(error == expected && cudaGetLastError() == expected, what);
}

cudaError_t copy_bytes(std::byte* to, const std::byte* from, cudaStream_t stream) {
  const std::vector<hvd::gpu::CopyItem> items{{from, to, 32}};
  const hvd::gpu::CopyJob job{
      .items = items, .from = hvd::DataType::UInt8, .to = hvd::DataType::UInt8};
  return static_cast<cudaError_t>(
      hvd::gpu::launch_batched_copy(job, reinterpret_cast<hvd::gpu::CudaStream*>(stream)));
}

void touch_as_host() {
  const DeviceMemory memory(64);
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGSEGV, SIG_DFL);
    ::_exit(static_cast<int>(*const_cast<const volatile std::byte*>(memory.data())));
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  expect(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV,
         "a host that reads a device's memory to crash");
}

void use_two_devices() {
  cudaStream_t first = nullptr, second = nullptr;
  cudaEvent_t event = nullptr;
  require(cudaSetDevice(0), "cudaSetDevice");
  require(cudaStreamCreateWithPriority(&first, cudaStreamNonBlocking, 0),
          "cudaStreamCreateWithPriority");
  require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  require(cudaSetDevice(1), "cudaSetDevice");
  require(cudaStreamCreateWithPriority(&second, cudaStreamNonBlocking, 0),
          "cudaStreamCreateWithPriority");
  refused(cudaEventRecord(event, second), cudaErrorInvalidResourceHandle,
          "an event on another device's stream to be refused");
  expect(cudaEventRecord(event, first) == cudaSuccess &&
             cudaStreamWaitEvent(second, event, 0) == cudaSuccess,
         "a stream to wait for another device's event");
  require(cudaSetDevice(0), "cudaSetDevice");
  const DeviceMemory memory(64);
  expect(copy_bytes(memory.data() + 32, memory.data(), second) == cudaErrorInvalidResourceHandle,
         "a kernel on a stream of a device that is not current to be refused");
  std::thread([] {
    int device = -1;
    require(cudaGetDevice(&device), "cudaGetDevice");
    static_cast<void>(cudaSetDevice(1));
    static_cast<void>(cudaSetDevice(99));
    expect(device == 0 && cudaGetLastError() == cudaErrorInvalidDevice,
           "a thread to begin with the first device");
  }).join();
  int device = -1;
  require(cudaGetDevice(&device), "cudaGetDevice");
  expect(device == 0 && cudaPeekAtLastError() == cudaSuccess,
         "another thread's device and error to be its own");
  require(cudaEventDestroy(event), "cudaEventDestroy");
  for (cudaStream_t stream : {first, second})
    require(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

void share_with_oneself() {
  const DeviceMemory memory(64);
  cudaIpcMemHandle_t handle{};
  cudaIpcEventHandle_t event_handle{};
  cudaEvent_t event = nullptr, opened = nullptr;
  void* at = nullptr;
  require(cudaIpcGetMemHandle(&handle, memory.data()), "cudaIpcGetMemHandle");
  refused(cudaIpcOpenMemHandle(&at, handle, cudaIpcMemLazyEnablePeerAccess), cudaErrorInvalidValue,
          "memory not to be opened by its process");
  require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  refused(cudaIpcGetEventHandle(&event_handle, event), cudaErrorInvalidResourceHandle,
          "a handle of an event that is no other's");
  require(cudaEventDestroy(event), "cudaEventDestroy");
  require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess),
          "cudaEventCreateWithFlags");
  require(cudaIpcGetEventHandle(&event_handle, event), "cudaIpcGetEventHandle");
  refused(cudaIpcOpenEventHandle(&opened, event_handle), cudaErrorInvalidResourceHandle,
          "an event not to be opened by its process");
  require(cudaEventDestroy(event), "cudaEventDestroy");
}

void register_memory() {
  std::vector<std::byte> host(8192);
  require(cudaHostRegister(host.data(), 4096, cudaHostRegisterPortable), "cudaHostRegister");
  refused(cudaHostRegister(host.data() + 100, 100, cudaHostRegisterPortable),
          cudaErrorHostMemoryAlreadyRegistered, "memory not to be registered twice");
  require(cudaHostUnregister(host.data()), "cudaHostUnregister");
  refused(cudaHostUnregister(host.data()), cudaErrorHostMemoryNotRegistered,
          "nothing to be registered any more");
}

void capture() {
  cudaStream_t stream = nullptr, other = nullptr;
  cudaGraph_t graph = nullptr;
  cudaEvent_t event = nullptr;
  for (cudaStream_t* const made : {&stream, &other})
    require(cudaStreamCreateWithPriority(made, cudaStreamNonBlocking, 0),
            "cudaStreamCreateWithPriority");
  require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  require(cudaEventRecord(event, other), "cudaEventRecord");
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  std::thread([event] {
    auto mode = cudaStreamCaptureModeRelaxed;
    require(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    expect(cudaEventQuery(event) != cudaErrorStreamCaptureUnsupported,
           "a relaxed thread to be let");
  }).join();
  require(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  require(cudaGraphDestroy(graph), "cudaGraphDestroy");
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  std::thread([event] {
    refused(cudaEventQuery(event), cudaErrorStreamCaptureUnsupported,
            "another thread's query to be refused");
  }).join();
  refused(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated,
          "the capture to be broken by it");
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
  refused(cudaStreamWaitEvent(stream, event, 0), cudaErrorStreamCaptureIsolation,
          "an event of outside to be refused in a capture");
  refused(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated,
          "the capture to be broken by that");
  require(cudaEventDestroy(event), "cudaEventDestroy");
  for (cudaStream_t each : {stream, other}) require(cudaStreamDestroy(each), "cudaStreamDestroy");
}

/// Ways for the host to see that a stream is done, after which another may use what it has written:
/// none of them is to be taken for a use without an order.
void order_by_the_host() {
  const DeviceMemory memory(64);
  std::array<cudaStream_t, 2> streams{};
  for (cudaStream_t& stream : streams)
    require(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0),
            "cudaStreamCreateWithPriority");
  cudaEvent_t event = nullptr;
  require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  std::atomic<bool> called{false};
  const std::array<std::function<void(cudaStream_t)>, 5> ways{
      [](cudaStream_t stream) { require(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); },
      [](cudaStream_t stream) {
        while (cudaStreamQuery(stream) == cudaErrorNotReady) continue;
      },
      [&](cudaStream_t stream) {
        require(cudaEventRecord(event, stream), "cudaEventRecord");
        require(cudaEventSynchronize(event), "cudaEventSynchronize");
      },
      [&](cudaStream_t stream) {
        require(cudaEventRecord(event, stream), "cudaEventRecord");
        while (cudaEventQuery(event) == cudaErrorNotReady) continue;
      },
      [&](cudaStream_t stream) {
        const auto call = [](void* to) { *static_cast<std::atomic<bool>*>(to) = true; };
        require(cudaLaunchHostFunc(stream, call, &called), "cudaLaunchHostFunc");
        while (!called) ::usleep(100);
      }};
  for (std::size_t way = 0; way < ways.size(); ++way) {
    require(copy_bytes(memory.data() + 32, memory.data(), streams[way % 2]), "a copy");
    ways.at(way)(streams[way % 2]);
  }
  require(copy_bytes(memory.data() + 32, memory.data(), streams[1]), "a copy");
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  static_cast<void>(cudaGetLastError());  // it was not ready
  require(cudaEventDestroy(event), "cudaEventDestroy");
  for (cudaStream_t stream : streams) require(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

/// What stays of a kernel that has no memory. The last of all: nothing works afterwards.
void break_the_context() {
  void* memory = nullptr;
  const DeviceMemory there(64);
  require(copy_bytes(there.data(), reinterpret_cast<std::byte*>(64), nullptr), "a copy");
  expect(cudaPeekAtLastError() == cudaSuccess, "the launch itself not to fail");
  refused(cudaDeviceSynchronize(), cudaErrorIllegalAddress, "a wait to say that a kernel failed");
  expect(cudaGetLastError() == cudaSuccess, "the last error to be told once");
  refused(cudaMalloc(&memory, 64), cudaErrorIllegalAddress, "every call to say it again");
  std::thread([&memory] {
    expect(cudaGetLastError() == cudaSuccess, "another thread's last error to be its own");
    refused(cudaMalloc(&memory, 64), cudaErrorIllegalAddress, "and its calls to say it as well");
  }).join();
  require(cudaSetDevice(1), "cudaSetDevice");
  require(cudaMalloc(&memory, 64), "cudaMalloc");
  require(cudaFree(memory), "cudaFree");
}

}  // namespace

int main() {
  touch_as_host();
  use_two_devices();
  share_with_oneself();
  register_memory();
  capture();
  order_by_the_host();
  break_the_context();
  std::printf("%d rules are not kept\n", failures);
  return failures == 0 ? 0 : 1;
}
