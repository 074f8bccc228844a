// What this machine lets a GPU's users do, for tests/gpu.sh: a line "probe: WHAT yes|no DETAIL"
// each. Ends within seconds; 77 where there is no GPU.
//   probe_gpu                            all of it
//   probe_gpu open MEMORY EVENT          the other process: opens them, waits for the event, reads
//                                        the memory; 0 if it is as it should be
#include <cuda_runtime_api.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "ops/gpu/api/placement.h"

namespace {

using namespace hvd::gpu;

constexpr std::size_t kBytes = std::size_t{2} << 20;
constexpr unsigned char kValue = 0x5a;

void say(const char* what, bool possible, const std::string& detail) {
  std::printf("probe: %s %s %s\n", what, possible ? "yes" : "no", detail.c_str());
}

std::string hex(const IpcHandle& handle) {
  std::string text;
  for (const std::byte byte : handle.bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", std::to_integer<unsigned>(byte));
    text += digits;
  }
  return text;
}

IpcHandle unhex(const std::string& text) {
  IpcHandle handle;
  for (std::size_t i = 0; i < handle.bytes.size(); ++i)
    handle.bytes[i] =
        static_cast<std::byte>(std::strtoul(text.substr(2 * i, 2).c_str(), nullptr, 16));
  return handle;
}

int open_both(const GpuApi& table, const IpcHandle& memory_handle, const IpcHandle& event_handle) {
  void* memory = nullptr;
  CudaEvent* event = nullptr;
  CudaStream* stream = nullptr;
  std::vector<unsigned char> bytes(kBytes);
  if (table.ipc_open_memory(&memory, memory_handle) != CudaCode::Success) return 2;
  if (table.ipc_open_event(&event, event_handle) != CudaCode::Success) return 3;
  if (table.stream_create(&stream) != CudaCode::Success ||
      table.stream_wait_event(stream, event) != CudaCode::Success)
    return 4;
  if (cudaMemcpyAsync(bytes.data(), memory, kBytes, cudaMemcpyDefault,
                      reinterpret_cast<cudaStream_t>(stream)) != cudaSuccess)
    return 5;
  if (cudaDeviceSynchronize() != cudaSuccess) return 6;
  for (const unsigned char byte : bytes)
    if (byte != kValue) return 7;
  return 0;
}

/// By a process of its own: nothing can be opened in the one that it comes from.
std::string try_sharing(const GpuApi& table) {
  void* memory = nullptr;
  CudaEvent* event = nullptr;
  CudaStream* stream = nullptr;
  IpcHandle memory_handle, event_handle;
  if (table.device_malloc(&memory, kBytes) != CudaCode::Success ||
      table.stream_create(&stream) != CudaCode::Success)
    return "no memory";
  if (table.ipc_get_memory(&memory_handle, memory) != CudaCode::Success)
    return "cudaIpcGetMemHandle is refused";
  if (table.ipc_event_create(&event) != CudaCode::Success) return "no interprocess event";
  if (table.ipc_get_event(&event_handle, event) != CudaCode::Success)
    return "cudaIpcGetEventHandle is refused";
  if (cudaMemsetAsync(memory, kValue, kBytes, reinterpret_cast<cudaStream_t>(stream)) !=
      cudaSuccess)
    return "no memset";
  if (table.event_record(event, stream) != CudaCode::Success) return "no record";
  std::string program = "probe_gpu", order = "open", first = hex(memory_handle),
              second = hex(event_handle);
  char* arguments[] = {program.data(), order.data(), first.data(), second.data(), nullptr};
  pid_t child = 0;
  int status = 0;
  if (posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments, environ) != 0 ||
      waitpid(child, &status, 0) != child)
    return "no other process";
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return code == 0 ? std::string()
                   : "the other process ends with " + std::to_string(code) +
                         " (2: memory, 3: event, 7: wrong values)";
}

bool attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, which, device) == cudaSuccess && value != 0;
}

void probe(const GpuApi& table, int devices) {
  int driver = 0, device = 0, capability = 0, mode = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  static_cast<void>(cudaGetDevice(&device));
  static_cast<void>(table.capability(device, &capability));
  static_cast<void>(cudaDeviceGetAttribute(&mode, cudaDevAttrComputeMode, device));
  say("gpus", devices > 0,
      std::to_string(devices) + " seen, driver for CUDA " + std::to_string(driver / 1000) + "." +
          std::to_string(driver % 1000 / 10));
  say("libraries", nccl_built(), gpu_libraries());
  say("kernels", runs_on(gpu_architectures(), capability),
      "compute capability " + std::to_string(capability) + ", built for " +
          std::string(gpu_architectures()));
  say("processes", mode == cudaComputeModeDefault,
      "compute mode " + std::to_string(mode) + ": several may use it if 0");
  const std::string refused =
      mode == cudaComputeModeDefault ? try_sharing(table) : "compute mode " + std::to_string(mode);
  say("sharing", refused.empty(),
      refused.empty() ? "memory and an event of another process" : refused);
  say("managed", attribute(cudaDevAttrConcurrentManagedAccess, device),
      "host and device at the same time");
  int nccl = 0;
  static_cast<void>(table.get_version(&nccl));
  say("several", nccl >= 23000,
      "NCCL " + std::to_string(nccl) + ", which takes several ranks of one GPU from 23000 on");
  say("multicast", has_multicast(table, device), "switches that sum");
  const char* pipe = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  const std::string control = std::string(pipe == nullptr ? "/tmp/nvidia-mps" : pipe) + "/control";
  say("mps", access(control.c_str(), F_OK) == 0, control);
}

}  // namespace

int main(int count, char** arguments) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("skipped: no GPU\n");
    return 77;
  }
  const GpuApi& table = *linked_gpu_api();
  if (count == 4 && std::strcmp(arguments[1], "open") == 0)
    return open_both(table, unhex(arguments[2]), unhex(arguments[3]));
  probe(table, devices);
  return 0;
}
