// A call of CUDA's that is refused says so by what it returns, and leaves nothing behind: the thread's last error, which LibTorch asks for
// after each kernel of the user's, stays empty. A plain program: prints what it found, returns 1 if anything is wrong. It works without a
// GPU, too, where every call is refused.
#include <cuda_runtime_api.h>

#include <array>
#include <cstdio>
#include <functional>
#include <string>

#include "ops/gpu/api/gpu_api.h"

namespace {

using namespace hvd::nccl;

int failures = 0;

/// `call` is to fail.
void refuse(const std::string& what, const std::function<CudaCode()>& call) {
  const CudaCode code = call();
  const cudaError_t left = cudaGetLastError();
  if (code != CudaCode::Success && left == cudaSuccess) return;
  ++failures;
  std::printf("FAILED: %s: returned %d, left %d (%s)\n", what.c_str(), static_cast<int>(code), static_cast<int>(left),
              cudaGetErrorName(left));
}

void refuse_on_any_machine(const GpuApi& table) {
  void* memory = nullptr;
  CudaEvent* event = nullptr;
  IpcHandle handle;
  std::array<std::byte, 64> mine{};
  refuse("cudaSetDevice", [&] { return table.set_device(9999); });
  refuse("cudaMalloc", [&] { return table.device_malloc(&memory, std::size_t{1} << 60); });
  refuse("cudaFree", [&] { return table.device_free(mine.data()); });
  refuse("cudaMemcpyAsync", [&] { return table.memcpy_async(nullptr, nullptr, 64, nullptr); });
  refuse("cudaEventQuery", [&] { return table.event_query(nullptr); });
  refuse("cudaEventRecord", [&] { return table.event_record(nullptr, nullptr); });
  refuse("cudaStreamWaitEvent", [&] { return table.stream_wait_event(nullptr, nullptr); });
  refuse("cudaHostRegister", [&] { return table.host_register(nullptr, 0); });
  refuse("cudaHostUnregister", [&] { return table.host_unregister(mine.data()); });
  refuse("cudaIpcGetMemHandle", [&] { return table.ipc_get_memory(&handle, mine.data()); });
  refuse("cudaIpcOpenMemHandle", [&] { return table.ipc_open_memory(&memory, IpcHandle{}); });
  refuse("cudaIpcOpenEventHandle", [&] { return table.ipc_open_event(&event, IpcHandle{}); });
}

void refuse_without_gpu(const GpuApi& table) {
  int device = 0;
  std::string id;
  bool is = false;
  std::size_t free = 0, total = 0;
  CudaStream* stream = nullptr;
  CudaEvent* event = nullptr;
  refuse("cudaGetDeviceCount", [&] { return table.device_count(&device); });
  refuse("cudaGetDevice", [&] { return table.get_device(&device); });
  refuse("cudaGetDeviceProperties", [&] { return table.device_id(0, &id); });
  refuse("cudaDeviceGetAttribute", [&] { return table.ipc_supported(0, &is); });
  refuse("cuDevicePrimaryCtxGetState", [&] { return table.has_context(0, &is); });
  refuse("cuCtxPushCurrent", [&] { return table.push_device(0); });
  refuse("cuCtxPopCurrent", [&] { return table.pop_device(); });
  refuse("cudaStreamCreateWithPriority", [&] { return table.stream_create(&stream); });
  refuse("cudaEventCreateWithFlags", [&] { return table.event_create(&event); });
  refuse("cudaEventCreateWithFlags, for other processes", [&] { return table.ipc_event_create(&event); });
  refuse("cudaMemGetInfo", [&] { return table.mem_info(&free, &total); });
  std::array<float, 4> from{}, to{};
  const CopyItem item{from.data(), to.data(), 4};
  const CopyJob job{.items = std::span(&item, 1), .from = hvd::DataType::Float32, .to = hvd::DataType::Float32};
  refuse("launch_batched_copy", [&] { return table.batched_copy(job, nullptr); });
}

}  // namespace

int main() {
  const GpuApi& table = *linked_gpu_api();
  int devices = 0;
  const bool has_gpu = table.device_count(&devices) == CudaCode::Success && devices > 0;
  refuse_on_any_machine(table);
  if (!has_gpu) refuse_without_gpu(table);
  std::printf("%s: %d calls have left an error behind\n", has_gpu ? "with a GPU" : "without a GPU", failures);
  return failures == 0 ? 0 : 1;
}
