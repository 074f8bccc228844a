// The kernels for what every processor of the architecture has (SSE2 on x86-64).
// Tested in tests/ops/kernels/reduce_test.cc
#include "ops/kernels/reduce_impl.h"

const hvd::kernels::detail::KernelTable* hvd::kernels::detail::baseline_kernels() {
  return &kTable;
}
