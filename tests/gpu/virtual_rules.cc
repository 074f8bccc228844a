// CUDA's rules as the virtual GPUs have them (tests/gpu/double): what is refused there as on a GPU.
// A plain program for two virtual GPUs; prints what is wrong, and returns 1 then.
#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
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
  const std::vector<hvd::gpu::CopyItem> items{{memory.data(), memory.data() + 32, 32}};
  const hvd::gpu::CopyJob job{
      .items = items, .from = hvd::DataType::UInt8, .to = hvd::DataType::UInt8};
  const auto launched = static_cast<cudaError_t>(
      hvd::gpu::launch_batched_copy(job, reinterpret_cast<hvd::gpu::CudaStream*>(second)));
  expect(launched == cudaErrorInvalidResourceHandle,
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

}  // namespace

int main() {
  touch_as_host();
  use_two_devices();
  share_with_oneself();
  register_memory();
  capture();
  std::printf("%d rules are not kept\n", failures);
  return failures == 0 ? 0 : 1;
}
