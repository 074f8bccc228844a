// What the contract suite's memory on a GPU (managed_new.cc) asks for before it takes any: whether
// host and device may work on managed memory at the same time. Over a CUDA of this file's; needs no
// GPU. Starts itself once more, where they may not. Prints what it found, returns 1 if anything is
// wrong.
#include <cuda_runtime_api.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "tests/gpu/managed_new.cc"

extern "C" {
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = std::getenv("HVD_TEST_NOT_CONCURRENT") == nullptr ? 1 : 0;
  return cudaSuccess;
}
cudaError_t cudaMallocManaged(void** memory, size_t bytes, unsigned) {
  *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *memory == MAP_FAILED ? cudaErrorMemoryAllocation : cudaSuccess;
}
}

int main(int, char** arguments) {
  const auto taken = std::make_unique<int>(5);
  if (std::getenv("HVD_TEST_NOT_CONCURRENT") != nullptr) return *taken;  // not to be reached
  setenv("HVD_TEST_NOT_CONCURRENT", "1", 1);
  pid_t child = 0;
  int status = 0;
  if (posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments, environ) != 0 ||
      waitpid(child, &status, 0) != child)
    return 1;
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  std::printf("where they may not the program ends with %d; 77 is a skip\n", code);
  return code == 77 ? 0 : 1;
}
