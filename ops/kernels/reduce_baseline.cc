// The kernels for what every processor of the architecture has (SSE2 on x86-64).
// Tested in tests/ops/kernels/reduce_test.cc
#include "ops/kernels/reduce_impl.h"

namespace hvd::kernels::detail {
const KernelTable* baseline_kernels() { return &kTable; }
}  // namespace hvd::kernels::detail
