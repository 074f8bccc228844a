// The copy kernel on the device, and the one that makes results of an abort unusable: what they do
// is in batched_copy_kernel.h and poison_kernel.h.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define HVD_DEVICE __device__ __forceinline__
#define HVD_UNROLL _Pragma("unroll")
#include "ops/gpu/kernels/batched_copy_kernel.h"
#include "ops/gpu/kernels/launch.h"
#include "ops/gpu/kernels/poison_kernel.h"

namespace hvd::gpu {

namespace {

template <class S, class D, class Op, int kCapacity>
__global__ void __launch_bounds__(device::kThreads)
    batched_copy_kernel(const __grid_constant__ device::Table<kCapacity> table, const Op op) {
  device::copy_block<S, D>(table, op, blockIdx.x, static_cast<int>(threadIdx.x));
}

/// The mark is read anew by every block: the host writes it while the stream runs.
__global__ void __launch_bounds__(poison::kThreads)
    poison_kernel(const __grid_constant__ poison::Table table, const volatile std::uint32_t* mark) {
  if (__syncthreads_or(threadIdx.x == 0 && *mark != 0) == 0) return;
  poison::fill(table, std::size_t{blockIdx.x} * blockDim.x + threadIdx.x,
               std::size_t{gridDim.x} * blockDim.x);
}

struct OnStream {
  CudaStream* stream;

  template <class S, class D, class Op, int kCapacity>
  CudaCode launch(const device::Table<kCapacity>& table, const Op& op, std::uint32_t chunks) const {
    return gpu::launch(batched_copy_kernel<S, D, Op, kCapacity>, chunks, device::kThreads, stream,
                       table, op);
  }
};

}  // namespace

CudaCode launch_batched_copy(const CopyJob& job, CudaStream* stream) {
  return device::copy_job(job, OnStream{stream});
}

CudaCode launch_poison(const PoisonJob& job, CudaStream* stream) {
  return poison::in_launches(job, [&](const poison::Table& table, int blocks) {
    return launch(poison_kernel, static_cast<std::uint32_t>(blocks), poison::kThreads, stream,
                  table, static_cast<const volatile std::uint32_t*>(job.mark));
  });
}

}  // namespace hvd::gpu
