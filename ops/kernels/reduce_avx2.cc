// The kernels for AVX2 with F16C: 32 bytes at a time. Compiled with -mavx2 -mfma -mf16c; without,
// there are none.
// Tested in tests/ops/kernels/reduce_test.cc
#include "ops/kernels/kernel_table.h"

#if defined(__AVX2__) && defined(__F16C__)
#include "ops/kernels/reduce_impl.h"
const hvd::kernels::detail::KernelTable* hvd::kernels::detail::avx2_kernels() { return &kTable; }
#else
const hvd::kernels::detail::KernelTable* hvd::kernels::detail::avx2_kernels() { return nullptr; }
#endif
