// The null twin of linked_api_cuda.cc and of NCCL's half: this build has no CUDA.
// Tested in tests/ops/gpu/nccl/nccl_backend_test.cc

#include "ops/gpu/api/gpu_api.h"

namespace hvd::gpu {

const GpuApi* linked_gpu_api() { return nullptr; }
bool cuda_built() { return false; }
bool nccl_built() { return false; }
std::string_view gpu_architectures() { return {}; }
std::string gpu_libraries() { return "built without CUDA"; }

}  // namespace hvd::gpu
