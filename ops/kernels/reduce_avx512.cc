// The kernels for AVX-512 (F, BW, VL, DQ): 64 bytes at a time. Compiled with -mavx512f and its kin;
// without, there are none.
// Tested in tests/ops/kernels/reduce_test.cc
#include "ops/kernels/kernel_table.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "ops/kernels/reduce_impl.h"
const hvd::kernels::detail::KernelTable* hvd::kernels::detail::avx512_kernels() { return &kTable; }
#else
const hvd::kernels::detail::KernelTable* hvd::kernels::detail::avx512_kernels() { return nullptr; }
#endif
