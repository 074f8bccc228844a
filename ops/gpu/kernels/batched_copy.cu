// The copy kernel on the device: what it does is in batched_copy_kernel.h.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define HVD_DEVICE __device__ __forceinline__
#define HVD_UNROLL _Pragma("unroll")
#include "ops/gpu/kernels/batched_copy_kernel.h"

namespace hvd::gpu {

namespace {

template <class S, class D, class Op, int kCapacity>
__global__ void __launch_bounds__(device::kThreads)
    batched_copy_kernel(const __grid_constant__ device::Table<kCapacity> table, const Op op) {
  device::copy_block<S, D>(table, op, blockIdx.x, static_cast<int>(threadIdx.x));
}

struct OnStream {
  cudaStream_t stream;

  template <class S, class D, class Op, int kCapacity>
  CudaCode launch(const device::Table<kCapacity>& table, const Op& op, std::uint32_t chunks) const {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(chunks);
    config.blockDim = dim3(device::kThreads);
    config.stream = stream;
    const cudaError_t error =
        cudaLaunchKernelEx(&config, batched_copy_kernel<S, D, Op, kCapacity>, table, op);
    // it is returned, and not left for the user's next check
    if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
    return static_cast<CudaCode>(error);
  }
};

}  // namespace

CudaCode launch_batched_copy(const CopyJob& job, CudaStream* stream) {
  return device::copy_job(job, OnStream{reinterpret_cast<cudaStream_t>(stream)});
}

}  // namespace hvd::gpu
