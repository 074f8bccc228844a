// What nvcc's code calls: it registers kernels, and launches them.
#include "tests/gpu/double/kernels.h"
#include "tests/gpu/double/streams.h"

using namespace hvd::gpu::test::cuda;

HVD_EXPORTED void** __cudaRegisterFatBinary(void* /*binary*/) {  // NOLINT: CUDA's names
  static void* handle = nullptr;
  return &handle;
}
HVD_EXPORTED void __cudaRegisterFatBinaryEnd(void** /*handle*/) {}  // NOLINT
HVD_EXPORTED void __cudaUnregisterFatBinary(void** /*handle*/) {}   // NOLINT
HVD_EXPORTED void __cudaRegisterFunction(void** /*handle*/, const char* stub, char* /*function*/,
                                         const char* name, int /*limit*/,  // NOLINT
                                         uint3* /*thread*/, uint3* /*block*/, dim3* /*block_size*/,
                                         dim3* /*grid*/, int* /*warp*/) {
  name_kernel(stub, name);
}
HVD_EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub,
                                             void** arguments) {
  const Speaker speaker(__builtin_return_address(0));
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  CUstream_st* const stream = known(config->stream);
  if (stream == nullptr || stream->device != current_device())
    return done(cudaErrorInvalidResourceHandle);
  Work work = prepare_kernel(stub, arguments, config->gridDim.x);
  check_access(*stream, work.use);
  return enqueue(*stream, std::move(work));
}
