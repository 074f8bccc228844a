#pragma once
/// This is NCCL's half of the linked table. It has two implementations: one that is linked with NCCL, and one without, in which every call
/// is refused.
// Tested in tests/gpu/nccl_gpu_test.cc, tests/system/scripts/without_nccl.sh

#include <string>

#include "ops/gpu/api/gpu_api.h"

namespace hvd::gpu {

void fill_nccl(GpuApi& table);
/// "NCCL 2.28.9", or that there is none.
std::string nccl_version();

}  // namespace hvd::gpu
