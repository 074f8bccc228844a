// Chooses the kernel: the widest instruction set there is, or the scalar version where no vector
// kernel exists. Has the kernels for what every processor of the architecture has, too (SSE2 on
// x86-64).

#include "ops/kernels/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "ops/kernels/reduce_impl.h"

namespace hvd::kernels {
namespace {

using detail::KernelTable;

const KernelTable* table_of(Isa isa) {
  if (isa == Isa::Baseline) return &detail::kTable;
  return isa == Isa::Avx2 ? detail::avx2_kernels() : detail::avx512_kernels();
}

bool processor_has([[maybe_unused]] Isa isa) {
  if (isa == Isa::Baseline) return true;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;  // clang 14 does not know "f16c"
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  if (isa == Isa::Avx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

/// The parts of a complex number, where adding and scaling it is adding and scaling these.
struct Parts {
  DataType dtype;
  DataType output;
  std::size_t count;
};
Parts parts_of(const Reduction& reduction, std::size_t count) {
  if (reduction.op != ReduceOp::Sum && reduction.op != ReduceOp::Average)
    return {reduction.dtype, reduction.output, count};
  if (reduction.dtype == DataType::Complex64)
    return {DataType::Float32, DataType::Float32, 2 * count};
  if (reduction.dtype == DataType::Complex128)
    return {DataType::Float64, DataType::Float64, 2 * count};
  return {reduction.dtype, reduction.output, count};
}

detail::ReduceKernel find_kernel(const KernelTable& table, const Reduction& reduction,
                                 const Parts& parts, bool averages) {
  const bool unscaled = reduction.prescale == 1 && reduction.postscale == 1 && !averages;
  if (is_integer(parts.dtype) && !unscaled) return nullptr;
  const bool is_truth = parts.dtype == DataType::Bool;
  const ReduceOp op = reduction.op == ReduceOp::Average              ? ReduceOp::Sum
                      : is_truth && reduction.op == ReduceOp::BitAnd ? ReduceOp::Min
                      : is_truth && reduction.op == ReduceOp::BitOr  ? ReduceOp::Max
                                                                     : reduction.op;
  return table.reduce(parts.dtype, parts.output, op, reduction.prescale != 1 && !is_truth);
}

}  // namespace

bool available(Isa isa) { return table_of(isa) != nullptr && processor_has(isa); }

Isa best_isa() {
  static const Isa best = available(Isa::Avx512) ? Isa::Avx512
                          : available(Isa::Avx2) ? Isa::Avx2
                                                 : Isa::Baseline;
  return best;
}

std::string_view name_of(Isa isa) {
  return isa == Isa::Baseline ? "baseline" : isa == Isa::Avx2 ? "avx2" : "avx512";
}

bool supported(DataType dtype, ReduceOp op) {
  if (op == ReduceOp::Adasum) return false;
  const bool ordering = op == ReduceOp::Min || op == ReduceOp::Max;
  if (dtype == DataType::Bool) return ordering || is_bitwise(op);
  if (is_bitwise(op)) return is_integer(dtype);
  return !(is_complex(dtype) && ordering);
}

void reduce(const Reduction& reduction, std::span<const void* const> in, std::span<void* const> out,
            std::size_t count) {
  reduce(best_isa(), reduction, in, out, count);
}

void reduce(Isa isa, const Reduction& reduction, std::span<const void* const> in,
            std::span<void* const> out, std::size_t count) {
  const Parts parts = parts_of(reduction, count);
  const bool averages = reduction.op == ReduceOp::Average && reduction.divisor != 1;
  const bool known = supported(reduction.dtype, reduction.op) &&
                     (reduction.output == reduction.dtype || !is_complex(reduction.dtype));
  const detail::ReduceKernel kernel =
      known && !in.empty() ? find_kernel(*table_of(isa), reduction, parts, averages) : nullptr;
  if (kernel == nullptr) return reduce_scalar(reduction, in, out, count);
  kernel({.in = in.data(),
          .ins = in.size(),
          .out = out.data(),
          .outs = out.size(),
          .count = parts.count,
          .prescale = reduction.prescale,
          .postscale = reduction.postscale,
          .divisor = averages ? static_cast<double>(reduction.divisor) : 1.0});
}

void convert(void* dst, DataType dst_type, const void* src, DataType src_type, std::size_t count,
             double scale) {
  convert(best_isa(), dst, dst_type, src, src_type, count, scale);
}

void convert(Isa isa, void* dst, DataType dst_type, const void* src, DataType src_type,
             std::size_t count, double scale) {
  const bool copies = dst_type == src_type && scale == 1;
  const detail::ConvertKernel kernel =
      copies ? nullptr : table_of(isa)->convert(dst_type, src_type);
  if (kernel == nullptr) return convert_scalar(dst, dst_type, src, src_type, count, scale);
  kernel({.dst = dst, .src = src, .count = count, .scale = scale});
}

}  // namespace hvd::kernels
