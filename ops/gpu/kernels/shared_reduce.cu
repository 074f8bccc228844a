// The reduction kernel on the device: what it does is in shared_reduce_kernel.h. Compiled without
// fused multiply-add (ops/CMakeLists.txt): results are those of the host, bit for bit.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define HVD_DEVICE __device__ __forceinline__
#define HVD_UNROLL _Pragma("unroll")
#define HVD_ROLL _Pragma("unroll 1")
#include "ops/gpu/kernels/launch.h"
#include "ops/gpu/kernels/shared_reduce_kernel.h"

namespace hvd::gpu {

namespace {

template <class T, class Fold>
__global__ void __launch_bounds__(reduction::kThreads)
    shared_reduce_kernel(const __grid_constant__ reduction::Table table, const Fold fold) {
  reduction::reduce_block<T>(table, fold, blockIdx.x, static_cast<int>(threadIdx.x));
}

struct OnStream {
  CudaStream* stream;

  template <class T, class Fold>
  CudaCode launch(const reduction::Table& table, const Fold& fold, std::uint32_t chunks) const {
    return gpu::launch(shared_reduce_kernel<T, Fold>, chunks, reduction::kThreads, stream, table,
                       fold);
  }
};

}  // namespace

CudaCode launch_shared_reduce(const ReduceJob& job, CudaStream* stream) {
  return reduction::reduce_job(job, OnStream{stream});
}

}  // namespace hvd::gpu
