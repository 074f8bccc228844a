#pragma once
/// `launch_shared_reduce` (ops/gpu/kernels/kernels.h) done on host memory, by the scalar kernels of
/// the host: the oracle of the kernel on a GPU, and the kernel of the host table. Any thread, no
/// state.

#include "ops/gpu/kernels/kernels.h"

namespace hvd::gpu::test {

/// Carries the job out at once.
CudaCode reduce_job_on_host(const ReduceJob& job);

}  // namespace hvd::gpu::test
