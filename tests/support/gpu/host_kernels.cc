#include "tests/support/gpu/host_kernels.h"

#include <cstddef>
#include <limits>
#include <vector>

#include "ops/kernels/reduce.h"

namespace hvd::gpu::test {

namespace {

template <class T>
T product_on_host(T value, double factor) {
  using Limits = std::numeric_limits<T>;
  const double product = static_cast<double>(value) * factor;
  if (std::isnan(product)) return 0;
  if (product <= static_cast<double>(Limits::min())) return Limits::min();
  if (product >= static_cast<double>(Limits::max())) return Limits::max();
  return static_cast<T>(product);
}

template <class S, class D>
D copied_on_host(S value, double factor, std::int64_t divisor) {
  if constexpr (kInteger<S> && kInteger<D>) {
    const auto quotient = static_cast<S>(static_cast<std::int64_t>(value) / divisor);
    const auto scaled = [&](auto narrow) {
      return factor == 1 ? narrow : product_on_host(narrow, factor);
    };
    if constexpr (sizeof(D) > sizeof(S)) {
      return static_cast<D>(scaled(quotient));
    } else {
      return scaled(static_cast<D>(quotient));
    }
  } else if constexpr (!kInteger<S> && !kInteger<D>) {
    using Wide = std::conditional_t<std::is_same_v<S, double>, double, float>;
    return static_cast<D>(static_cast<Wide>(value) / static_cast<Wide>(divisor) *
                          static_cast<Wide>(factor));
  } else {
    throw std::logic_error("copied_on_host: integer against float");
  }
}

}  // namespace

CudaCode copy_on_host(const CopyJob& job) {
  if (!copy_supported(job)) return CudaCode::InvalidValue;
  for (const CopyItem& item : job.items) {
    if (item.count <= 0) continue;
    if (is_plain(job)) {
      std::memmove(item.dst, item.src,
                   static_cast<std::size_t>(item.count) * element_bytes(job.from));
      continue;
    }
    with_host_type(job.from, [&](auto from) {
      with_host_type(job.to, [&](auto to) {
        using S = typename decltype(from)::Native;
        using D = typename decltype(to)::Native;
        for (std::int64_t i = 0; i < item.count; ++i) {
          static_cast<D*>(item.dst)[i] =
              copied_on_host<S, D>(static_cast<const S*>(item.src)[i], job.factor, job.divisor);
        }
      });
    });
  }
  return CudaCode::Success;
}

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
