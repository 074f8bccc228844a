#pragma once
/// What programs put on streams of virtual GPUs beside hvd's own kernels: LibTorch's, done by its
/// kernels for the host. The double of CUDA's runtime exports `hvd_double_enqueue`.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "tests/support/gpu/checks/happens_before.h"

struct CUstream_st;

namespace hvd::gpu::test::cuda {

inline constexpr std::uintptr_t kDevices =
    0x300000000000;  ///< where programs believe device memory to be
inline constexpr std::uintptr_t kExecutorsDevices = 0x220000000000;  ///< where it is
inline constexpr std::uintptr_t kDeviceStride = std::uintptr_t{1} << 36;

inline std::uintptr_t number_of(const void* memory) {
  return reinterpret_cast<std::uintptr_t>(memory);
}
inline bool is_device_memory(const void* memory) {
  return number_of(memory) >= kDevices && number_of(memory) < kDevices + 4 * kDeviceStride;
}
/// Returns where the executor finds memory.
template <class T>
T* to_executor(T* memory) {
  return is_device_memory(memory)
             ? reinterpret_cast<T*>(number_of(memory) - kDevices + kExecutorsDevices)
             : memory;
}

/// `run` is called when the stream gets there, again and again until it returns true; several times
/// more for one that is captured.
struct Work {
  UseOfMemory use;
  std::function<bool()> run;
};
using Enqueue = int(CUstream_st* stream, Work&& work);

}  // namespace hvd::gpu::test::cuda
