// Tested in tests/gpu/torch_streams.cc
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <type_traits>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "ops/gpu/api/call.h"
#include "torch_bindings/platform/device.h"

namespace hvd::detail {

namespace {

using c10::cuda::CUDAStream;

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  // it is thrown: LibTorch's check of the next kernel must not find it once more
  static_cast<void>(cudaGetLastError());
  throw BackendError(formatted("{}: {}", call, cudaGetErrorString(error)));
}

bool is_captured(const CUDAStream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream.stream(), &status);
  if (error == cudaErrorStreamCaptureImplicit) {  // the default stream, which waits for one that is
    static_cast<void>(cudaGetLastError());
    return true;
  }
  check(error, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

/// Another event than those of the stream may not be waited for in a capture, and would end it.
void refuse_capture(const CUDAStream& stream, const std::string& what) {
  if (is_captured(stream))
    throw InvalidArgument(
        formatted("{}: the current stream (of cuda:{}) is being captured into a CUDA graph, and "
                  "what the ranks agree on anew each time cannot be part of one; capture the work "
                  "before it and after it, and call it, and wait for it, in between",
                  what, static_cast<int>(stream.device_index())));
}

void wait(const CUDAStream& stream, const std::vector<HandleState::Completion>& completions) {
  for (const auto& completion : completions)
    check(cudaStreamWaitEvent(stream.stream(), static_cast<cudaEvent_t>(completion.event), 0),
          "cudaStreamWaitEvent");
}

/// Destroys events of a device.
struct EventEnd {
  c10::DeviceIndex device;
  void operator()(cudaEvent_t event) const noexcept {
    // The last handle may go in any thread, and the call would make a context on the GPU that is
    // current there. Nor may it throw where the process ends, as a guard would.
    c10::DeviceIndex before = 0;
    if (c10::cuda::GetDevice(&before) != cudaSuccess || c10::cuda::SetDevice(device) != cudaSuccess)
      return;
    // and a capture of a graph, in another thread, goes on
    auto mode = cudaStreamCaptureModeRelaxed;
    const bool relaxed = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess;
    static_cast<void>(cudaEventDestroy(event));
    if (relaxed) static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
    static_cast<void>(c10::cuda::MaybeSetDevice(before));
  }
};

class CudaPoint final : public StreamPoint {
 public:
  CudaPoint(const CUDAStream& stream, const std::string& what)
      : stream_(stream), what_(what), event_(nullptr, EventEnd{stream.device_index()}) {
    const c10::cuda::CUDAGuard guard(stream_.device());
    refuse_capture(stream_, what_);
    cudaEvent_t made = nullptr;
    check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    event_.reset(made);
    record(stream_);
  }

  [[nodiscard]] void* event() const override { return event_.get(); }

  [[nodiscard]] at::Tensor allocate(const std::function<at::Tensor()>& make) override {
    // Another thread may capture a graph meanwhile, which an allocation would break.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    {
      const c10::cuda::CUDAStreamGuard guard(stream_);
      if (!is_captured(stream_)) {
        at::Tensor made = make();
        if (!is_captured(stream_)) {
          record(stream_);
          return made;
        }
      }
    }
    // The user captures a graph there, since the submission: memory would be the graph's own, and
    // the event a part of it. Another stream has a share of its own, and comes after what was
    // queued before.
    elsewhere_ = true;
    const CUDAStream other =
        c10::cuda::getStreamFromPool(/*isHighPriority=*/false, stream_.device_index());
    const c10::cuda::CUDAStreamGuard guard(other);
    check(cudaStreamWaitEvent(other.stream(), event_.get(), 0), "cudaStreamWaitEvent");
    at::Tensor made = make();
    record(other);
    return made;
  }

  [[nodiscard]] at::Tensor allocate_on_host(at::IntArrayRef sizes,
                                            const at::TensorOptions& options) override {
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    // LibTorch takes pinned memory where a device is in use, whichever is current
    return at::empty(sizes, options.device(at::kCPU).pinned_memory(true));
  }

  void hand_over(const std::vector<at::Tensor>& tensors,
                 const std::vector<HandleState::Completion>& completions) const override {
    const c10::cuda::CUDAGuard guard(stream_.device());
    const CUDAStream now = c10::cuda::getCurrentCUDAStream(stream_.device_index());
    refuse_capture(now, what_);
    wait(now, completions);
    if (now == stream_ && !elsewhere_) return;
    for (const auto& tensor : tensors)
      if (tensor.defined())
        c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), now);
  }

 private:
  void record(const CUDAStream& stream) {
    check(cudaEventRecord(event_.get(), stream.stream()), "cudaEventRecord");
  }

  const CUDAStream stream_;
  const std::string what_;
  std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, EventEnd> event_;
  bool elsewhere_ = false;  ///< memory is from another stream's share
};

}  // namespace

std::shared_ptr<StreamPoint> stream_point(const at::Tensor& tensor, const std::string& what) {
  if (!tensor.is_cuda()) return nullptr;
  return std::make_shared<CudaPoint>(c10::cuda::getCurrentCUDAStream(tensor.get_device()), what);
}

void wait_on_current_stream(const at::Tensor& tensor,
                            const std::vector<HandleState::Completion>& completions,
                            const std::string& what) {
  if (completions.empty() || !tensor.is_cuda()) return;
  const c10::cuda::CUDAGuard guard(tensor.device());
  const CUDAStream now = c10::cuda::getCurrentCUDAStream(tensor.get_device());
  refuse_capture(now, what);
  wait(now, completions);
}

void set_up_device(int device, bool current) {
  gpu::set_memory_relief([] { c10::cuda::CUDACachingAllocator::emptyCache(); });
  if (current)
    check(c10::cuda::MaybeSetDevice(static_cast<c10::DeviceIndex>(device)), "cudaSetDevice");
}

}  // namespace hvd::detail
