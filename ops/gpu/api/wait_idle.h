#pragma once
/// This function waits, for a limited time, until a stream has run dry, before memory is given back that its kernels use. It is for
/// destructors and `abort`: it never throws, and does without where a call is refused.
// Tested in tests/ops/gpu/nccl/nccl_memory_test.cc, tests/ops/gpu/nccl/nccl_failure_test.cc

#include <chrono>

#include "ops/gpu/api/handles.h"

namespace hvd::gpu {

/// Returns whether the stream (none made yet counts as well) has ended what it does.
bool comes_to_rest(const GpuApi& table, int device, const Stream& stream, std::chrono::milliseconds limit) noexcept;

}  // namespace hvd::gpu
