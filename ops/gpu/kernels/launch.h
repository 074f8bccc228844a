#pragma once
/// launch() starts a kernel, in sources that nvcc compiles. Any thread; owns nothing.
// Tested in tests/gpu/batched_copy_gpu_test.cc, tests/gpu/shared_reduce_gpu_test.cc

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/gpu/kernels/kernels.h"

namespace hvd::gpu {

/// Starts so many blocks of so many threads on the stream, with these parameters. Returns CUDA's
/// code, and does not leave an error for the user's next check.
template <class Kernel, class... Parameters>
CudaCode launch(Kernel* kernel, std::uint32_t blocks, int threads, CudaStream* stream,
                const Parameters&... parameters) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, parameters...);
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return static_cast<CudaCode>(error);
}

}  // namespace hvd::gpu
