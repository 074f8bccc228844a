// The kernels for AVX2 with F16C: 32 bytes at a time. Compiled with -mavx2 -mfma -mf16c; without, there are none.
// Tested in tests/ops/kernels/reduce_test.cc
#if defined(__AVX2__) && defined(__F16C__)
#include "ops/kernels/reduce_impl.h"

namespace hvd::kernels::detail {
const KernelTable* avx2_kernels() { return &kTable; }
}  // namespace hvd::kernels::detail
#else
#include "ops/kernels/kernel_table.h"

namespace hvd::kernels::detail {
const KernelTable* avx2_kernels() { return nullptr; }
}  // namespace hvd::kernels::detail
#endif
