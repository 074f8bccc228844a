#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "torch_bindings/device.h"

namespace hvd::detail {

namespace {
void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) throw BackendError(formatted("{}: {}", call, cudaGetErrorString(error)));
}
}  // namespace

std::shared_ptr<void> ready_event(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return nullptr;
  const c10::cuda::CUDAGuard guard(tensor.device());
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  std::shared_ptr<void> owner(event, [](void* handle) { static_cast<void>(cudaEventDestroy(static_cast<cudaEvent_t>(handle))); });
  check(cudaEventRecord(event, c10::cuda::getCurrentCUDAStream(tensor.get_device()).stream()), "cudaEventRecord");
  return owner;
}

void wait_on_current_stream(const at::Tensor& tensor, const std::vector<HandleState::Completion>& completions) {
  if (completions.empty() || !tensor.is_cuda()) return;
  const c10::cuda::CUDAGuard guard(tensor.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(tensor.get_device()).stream();
  for (const auto& completion : completions)
    check(cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(completion.event), 0), "cudaStreamWaitEvent");
}

}  // namespace hvd::detail
