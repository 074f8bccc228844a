// The kernels for AVX-512 (F, BW, VL, DQ): 64 bytes at a time. Compiled with -mavx512f and its kin; without, there are none.
// Tested in tests/ops/kernels/reduce_test.cc
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "ops/kernels/reduce_impl.h"

namespace hvd::kernels::detail {
const KernelTable* avx512_kernels() { return &kTable; }
}  // namespace hvd::kernels::detail
#else
#include "ops/kernels/kernel_table.h"

namespace hvd::kernels::detail {
const KernelTable* avx512_kernels() { return nullptr; }
}  // namespace hvd::kernels::detail
#endif
