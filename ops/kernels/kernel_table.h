#pragma once
/// KernelTable is the seam between the dispatcher (reduce.cc) and the vector kernels, which are one
/// template (reduce_impl.h) compiled once per instruction set. It has plain structs and function
/// pointers only: these files are compiled with flags that not every processor has, and an inline
/// function shared with the rest of the program could be the copy that the linker keeps.
// Tested in tests/ops/kernels/reduce_test.cc

#include <cstddef>

#include "hvd/types.h"

namespace hvd::kernels::detail {

struct ReduceJob {
  const void* const* in;
  std::size_t ins;  ///< at least 1
  void* const* out;
  std::size_t outs;
  std::size_t count;
  double prescale;
  double postscale;
  double divisor;  ///< 1 where the operation is not Average
};
using ReduceKernel = void (*)(const ReduceJob& job);

struct ConvertJob {
  void* dst;
  const void* src;
  std::size_t count;
  double scale;
};
using ConvertKernel = void (*)(const ConvertJob& job);

/// A KernelTable is what one instruction set offers. Each lookup returns null where the scalar
/// version has to do.
struct KernelTable {
  /// `op` is Sum (also for averages of floats), Min or Max. Integers are not scaled.
  ReduceKernel (*reduce)(DataType dtype, DataType output, ReduceOp op, bool prescaled);
  ConvertKernel (*convert)(DataType dst, DataType src);
};

/// Null where the build lacks the instruction set.
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();

}  // namespace hvd::kernels::detail
