// A call of CUDA's that is refused says so by what it returns, and leaves nothing behind: the
// thread's last error, which LibTorch asks for after each kernel of the user's, stays empty. A
// plain program: prints what it found, returns 1 if anything is wrong, 77 (a skip) where there is
// no GPU: asking for the last error is refused there, too.
#include <cuda_runtime_api.h>

#include <array>
#include <cstdio>
#include <functional>
#include <string>

#include "ops/gpu/api/gpu_api.h"
#include "tests/support/gpu/gpu.h"

namespace {

using namespace hvd::gpu;

int failures = 0;

/// `call` is to fail.
void refuse(const std::string& what, const std::function<CudaCode()>& call) {
  const CudaCode code = call();
  const cudaError_t left = cudaGetLastError();
  if (code != CudaCode::Success && left == cudaSuccess) return;
  ++failures;
  std::printf("FAILED: %s: returned %d, left %d (%s)\n", what.c_str(), static_cast<int>(code),
              static_cast<int>(left), cudaGetErrorName(left));
}

void refuse_all(const GpuApi& table) {
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

}  // namespace

int main() {
  return hvd::test::run_on_gpu(
      [] {
        refuse_all(*linked_gpu_api());
        std::printf("%d calls have left an error behind\n", failures);
        return failures;
      },
      [] { return 0; });
}
