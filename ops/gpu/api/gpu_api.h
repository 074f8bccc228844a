#pragma once
/// GpuApi is the table of the NCCL and CUDA calls that the GPU backends make. It is the outside
/// world, injected, so that tests can lie with it (tests/support/gpu/host_gpu_api.h works on host
/// memory). It needs neither nccl.h nor a CUDA header: handles are opaque, and numbers are those of
/// the libraries (checked where the linked table is made). Its calls are made by whoever drives the
/// backend, one thread at a time. The entries own nothing and fail by their return value only.
// Tested in tests/gpu/errors_gpu_test.cc, tests/gpu/nccl_gpu_test.cc

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "ops/gpu/kernels/kernels.h"

namespace hvd::gpu {

struct NcclComm;  ///< what an ncclComm_t points to; never defined

enum class NcclCode : int {
  Success = 0,
  UnhandledCudaError = 1,
  SystemError = 2,
  InternalError = 3,
  InvalidArgument = 4,
  InvalidUsage = 5,
  RemoteError = 6,
  InProgress = 7,
};
enum class NcclType : int {
  Int8 = 0,
  Uint8 = 1,
  Int32 = 2,
  Int64 = 4,
  Float16 = 6,
  Float32 = 7,
  Float64 = 8,
  Bfloat16 = 9
};
enum class NcclOp : int { Sum = 0, Prod = 1, Max = 2, Min = 3, Avg = 4 };

struct NcclUniqueId {
  std::array<char, 128> bytes{};
};

/// Every entry must be callable, but those for windows. The comment names the call it stands for,
/// as error messages spell it.
struct GpuApi {
  // CUDA
  std::function<CudaCode(int* device)> get_device;  ///< cudaGetDevice
  std::function<CudaCode(int device)> set_device;   ///< cudaSetDevice
  /// cuDevicePrimaryCtxGetState: tells whether this process works on the device already. Makes no
  /// context.
  std::function<CudaCode(int device, bool* exists)> has_context;
  /// cuDevicePrimaryCtxRetain, once for each device, and cuCtxPushCurrent: the device is the
  /// calling thread's current one until `pop_device`, which leaves the thread as it was, also where
  /// it had no context.
  std::function<CudaCode(int device)> push_device;
  std::function<CudaCode()> pop_device;  ///< cuCtxPopCurrent
  /// cudaThreadExchangeStreamCaptureMode: `mode` becomes the calling thread's, and what that was is
  /// written to it.
  std::function<CudaCode(CaptureMode* mode)> exchange_capture_mode;
  std::function<CudaCode(CudaStream** stream)>
      stream_create;  ///< cudaStreamCreateWithPriority: highest, non-blocking
  std::function<CudaCode(CudaStream* stream)> stream_destroy;  ///< cudaStreamDestroy
  std::function<CudaCode(CudaStream* stream, CudaEvent* event)>
      stream_wait_event;                                    ///< cudaStreamWaitEvent
  std::function<CudaCode(CudaEvent** event)> event_create;  ///< cudaEventCreateWithFlags: no timing
  std::function<CudaCode(CudaEvent* event)> event_destroy;  ///< cudaEventDestroy
  std::function<CudaCode(CudaEvent* event, CudaStream* stream)> event_record;  ///< cudaEventRecord
  std::function<CudaCode(CudaEvent* event)> event_query;                       ///< cudaEventQuery
  std::function<CudaCode(std::size_t* free_bytes, std::size_t* total_bytes)>
      mem_info;  ///< cudaMemGetInfo
  std::function<CudaCode(const CopyJob& job, CudaStream* stream)>
      batched_copy;  ///< launch_batched_copy
  std::function<CudaCode(const ReduceJob& job, CudaStream* stream)>
      shared_reduce;  ///< launch_shared_reduce
  std::function<CudaCode(const PoisonJob& job, CudaStream* stream)> poison;  ///< launch_poison
  std::function<CudaCode(int* count)> device_count;                          ///< cudaGetDeviceCount
  /// cudaGetDeviceProperties: the device's UUID as text, the same in all processes of a host. Makes
  /// no context.
  std::function<CudaCode(int device, std::string* id)> device_id;
  /// cudaDeviceGetAttribute(cudaDevAttrIpcEventSupport): whether events of the device can be other
  /// processes' too. Makes no context.
  std::function<CudaCode(int device, bool* supported)> ipc_supported;
  /// cudaDeviceGetAttribute(cudaDevAttrComputeCapabilityMajor, Minor): 86 stands for 8.6. Makes no
  /// context.
  std::function<CudaCode(int device, int* capability)> capability;
  /// cuDeviceGetAttribute(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED): whether switches sum for the
  /// device. Makes no context.
  std::function<CudaCode(int device, bool* supported)> multicast_supported;
  std::function<CudaCode(void** memory, std::size_t bytes)> device_malloc;  ///< cudaMalloc
  std::function<CudaCode(void* memory)> device_free;                        ///< cudaFree
  /// cudaMemcpyAsync, either way between host and device
  std::function<CudaCode(void* to, const void* from, std::size_t bytes, CudaStream* stream)>
      memcpy_async;
  /// cudaHostAlloc, for all contexts: zeroed host memory that kernels read where it is
  std::function<CudaCode(void** memory, std::size_t bytes)> host_malloc;
  std::function<CudaCode(void* memory)> host_free;  ///< cudaFreeHost
  std::function<CudaCode(void* memory, std::size_t bytes)>
      host_register;                                      ///< cudaHostRegister, for all contexts
  std::function<CudaCode(void* memory)> host_unregister;  ///< cudaHostUnregister
  /// Returns (cudaHostGetDevicePointer) where kernels of the current device find host memory that
  /// is registered
  std::function<CudaCode(void** address, void* memory)> host_device_pointer;
  std::function<CudaCode(IpcHandle* handle, void* memory)>
      ipc_get_memory;  ///< cudaIpcGetMemHandle; of memory from device_malloc
  std::function<CudaCode(void** memory, const IpcHandle& handle)>
      ipc_open_memory;  ///< cudaIpcOpenMemHandle; of another process only
  std::function<CudaCode(void* memory)> ipc_close_memory;  ///< cudaIpcCloseMemHandle
  std::function<CudaCode(CudaEvent** event)>
      ipc_event_create;  ///< cudaEventCreateWithFlags: no timing, interprocess
  std::function<CudaCode(IpcHandle* handle, CudaEvent* event)>
      ipc_get_event;  ///< cudaIpcGetEventHandle
  /// cudaIpcOpenEventHandle; of another process only. Ends by `event_destroy`.
  std::function<CudaCode(CudaEvent** event, const IpcHandle& handle)> ipc_open_event;
  std::function<void(const char* text)>
      range_push;  ///< nvtxDomainRangePushEx: what the thread does from now on, for profilers
  std::function<void()> range_pop;  ///< nvtxDomainRangePop
  std::function<std::string(CudaCode code)>
      cuda_error;  ///< cudaGetErrorName and cudaGetErrorString

  // NCCL
  std::function<NcclCode(int* version)>
      get_version;  ///< ncclGetVersion, of the library that is loaded: 22907 is 2.29.7
  std::function<NcclCode(NcclUniqueId* id)> get_unique_id;  ///< ncclGetUniqueId
  /// ncclCommInitRankConfig. Not `blocking`: this and every later call on the communicator may
  /// return InProgress, after which only `comm_get_async_error` and `comm_abort` are allowed until
  /// the former no longer says InProgress. `name`: what NCCL's messages and profilers call it
  /// (since 2.27); the caller keeps it as long as the communicator.
  std::function<NcclCode(NcclComm** comm, int ranks, const NcclUniqueId& id, int rank,
                         bool blocking, const char* name)>
      comm_init_rank;
  std::function<NcclCode(NcclComm* comm)> comm_abort;  ///< ncclCommAbort
  std::function<NcclCode(NcclComm* comm, NcclCode* error)>
      comm_get_async_error;  ///< ncclCommGetAsyncError
  std::function<NcclCode(NcclComm* comm, void* memory, std::size_t bytes, void** registration)>
      comm_register;  ///< ncclCommRegister
  std::function<NcclCode(NcclComm* comm, void* registration)>
      comm_deregister;  ///< ncclCommDeregister
  /// ncclCommWindowRegister, symmetric: all ranks of the communicator, each with as many bytes from
  /// `mem_alloc`. Whatever it returns, it is done, and `window` written, when
  /// `comm_get_async_error` no longer says InProgress; null where NCCL has no use for it. Empty:
  /// this NCCL has none (before 2.27).
  std::function<NcclCode(NcclComm* comm, void* memory, std::size_t bytes, void** window)>
      window_register;
  std::function<NcclCode(NcclComm* comm, void* window)>
      window_deregister;  ///< ncclCommWindowDeregister; each rank for itself
  std::function<NcclCode(void** memory, std::size_t bytes)> mem_alloc;  ///< ncclMemAlloc
  std::function<NcclCode(void* memory)> mem_free;                       ///< ncclMemFree
  std::function<NcclCode()> group_start;                                ///< ncclGroupStart
  std::function<NcclCode()> group_end;                                  ///< ncclGroupEnd
  /// ncclAllReduce
  std::function<NcclCode(const void* send, void* receive, std::size_t count, NcclType type,
                         NcclOp op, NcclComm* comm, CudaStream* stream)>
      all_reduce;
  /// ncclBroadcast; `root` is a rank of the communicator
  std::function<NcclCode(const void* send, void* receive, std::size_t count, NcclType type,
                         int root, NcclComm* comm, CudaStream* stream)>
      broadcast;
  /// ncclAllGather; `count` is one rank's
  std::function<NcclCode(const void* send, void* receive, std::size_t count, NcclType type,
                         NcclComm* comm, CudaStream* stream)>
      all_gather;
  /// ncclReduce; only the root's `receive` is written
  std::function<NcclCode(const void* send, void* receive, std::size_t count, NcclType type,
                         NcclOp op, int root, NcclComm* comm, CudaStream* stream)>
      reduce;
  /// ncclReduceScatter; `count` is one rank's
  std::function<NcclCode(const void* send, void* receive, std::size_t count, NcclType type,
                         NcclOp op, NcclComm* comm, CudaStream* stream)>
      reduce_scatter;
  /// ncclSend, ncclRecv; those between two ranks pair up in their order
  std::function<NcclCode(const void* send, std::size_t count, NcclType type, int to, NcclComm* comm,
                         CudaStream* stream)>
      send;
  std::function<NcclCode(void* receive, std::size_t count, NcclType type, int from, NcclComm* comm,
                         CudaStream* stream)>
      receive;
  /// ncclGetErrorString and, where it has one, ncclGetLastError. `comm` may be null.
  std::function<std::string(NcclCode code, NcclComm* comm)> nccl_error;
};

/// Returns the table of the libraries that this build is linked with; null without CUDA. Without
/// NCCL its calls are refused. Lives as long as the process.
const GpuApi* linked_gpu_api();
bool nccl_built();
/// Returns what the kernels are built for, as CMake spells it, with commas: "80-real,90-virtual".
/// Empty without CUDA.
std::string_view gpu_architectures();
/// "NCCL 2.28.9, CUDA 13.0", or what this build lacks.
std::string gpu_libraries();

/// NCCL's half of the linked table, for the other: fills it. Without NCCL every call is refused.
void fill_nccl(GpuApi& table);
/// "NCCL 2.28.9", or that there is none.
std::string nccl_version();

}  // namespace hvd::gpu
