// The reduction kernel on the device: what it does is in shared_reduce_kernel.h. Compiled without
// fused multiply-add (ops/CMakeLists.txt): results are those of the host, bit for bit.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define HVD_DEVICE __device__ __forceinline__
#define HVD_UNROLL _Pragma("unroll")
#define HVD_ROLL _Pragma("unroll 1")
#include "ops/gpu/kernels/shared_reduce_kernel.h"

namespace hvd::gpu {

namespace {

template <class T, class Fold>
__global__ void __launch_bounds__(reduction::kThreads)
    shared_reduce_kernel(const __grid_constant__ reduction::Table table, const Fold fold) {
  reduction::reduce_block<T>(table, fold, blockIdx.x, static_cast<int>(threadIdx.x));
}

struct OnStream {
  cudaStream_t stream;

  template <class T, class Fold>
  CudaCode launch(const reduction::Table& table, const Fold& fold, std::uint32_t chunks) const {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(chunks);
    config.blockDim = dim3(reduction::kThreads);
    config.stream = stream;
    const cudaError_t error =
        cudaLaunchKernelEx(&config, shared_reduce_kernel<T, Fold>, table, fold);
    // it is returned, and not left for the user's next check
    if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
    return static_cast<CudaCode>(error);
  }
};

}  // namespace

CudaCode launch_shared_reduce(const ReduceJob& job, CudaStream* stream) {
  return reduction::reduce_job(job, OnStream{reinterpret_cast<cudaStream_t>(stream)});
}

}  // namespace hvd::gpu
