#pragma once
/// NCCL's half of the real table. Two implementations: linked with NCCL, and without, where every call is refused.

#include <string>

#include "ops/gpu/api/gpu_api.h"

namespace hvd::nccl {

void fill_nccl(GpuApi& table);
/// "NCCL 2.28.9", or that there is none.
std::string nccl_version();

}  // namespace hvd::nccl
