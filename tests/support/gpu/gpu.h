#pragma once
/// What the programs of tests/gpu share: CUDA calls that must succeed, device memory, time. A call
/// that fails ends the program with its name. One thread.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "ops/gpu/kernels/kernels.h"

namespace hvd::test {

inline void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
inline void require(gpu::CudaCode code, const char* what) {
  require(static_cast<cudaError_t>(code), what);
}

class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) { require(cudaMalloc(&data_, bytes), "cudaMalloc"); }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

/// Seconds of the fastest of 20, by events.
inline double fastest_of_20(const std::function<void()>& launch) {
  cudaEvent_t begin, end;
  require(cudaEventCreate(&begin), "cudaEventCreate");
  require(cudaEventCreate(&end), "cudaEventCreate");
  float best = 1e30F;
  for (int i = 0; i < 20; ++i) {
    require(cudaEventRecord(begin, nullptr), "cudaEventRecord");
    launch();
    require(cudaEventRecord(end, nullptr), "cudaEventRecord");
    require(cudaEventSynchronize(end), "cudaEventSynchronize");
    float milliseconds = 0;
    require(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    best = std::min(best, milliseconds);
  }
  require(cudaEventDestroy(begin), "cudaEventDestroy");
  require(cudaEventDestroy(end), "cudaEventDestroy");
  return static_cast<double>(best) * 1e-3;
}

/// Likewise, the median of three such runs: for what is compared with a limit.
inline double fastest(const std::function<void()>& launch) {
  std::array<double, 3> runs{};
  for (double& seconds : runs) seconds = fastest_of_20(launch);
  std::sort(runs.begin(), runs.end());
  return runs[1];
}

/// A whole program: compares, then measures. 77, a skip, where there is no GPU; 1 if `compare`
/// found failures, or `measure` what is too slow.
inline int run_on_gpu(int (*compare)(), int (*measure)()) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("skipped: no GPU\n");
    return 77;
  }
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::printf("%s\n", properties.name);
  const int failures = compare() + measure();
  return failures == 0 ? 0 : 1;
}

}  // namespace hvd::test
