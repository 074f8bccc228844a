#pragma once
/// Room card: CUDA's handles and return codes for files that include no CUDA header. Values only.

namespace hvd::nccl {

struct CudaStream;  ///< what a cudaStream_t points to; never defined
struct CudaEvent;   ///< what a cudaEvent_t points to; never defined

/// cudaError_t: the numbers that the backend tells apart. Any other number is a failure.
enum class CudaCode : int { Success = 0, InvalidValue = 1, OutOfMemory = 2, NotReady = 600 };

}  // namespace hvd::nccl
