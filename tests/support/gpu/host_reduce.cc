#include "tests/support/gpu/host_reduce.h"

#include <cstddef>
#include <vector>

#include "ops/kernels/reduce.h"

namespace hvd::gpu::test {

CudaCode reduce_job_on_host(const ReduceJob& job) {
  if (!reduce_supported(job.dtype, job.op) || job.ins < 1 || job.ins > kMostSharers ||
      job.outs < 1 || job.outs > kMostSharers)
    return CudaCode::InvalidValue;
  const kernels::Reduction reduction{job.dtype,     job.op,      job.prescale,
                                     job.postscale, job.divisor, job.dtype};
  const auto ins = static_cast<std::size_t>(job.ins), outs = static_cast<std::size_t>(job.outs);
  for (std::size_t item = 0; item < job.counts.size(); ++item) {
    if (job.counts[item] <= 0) continue;
    const auto count = static_cast<std::size_t>(job.counts[item]);
    const std::vector<std::byte> zeros(job.zeros ? count * element_bytes(job.dtype) : 0);
    const auto given = job.inputs.subspan(item * ins, ins);
    std::vector<const void*> inputs(given.begin(), given.end());
    if (job.zeros) inputs.push_back(zeros.data());
    kernels::reduce_scalar(reduction, inputs, job.outputs.subspan(item * outs, outs), count);
  }
  return CudaCode::Success;
}

}  // namespace hvd::gpu::test
