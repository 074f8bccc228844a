// The kernel that makes results of an abort unusable: what it does is in poison_kernel.h.

#include "ops/gpu/kernels/poison_kernel.h"

#include <cuda_runtime.h>

namespace hvd::gpu {

namespace {

/// The mark is read anew by every block: the host writes it while the stream runs.
__global__ void __launch_bounds__(poison::kThreads)
    poison_kernel(const __grid_constant__ poison::Table table, const volatile std::uint32_t* mark) {
  if (__syncthreads_or(threadIdx.x == 0 && *mark != 0) == 0) return;
  poison::fill(table, std::size_t{blockIdx.x} * blockDim.x + threadIdx.x,
               std::size_t{gridDim.x} * blockDim.x);
}

}  // namespace

CudaCode launch_poison(const PoisonJob& job, CudaStream* stream) {
  return poison::in_launches(job, [&](const poison::Table& table, int blocks) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(poison::kThreads);
    config.stream = reinterpret_cast<cudaStream_t>(stream);
    const cudaError_t error = cudaLaunchKernelEx(
        &config, poison_kernel, table, static_cast<const volatile std::uint32_t*>(job.mark));
    // it is returned, and not left for the user's next check
    if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
    return static_cast<CudaCode>(error);
  });
}

}  // namespace hvd::gpu
