#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <stdexcept>

#include "tools/hvd_bench/workload.h"

namespace bench::gpu {

namespace {
void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess)
    throw std::runtime_error(fmt::format("{}: {}", call, cudaGetErrorString(error)));
}
}  // namespace

hvd::Device device() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0)
    throw WrongOptions("--device cuda: there is no GPU here");
  const int index = hvd::local_rank() % count;
  check(cudaSetDevice(index), "cudaSetDevice");
  return {hvd::DeviceKind::Cuda, index};
}

std::shared_ptr<void> allocate(std::size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "cudaMalloc");
  return {memory, [](void* block) { static_cast<void>(cudaFree(block)); }};
}

void copy(void* to, const void* from, std::size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
  // within a device the former returns early
  check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

}  // namespace bench::gpu
