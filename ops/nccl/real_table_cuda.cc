// The table of the real libraries. Compiled where CUDA and NCCL are found; its twin is real_table_none.cc.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstring>
#include <type_traits>

#include "ops/nccl/nccl_table.h"

namespace hvd::nccl {

namespace {

static_assert(static_cast<int>(CudaCode::InvalidValue) == cudaErrorInvalidValue);
static_assert(static_cast<int>(CudaCode::OutOfMemory) == cudaErrorMemoryAllocation);
static_assert(static_cast<int>(CudaCode::NotReady) == cudaErrorNotReady);
static_assert(static_cast<int>(NcclCode::UnhandledCudaError) == ncclUnhandledCudaError);
static_assert(static_cast<int>(NcclCode::RemoteError) == ncclRemoteError);
static_assert(static_cast<int>(NcclCode::InProgress) == ncclInProgress);
static_assert(static_cast<int>(NcclType::Int8) == ncclInt8 && static_cast<int>(NcclType::Uint8) == ncclUint8);
static_assert(static_cast<int>(NcclType::Int32) == ncclInt32 && static_cast<int>(NcclType::Int64) == ncclInt64);
static_assert(static_cast<int>(NcclType::Float16) == ncclFloat16 && static_cast<int>(NcclType::Bfloat16) == ncclBfloat16);
static_assert(static_cast<int>(NcclType::Float32) == ncclFloat32 && static_cast<int>(NcclType::Float64) == ncclFloat64);
static_assert(static_cast<int>(NcclOp::Sum) == ncclSum && static_cast<int>(NcclOp::Prod) == ncclProd);
static_assert(static_cast<int>(NcclOp::Max) == ncclMax && static_cast<int>(NcclOp::Min) == ncclMin);
static_assert(static_cast<int>(NcclOp::Avg) == ncclAvg);
static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId) && std::is_trivially_copyable_v<NcclUniqueId>);

CudaCode code_of(cudaError_t error) { return static_cast<CudaCode>(error); }
NcclCode code_of(ncclResult_t result) { return static_cast<NcclCode>(result); }
cudaStream_t native(CudaStream* stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t native(CudaEvent* event) { return reinterpret_cast<cudaEvent_t>(event); }
ncclComm_t native(NcclComm* comm) { return reinterpret_cast<ncclComm_t>(comm); }
ncclDataType_t native(NcclType type) { return static_cast<ncclDataType_t>(type); }
ncclRedOp_t native(NcclOp op) { return static_cast<ncclRedOp_t>(op); }

CudaCode create_stream(CudaStream** stream) {
  int lowest = 0, highest = 0;
  if (const cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest); error != cudaSuccess) return code_of(error);
  cudaStream_t made = nullptr;
  const cudaError_t error = cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, highest);
  *stream = reinterpret_cast<CudaStream*>(made);
  return code_of(error);
}

CudaCode create_event(CudaEvent** event) {
  cudaEvent_t made = nullptr;
  const cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
  *event = reinterpret_cast<CudaEvent*>(made);
  return code_of(error);
}

CudaCode query_event(CudaEvent* event) {
  const cudaError_t error = cudaEventQuery(native(event));
  if (error == cudaErrorNotReady) (void)cudaGetLastError();  // is no error, and must not be found by the user's next check
  return code_of(error);
}

CudaCode create_ipc_event(CudaEvent** event) {
  cudaEvent_t made = nullptr;
  const cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming | cudaEventInterprocess);
  *event = reinterpret_cast<CudaEvent*>(made);
  return code_of(error);
}

CudaCode identify(int device, std::string* id) {
  cudaDeviceProp properties{};
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return code_of(error);
  constexpr char kDigits[] = "0123456789abcdef";
  id->clear();
  for (const char byte : properties.uuid.bytes) {
    const auto value = static_cast<unsigned char>(byte);
    id->push_back(kDigits[value >> 4]);
    id->push_back(kDigits[value & 15]);
  }
  return code_of(error);
}

static_assert(sizeof(IpcHandle) == sizeof(cudaIpcMemHandle_t) && sizeof(IpcHandle) == sizeof(cudaIpcEventHandle_t));

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

void fill_sharing(NcclTable& table) {
  table.shared_reduce = launch_shared_reduce;
  table.device_count = [](int* count) {
    const cudaError_t error = cudaGetDeviceCount(count);
    if (error != cudaSuccess) (void)cudaGetLastError();
    return code_of(error);
  };
  table.device_id = identify;
  table.device_malloc = [](void** memory, std::size_t bytes) {
    const cudaError_t error = cudaMalloc(memory, bytes);
    if (error == cudaErrorMemoryAllocation) (void)cudaGetLastError();  // may be answered by asking for less
    return code_of(error);
  };
  table.device_free = [](void* memory) { return code_of(cudaFree(memory)); };
  table.memcpy_async = [](void* to, const void* from, std::size_t bytes, CudaStream* stream) {
    return code_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, native(stream)));
  };
  table.ipc_get_memory = [](IpcHandle* handle, void* memory) {
    cudaIpcMemHandle_t made{};
    const cudaError_t error = cudaIpcGetMemHandle(&made, memory);
    store(handle, made);
    return code_of(error);
  };
  table.ipc_open_memory = [](void** memory, const IpcHandle& handle) {
    return code_of(cudaIpcOpenMemHandle(memory, native<cudaIpcMemHandle_t>(handle), cudaIpcMemLazyEnablePeerAccess));
  };
  table.ipc_close_memory = [](void* memory) { return code_of(cudaIpcCloseMemHandle(memory)); };
  table.ipc_event_create = create_ipc_event;
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

NcclCode get_unique_id(NcclUniqueId* id) {
  ncclUniqueId made;
  const ncclResult_t result = ncclGetUniqueId(&made);
  if (result == ncclSuccess) std::memcpy(id->bytes.data(), made.internal, id->bytes.size());
  return code_of(result);
}

NcclCode init_rank(NcclComm** comm, int ranks, const NcclUniqueId& id, int rank, bool blocking) {
  ncclUniqueId native_id;
  std::memcpy(native_id.internal, id.bytes.data(), id.bytes.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = blocking ? 1 : 0;
  ncclComm_t made = nullptr;
  const ncclResult_t result = ncclCommInitRankConfig(&made, ranks, native_id, rank, &config);
  *comm = reinterpret_cast<NcclComm*>(made);
  return code_of(result);
}

std::string describe(NcclCode code, NcclComm* comm) {
  std::string text = ncclGetErrorString(static_cast<ncclResult_t>(code));
  if (const char* last = ncclGetLastError(native(comm)); last != nullptr && *last != '\0') text.append("; ").append(last);
  return text;
}

NcclTable make_table() {
  NcclTable table;
  table.get_device = [](int* device) { return code_of(cudaGetDevice(device)); };
  table.set_device = [](int device) { return code_of(cudaSetDevice(device)); };
  table.stream_create = create_stream;
  table.stream_destroy = [](CudaStream* stream) { return code_of(cudaStreamDestroy(native(stream))); };
  table.stream_wait_event = [](CudaStream* stream, CudaEvent* event) {
    return code_of(cudaStreamWaitEvent(native(stream), native(event), 0));
  };
  table.event_create = create_event;
  table.event_destroy = [](CudaEvent* event) { return code_of(cudaEventDestroy(native(event))); };
  table.event_record = [](CudaEvent* event, CudaStream* stream) { return code_of(cudaEventRecord(native(event), native(stream))); };
  table.event_query = query_event;
  table.mem_info = [](std::size_t* free_bytes, std::size_t* total_bytes) { return code_of(cudaMemGetInfo(free_bytes, total_bytes)); };
  table.batched_copy = launch_batched_copy;
  fill_sharing(table);
  table.cuda_error = [](CudaCode code) {
    const auto error = static_cast<cudaError_t>(code);
    return std::string(cudaGetErrorName(error)).append(": ").append(cudaGetErrorString(error));
  };

  table.get_unique_id = get_unique_id;
  table.comm_init_rank = init_rank;
  table.comm_abort = [](NcclComm* comm) { return code_of(ncclCommAbort(native(comm))); };
  table.comm_get_async_error = [](NcclComm* comm, NcclCode* error) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t result = ncclCommGetAsyncError(native(comm), &state);
    *error = code_of(state);
    return code_of(result);
  };
  table.comm_register = [](NcclComm* comm, void* memory, std::size_t bytes, void** registration) {
    return code_of(ncclCommRegister(native(comm), memory, bytes, registration));
  };
  table.comm_deregister = [](NcclComm* comm, void* registration) { return code_of(ncclCommDeregister(native(comm), registration)); };
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  table.window_register = [](NcclComm* comm, void* memory, std::size_t bytes, void** window) {
    return code_of(
        ncclCommWindowRegister(native(comm), memory, bytes, reinterpret_cast<ncclWindow_t*>(window), NCCL_WIN_COLL_SYMMETRIC));
  };
#endif
  table.mem_alloc = [](void** memory, std::size_t bytes) { return code_of(ncclMemAlloc(memory, bytes)); };
  table.mem_free = [](void* memory) { return code_of(ncclMemFree(memory)); };
  table.group_start = [] { return code_of(ncclGroupStart()); };
  table.group_end = [] { return code_of(ncclGroupEnd()); };
  table.all_reduce = [](const void* send, void* receive, std::size_t count, NcclType type, NcclOp op, NcclComm* comm, CudaStream* stream) {
    return code_of(ncclAllReduce(send, receive, count, native(type), native(op), native(comm), native(stream)));
  };
  table.broadcast = [](const void* send, void* receive, std::size_t count, NcclType type, int root, NcclComm* comm, CudaStream* stream) {
    return code_of(ncclBroadcast(send, receive, count, native(type), root, native(comm), native(stream)));
  };
  table.all_gather = [](const void* send, void* receive, std::size_t count, NcclType type, NcclComm* comm, CudaStream* stream) {
    return code_of(ncclAllGather(send, receive, count, native(type), native(comm), native(stream)));
  };
  table.reduce = [](const void* send, void* receive, std::size_t count, NcclType type, NcclOp op, int root, NcclComm* comm,
                    CudaStream* stream) {
    return code_of(ncclReduce(send, receive, count, native(type), native(op), root, native(comm), native(stream)));
  };
  table.reduce_scatter = [](const void* send, void* receive, std::size_t count, NcclType type, NcclOp op, NcclComm* comm,
                            CudaStream* stream) {
    return code_of(ncclReduceScatter(send, receive, count, native(type), native(op), native(comm), native(stream)));
  };
  table.send = [](const void* send, std::size_t count, NcclType type, int to, NcclComm* comm, CudaStream* stream) {
    return code_of(ncclSend(send, count, native(type), to, native(comm), native(stream)));
  };
  table.receive = [](void* receive, std::size_t count, NcclType type, int from, NcclComm* comm, CudaStream* stream) {
    return code_of(ncclRecv(receive, count, native(type), from, native(comm), native(stream)));
  };
  table.nccl_error = describe;
  return table;
}

}  // namespace

const NcclTable* real_nccl_table() {
  static const NcclTable table = make_table();
  return &table;
}

bool nccl_built() { return true; }

std::string nccl_version() {
  int nccl = 0, cuda = 0;
  if (ncclGetVersion(&nccl) != ncclSuccess || cudaRuntimeGetVersion(&cuda) != cudaSuccess) return "NCCL of unknown version";
  const auto text = [](int number) { return std::to_string(number); };
  return "NCCL " + text(nccl / 10000) + "." + text(nccl / 100 % 100) + "." + text(nccl % 100) + ", CUDA " + text(cuda / 1000) + "." +
         text(cuda % 1000 / 10);
}

}  // namespace hvd::nccl
