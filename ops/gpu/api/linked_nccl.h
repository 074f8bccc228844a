#pragma once
/// This is NCCL's half of the linked table. It has two implementations: one that is linked with NCCL, and one without, in which every call
/// is refused.

#include <string>

#include "ops/gpu/api/gpu_api.h"

namespace hvd::nccl {

void fill_nccl(GpuApi& table);
/// "NCCL 2.28.9", or that there is none.
std::string nccl_version();

}  // namespace hvd::nccl
