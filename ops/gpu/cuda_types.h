#pragma once
/// This header has CUDA's handles and return codes for files that include no CUDA header. It has values only.
// Tested in tests/gpu/errors_gpu_test.cc

#include <array>
#include <cstddef>

namespace hvd::gpu {

struct CudaStream;  ///< what a cudaStream_t points to; never defined
struct CudaEvent;   ///< what a cudaEvent_t points to; never defined

/// cudaError_t: the numbers that the backend tells apart. Any other number is a failure.
enum class CudaCode : int { Success = 0, InvalidValue = 1, OutOfMemory = 2, NotReady = 600 };

/// cudaStreamCaptureMode: tells which calls of a thread are refused, and end the capture, while a CUDA graph is being captured.
enum class CaptureMode : int { Global = 0, ThreadLocal = 1, Relaxed = 2 };

/// CUDA hands out memory for sharing in pieces of this size, bytes.
inline constexpr std::size_t kDeviceGranularity = std::size_t{2} << 20;
constexpr std::size_t in_whole_granules(std::size_t bytes) {
  return (bytes + kDeviceGranularity - 1) / kDeviceGranularity * kDeviceGranularity;
}

/// A cudaIpcMemHandle_t or cudaIpcEventHandle_t: what another process of the host opens memory or an event by.
struct IpcHandle {
  std::array<std::byte, 64> bytes{};
};

}  // namespace hvd::gpu
