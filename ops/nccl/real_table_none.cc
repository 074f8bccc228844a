// The null twin of real_table_cuda.cc: this build has no CUDA, or no NCCL.

#include "ops/nccl/nccl_table.h"

namespace hvd::nccl {

const NcclTable* real_nccl_table() { return nullptr; }
bool nccl_built() { return false; }
std::string nccl_version() { return "built without NCCL"; }

}  // namespace hvd::nccl
