// The table of the real libraries: CUDA's half, and what there is instead where this is built
// without CUDA.
// Tested in tests/gpu/errors_gpu_test.cc, tests/gpu/staged_gpu_test.cc

#include "ops/gpu/api/gpu_api.h"

#ifdef HVD_HAVE_CUDA

#include <cuda.h>
#include <cuda_runtime_api.h>
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#endif

#include <cstring>
#include <map>
#include <mutex>

#include "hvd/base/text.h"

namespace hvd::gpu {

namespace {

static_assert(static_cast<int>(CudaCode::InvalidValue) == cudaErrorInvalidValue);
static_assert(static_cast<int>(CudaCode::OutOfMemory) == cudaErrorMemoryAllocation);
static_assert(static_cast<int>(CudaCode::NotReady) == cudaErrorNotReady);

/// Returns CUDA's error as a code, and takes it off the thread: the thread's next check, which is
/// the user's, must not find it.
CudaCode code_of(cudaError_t error) {
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return static_cast<CudaCode>(error);
}

template <class T>
T native(T value) {
  return value;
}
cudaStream_t native(CudaStream* stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t native(CudaEvent* event) { return reinterpret_cast<cudaEvent_t>(event); }

/// The entry that hands its arguments, and `kMore`, to this call of CUDA's.
template <auto kCall, auto... kMore>
constexpr auto kForward =
    [](auto... arguments) { return code_of(kCall(native(arguments)..., kMore...)); };

CudaCode create_stream(CudaStream** stream) {
  int lowest = 0, highest = 0;
  if (const cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
      error != cudaSuccess)
    return code_of(error);
  cudaStream_t made = nullptr;
  const cudaError_t error = cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, highest);
  *stream = reinterpret_cast<CudaStream*>(made);
  return code_of(error);
}

static_assert(static_cast<int>(CaptureMode::Global) == cudaStreamCaptureModeGlobal);
static_assert(static_cast<int>(CaptureMode::ThreadLocal) == cudaStreamCaptureModeThreadLocal);
static_assert(static_cast<int>(CaptureMode::Relaxed) == cudaStreamCaptureModeRelaxed);

CudaCode exchange_capture_mode(CaptureMode* mode) {
  auto native = static_cast<cudaStreamCaptureMode>(*mode);
  const cudaError_t error = cudaThreadExchangeStreamCaptureMode(&native);
  *mode = static_cast<CaptureMode>(native);
  return code_of(error);
}

/// The driver's calls, which a machine without a GPU lacks: they are looked up. Null: there is
/// none.
template <class Call>
Call* driver_call(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status{};
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &status);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &status);
#endif
  return code_of(error) == CudaCode::Success && status == cudaDriverEntryPointSuccess
             ? reinterpret_cast<Call*>(found)
             : nullptr;
}

/// Makes no context.
bool driver_begun() {
  static const bool begun = [] {
    const auto begin = driver_call<CUresult(unsigned flags)>("cuInit");
    return begin != nullptr && begin(0) == CUDA_SUCCESS;
  }();
  return begun;
}

CudaCode has_context(int device, bool* exists) {
  static const auto ask = driver_call<CUresult(CUdevice device, unsigned* flags, int* active)>(
      "cuDevicePrimaryCtxGetState");
  unsigned flags = 0;
  int active = 0;
  if (ask == nullptr || !driver_begun() || ask(device, &flags, &active) != CUDA_SUCCESS)
    return CudaCode::InvalidValue;
  *exists = active != 0;
  return CudaCode::Success;
}

CudaCode multicast_supported(int device, bool* supported) {
  static const auto ask =
      driver_call<CUresult(int* value, CUdevice_attribute attribute, CUdevice device)>(
          "cuDeviceGetAttribute");
  int value = 0;
  if (ask == nullptr || !driver_begun() ||
      ask(&value, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, device) != CUDA_SUCCESS)
    return CudaCode::InvalidValue;
  *supported = value != 0;
  return CudaCode::Success;
}

/// The context that the runtime uses on the device, kept for as long as the process; null where it
/// cannot be had.
CUcontext primary_context(int device) {
  static const auto retain =
      driver_call<CUresult(CUcontext * context, CUdevice device)>("cuDevicePrimaryCtxRetain");
  static std::mutex mutex;
  static auto* const contexts = new std::map<int, CUcontext>;
  const std::lock_guard lock(mutex);
  const auto known = contexts->find(device);
  if (known != contexts->end()) return known->second;
  CUcontext made = nullptr;
  if (retain == nullptr || !driver_begun() || retain(&made, device) != CUDA_SUCCESS) return nullptr;
  contexts->emplace(device, made);
  return made;
}

CudaCode pop_device() {
  static const auto pop = driver_call<CUresult(CUcontext * context)>("cuCtxPopCurrent");
  CUcontext was = nullptr;
  return pop != nullptr && pop(&was) == CUDA_SUCCESS ? CudaCode::Success : CudaCode::InvalidValue;
}

/// Refused where the runtime, which NCCL asks, does not take the context for the current one.
CudaCode push_device(int device) {
  static const auto push = driver_call<CUresult(CUcontext context)>("cuCtxPushCurrent");
  const CUcontext context = push == nullptr ? nullptr : primary_context(device);
  if (context == nullptr || push(context) != CUDA_SUCCESS) return CudaCode::InvalidValue;
  int current = -1;
  if (code_of(cudaGetDevice(&current)) == CudaCode::Success && current == device)
    return CudaCode::Success;
  static_cast<void>(pop_device());
  return CudaCode::InvalidValue;
}

template <unsigned kFlags>
CudaCode create_event(CudaEvent** event) {
  cudaEvent_t made = nullptr;
  const cudaError_t error = cudaEventCreateWithFlags(&made, kFlags);
  *event = reinterpret_cast<CudaEvent*>(made);
  return code_of(error);
}

CudaCode identify(int device, std::string* id) {
  cudaDeviceProp properties{};
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return code_of(error);
  id->clear();
  for (const char byte : properties.uuid.bytes)
    *id += formatted("{:02x}", static_cast<unsigned char>(byte));
  return code_of(error);
}

static_assert(sizeof(IpcHandle) == sizeof(cudaIpcMemHandle_t) &&
              sizeof(IpcHandle) == sizeof(cudaIpcEventHandle_t));

template <class Native>
Native native(const IpcHandle& handle) {
  Native made;
  std::memcpy(&made, handle.bytes.data(), sizeof made);
  return made;
}
template <class Native>
void store(IpcHandle* handle, const Native& made) {
  std::memcpy(handle->bytes.data(), &made, sizeof made);
}

void fill_sharing(GpuApi& table) {
  table.shared_reduce = launch_shared_reduce;
  table.device_count = kForward<cudaGetDeviceCount>;
  table.device_id = identify;
  table.ipc_supported = [](int device, bool* supported) {
    int value = 0;
    const cudaError_t error = cudaDeviceGetAttribute(&value, cudaDevAttrIpcEventSupport, device);
    *supported = value != 0;
    return code_of(error);
  };
  table.capability = [](int device, int* capability) {
    int major = 0, minor = 0;
    const cudaError_t error =
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error != cudaSuccess) return code_of(error);
    const CudaCode code =
        code_of(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    *capability = 10 * major + minor;
    return code;
  };
  table.multicast_supported = multicast_supported;
  table.device_malloc = kForward<cudaMalloc>;
  table.device_free = kForward<cudaFree>;
  table.memcpy_async = [](void* to, const void* from, std::size_t bytes, CudaStream* stream) {
    return code_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, native(stream)));
  };
  table.host_malloc = [](void** memory, std::size_t bytes) {
    const cudaError_t error =
        cudaHostAlloc(memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (error == cudaSuccess) std::memset(*memory, 0, bytes);
    return code_of(error);
  };
  table.host_free = kForward<cudaFreeHost>;
  table.host_register =
      kForward<cudaHostRegister, cudaHostRegisterPortable | cudaHostRegisterMapped>;
  table.host_unregister = kForward<cudaHostUnregister>;
  table.host_device_pointer = kForward<cudaHostGetDevicePointer, 0>;
  table.ipc_get_memory = [](IpcHandle* handle, void* memory) {
    cudaIpcMemHandle_t made{};
    const cudaError_t error = cudaIpcGetMemHandle(&made, memory);
    store(handle, made);
    return code_of(error);
  };
  table.ipc_open_memory = [](void** memory, const IpcHandle& handle) {
    return code_of(cudaIpcOpenMemHandle(memory, native<cudaIpcMemHandle_t>(handle),
                                        cudaIpcMemLazyEnablePeerAccess));
  };
  table.ipc_close_memory = kForward<cudaIpcCloseMemHandle>;
  table.ipc_event_create = create_event<cudaEventDisableTiming | cudaEventInterprocess>;
  table.ipc_get_event = [](IpcHandle* handle, CudaEvent* event) {
    cudaIpcEventHandle_t made{};
    const cudaError_t error = cudaIpcGetEventHandle(&made, native(event));
    store(handle, made);
    return code_of(error);
  };
  table.ipc_open_event = [](CudaEvent** event, const IpcHandle& handle) {
    cudaEvent_t made = nullptr;
    const cudaError_t error = cudaIpcOpenEventHandle(&made, native<cudaIpcEventHandle_t>(handle));
    *event = reinterpret_cast<CudaEvent*>(made);
    return code_of(error);
  };
}

#ifdef NVTX_VERSION
nvtxDomainHandle_t profilers_domain() {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("hvd");
  return domain;
}
void push_range(const char* text) {
  nvtxEventAttributes_t range{};
  range.version = NVTX_VERSION;
  range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  range.messageType = NVTX_MESSAGE_TYPE_ASCII;
  range.message.ascii = text;
  nvtxDomainRangePushEx(profilers_domain(), &range);
}
void pop_range() { nvtxDomainRangePop(profilers_domain()); }
#else
void push_range(const char* /*text*/) {}
void pop_range() {}
#endif

GpuApi make_table() {
  GpuApi table;
  table.get_device = kForward<cudaGetDevice>;
  table.set_device = kForward<cudaSetDevice>;
  table.has_context = has_context;
  table.push_device = push_device;
  table.pop_device = pop_device;
  table.exchange_capture_mode = exchange_capture_mode;
  table.stream_create = create_stream;
  table.stream_destroy = kForward<cudaStreamDestroy>;
  table.stream_wait_event = kForward<cudaStreamWaitEvent, 0>;
  table.event_create = create_event<cudaEventDisableTiming>;
  table.event_destroy = kForward<cudaEventDestroy>;
  table.event_record = kForward<cudaEventRecord>;
  table.event_query = kForward<cudaEventQuery>;
  table.mem_info = kForward<cudaMemGetInfo>;
  table.batched_copy = launch_batched_copy;
  table.poison = launch_poison;
  table.range_push = push_range;
  table.range_pop = pop_range;
  fill_sharing(table);
  table.cuda_error = [](CudaCode code) {
    const auto error = static_cast<cudaError_t>(code);
    return std::string(cudaGetErrorName(error)).append(": ").append(cudaGetErrorString(error));
  };
  fill_nccl(table);
  return table;
}

}  // namespace

const GpuApi* linked_gpu_api() {
  // never destroyed: threads and gradients use it while the process ends
  static const auto* const table = new GpuApi(make_table());
  return table;
}

std::string_view gpu_architectures() { return HVD_CUDA_ARCHITECTURES; }

std::string gpu_libraries() {
  int cuda = 0;
  if (cudaRuntimeGetVersion(&cuda) != cudaSuccess)
    return nccl_version() + ", CUDA of unknown version";
  return formatted("{}, CUDA {}.{}", nccl_version(), cuda / 1000, cuda % 1000 / 10);
}

}  // namespace hvd::gpu

#else

namespace hvd::gpu {

const GpuApi* linked_gpu_api() { return nullptr; }
bool nccl_built() { return false; }
std::string_view gpu_architectures() { return {}; }
std::string gpu_libraries() { return "built without CUDA"; }

}  // namespace hvd::gpu

#endif
