// The table of the real libraries: NCCL's half, and what there is instead where this is built with
// CUDA alone.

#include "ops/gpu/api/gpu_api.h"

#ifdef HVD_HAVE_NCCL

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ops/kernels/scalar_formats.h"

namespace hvd::gpu {

namespace {

static_assert(static_cast<int>(NcclCode::UnhandledCudaError) == ncclUnhandledCudaError);
static_assert(static_cast<int>(NcclCode::RemoteError) == ncclRemoteError);
static_assert(static_cast<int>(NcclCode::InProgress) == ncclInProgress);
static_assert(static_cast<int>(NcclType::Int8) == ncclInt8 &&
              static_cast<int>(NcclType::Uint8) == ncclUint8);
static_assert(static_cast<int>(NcclType::Int32) == ncclInt32 &&
              static_cast<int>(NcclType::Int64) == ncclInt64);
static_assert(static_cast<int>(NcclType::Float16) == ncclFloat16 &&
              static_cast<int>(NcclType::Bfloat16) == ncclBfloat16);
static_assert(static_cast<int>(NcclType::Float32) == ncclFloat32 &&
              static_cast<int>(NcclType::Float64) == ncclFloat64);
static_assert(static_cast<int>(NcclOp::Sum) == ncclSum &&
              static_cast<int>(NcclOp::Prod) == ncclProd);
static_assert(static_cast<int>(NcclOp::Max) == ncclMax && static_cast<int>(NcclOp::Min) == ncclMin);
static_assert(static_cast<int>(NcclOp::Avg) == ncclAvg);
static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId) &&
              std::is_trivially_copyable_v<NcclUniqueId>);

/// Makes a call of NCCL's. Up to 2.29 it may leave the thread's last CUDA error behind (of what it
/// tries and does without), and LibTorch's next check, of a kernel of the user's, would find it.
/// What was there before is the user's own, and stays.
template <class Call>
NcclCode quietly(const Call& call) {
  const bool clean = cudaPeekAtLastError() == cudaSuccess;
  const ncclResult_t result = call();
  if (clean) static_cast<void>(cudaGetLastError());
  return static_cast<NcclCode>(result);
}
cudaStream_t stream_of(CudaStream* stream) { return reinterpret_cast<cudaStream_t>(stream); }
ncclComm_t native(NcclComm* comm) { return reinterpret_cast<ncclComm_t>(comm); }
ncclDataType_t native(NcclType type) { return static_cast<ncclDataType_t>(type); }
ncclRedOp_t native(NcclOp op) { return static_cast<ncclRedOp_t>(op); }

NcclCode get_unique_id(NcclUniqueId* id) {
  ncclUniqueId made;
  const NcclCode code = quietly([&] { return ncclGetUniqueId(&made); });
  if (code == NcclCode::Success) std::memcpy(id->bytes.data(), made.internal, id->bytes.size());
  return code;
}

NcclCode init_rank(NcclComm** comm, int ranks, const NcclUniqueId& id, int rank, bool blocking,
                   [[maybe_unused]] const char* name) {
  ncclUniqueId native_id;
  std::memcpy(native_id.internal, id.bytes.data(), id.bytes.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = blocking ? 1 : 0;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  config.commName = name;
#endif
  ncclComm_t made = nullptr;
  const NcclCode code =
      quietly([&] { return ncclCommInitRankConfig(&made, ranks, native_id, rank, &config); });
  *comm = reinterpret_cast<NcclComm*>(made);
  return code;
}

std::string describe(NcclCode code, NcclComm* comm) {
  std::string text = ncclGetErrorString(static_cast<ncclResult_t>(code));
  if (const char* last = ncclGetLastError(native(comm)); last != nullptr && *last != '\0')
    text.append("; ").append(last);
  return text;
}

// Windows came with 2.27. They are looked up, as another NCCL may be loaded than the one that this
// was compiled with: in what the program has, and in what this library needs itself, also where it
// is a plugin that nobody else is to see (tests/gpu/plugin_host.cc).
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
void fill_windows(GpuApi& table) {
  const auto make = reinterpret_cast<decltype(&ncclCommWindowRegister)>(
      dlsym(RTLD_DEFAULT, "ncclCommWindowRegister"));
  const auto end = reinterpret_cast<decltype(&ncclCommWindowDeregister)>(
      dlsym(RTLD_DEFAULT, "ncclCommWindowDeregister"));
  if (make == nullptr || end == nullptr) return;
  table.window_register = [make](NcclComm* comm, void* memory, std::size_t bytes, void** window) {
    return quietly([&] {
      return make(native(comm), memory, bytes, reinterpret_cast<ncclWindow_t*>(window),
                  NCCL_WIN_COLL_SYMMETRIC);
    });
  };
  table.window_deregister = [end](NcclComm* comm, void* window) {
    return quietly([&] { return end(native(comm), static_cast<ncclWindow_t>(window)); });
  };
}
#else
void fill_windows(GpuApi& /*table*/) {}
#endif

// As windows; they came with 2.11.
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 11, 0)
union Scalar {
  float as_float;
  double as_double;
  std::uint16_t bits;
};

/// Returns whether NCCL has such an operation of the type. 16-bit numbers have the factor exactly
/// (see reduction_plan.h).
bool store(Scalar* scalar, double factor, NcclType type) {
  switch (type) {
    case NcclType::Float32: scalar->as_float = static_cast<float>(factor); return true;
    case NcclType::Float64: scalar->as_double = factor; return true;
    case NcclType::Float16:
      scalar->bits = kernels::scalar::float_to_half(static_cast<float>(factor));
      return true;
    case NcclType::Bfloat16:
      scalar->bits = kernels::scalar::float_to_bfloat(static_cast<float>(factor));
      return true;
    default: return false;
  }
}

void fill_operations(GpuApi& table) {
  const auto make = reinterpret_cast<decltype(&ncclRedOpCreatePreMulSum)>(
      dlsym(RTLD_DEFAULT, "ncclRedOpCreatePreMulSum"));
  const auto end =
      reinterpret_cast<decltype(&ncclRedOpDestroy)>(dlsym(RTLD_DEFAULT, "ncclRedOpDestroy"));
  if (make == nullptr || end == nullptr) return;
  table.op_create = [make](NcclOp* op, double factor, NcclType type, NcclComm* comm) {
    Scalar scalar{};
    if (!store(&scalar, factor, type)) return NcclCode::InvalidArgument;
    ncclRedOp_t made{};
    const NcclCode code = quietly(
        [&] { return make(&made, &scalar, native(type), ncclScalarHostImmediate, native(comm)); });
    *op = static_cast<NcclOp>(made);
    return code;
  };
  table.op_destroy = [end](NcclOp op, NcclComm* comm) {
    return quietly([&] { return end(native(op), native(comm)); });
  };
}
#else
void fill_operations(GpuApi& /*table*/) {}
#endif

}  // namespace

void fill_nccl(GpuApi& table) {
  table.get_version = [](int* version) { return static_cast<NcclCode>(ncclGetVersion(version)); };
  table.get_unique_id = get_unique_id;
  table.comm_init_rank = init_rank;
  table.comm_abort = [](NcclComm* comm) {
    return quietly([&] { return ncclCommAbort(native(comm)); });
  };
  table.comm_get_async_error = [](NcclComm* comm, NcclCode* error) {
    ncclResult_t state = ncclSuccess;
    const NcclCode code = quietly([&] { return ncclCommGetAsyncError(native(comm), &state); });
    *error = static_cast<NcclCode>(state);
    return code;
  };
  table.comm_register = [](NcclComm* comm, void* memory, std::size_t bytes, void** registration) {
    return quietly([&] { return ncclCommRegister(native(comm), memory, bytes, registration); });
  };
  table.comm_deregister = [](NcclComm* comm, void* registration) {
    return quietly([&] { return ncclCommDeregister(native(comm), registration); });
  };
  fill_windows(table);
  fill_operations(table);
  table.mem_alloc = [](void** memory, std::size_t bytes) {
    return quietly([&] { return ncclMemAlloc(memory, bytes); });
  };
  table.mem_free = [](void* memory) { return quietly([&] { return ncclMemFree(memory); }); };
  table.group_start = [] { return quietly([&] { return ncclGroupStart(); }); };
  table.group_end = [] { return quietly([&] { return ncclGroupEnd(); }); };
  table.all_reduce = [](const void* send, void* receive, std::size_t count, NcclType type,
                        NcclOp op, NcclComm* comm, CudaStream* stream) {
    return quietly([&] {
      return ncclAllReduce(send, receive, count, native(type), native(op), native(comm),
                           stream_of(stream));
    });
  };
  table.broadcast = [](const void* send, void* receive, std::size_t count, NcclType type, int root,
                       NcclComm* comm, CudaStream* stream) {
    return quietly([&] {
      return ncclBroadcast(send, receive, count, native(type), root, native(comm),
                           stream_of(stream));
    });
  };
  table.all_gather = [](const void* send, void* receive, std::size_t count, NcclType type,
                        NcclComm* comm, CudaStream* stream) {
    return quietly([&] {
      return ncclAllGather(send, receive, count, native(type), native(comm), stream_of(stream));
    });
  };
  table.reduce = [](const void* send, void* receive, std::size_t count, NcclType type, NcclOp op,
                    int root, NcclComm* comm, CudaStream* stream) {
    return quietly([&] {
      return ncclReduce(send, receive, count, native(type), native(op), root, native(comm),
                        stream_of(stream));
    });
  };
  table.reduce_scatter = [](const void* send, void* receive, std::size_t count, NcclType type,
                            NcclOp op, NcclComm* comm, CudaStream* stream) {
    return quietly([&] {
      return ncclReduceScatter(send, receive, count, native(type), native(op), native(comm),
                               stream_of(stream));
    });
  };
  table.send = [](const void* send, std::size_t count, NcclType type, int to, NcclComm* comm,
                  CudaStream* stream) {
    return quietly(
        [&] { return ncclSend(send, count, native(type), to, native(comm), stream_of(stream)); });
  };
  table.receive = [](void* receive, std::size_t count, NcclType type, int from, NcclComm* comm,
                     CudaStream* stream) {
    return quietly([&] {
      return ncclRecv(receive, count, native(type), from, native(comm), stream_of(stream));
    });
  };
  table.nccl_error = describe;
}

bool nccl_built() { return true; }

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "NCCL of unknown version";
  const auto text = [](int number) { return std::to_string(number); };
  return "NCCL " + text(version / 10000) + "." + text(version / 100 % 100) + "." +
         text(version % 100);
}

}  // namespace hvd::gpu

#else

namespace hvd::gpu {

namespace {

template <class... Arguments>
void refuse(std::function<NcclCode(Arguments...)>& entry) {
  entry = [](Arguments... /*unused*/) { return NcclCode::InvalidUsage; };
}

template <class... Entries>
void refuse_all(Entries&... entries) {
  (refuse(entries), ...);
}

}  // namespace

void fill_nccl(GpuApi& table) {
  refuse_all(table.get_version, table.get_unique_id, table.comm_init_rank, table.comm_abort,
             table.comm_get_async_error, table.comm_register, table.comm_deregister,
             table.mem_alloc, table.mem_free, table.group_start, table.group_end, table.all_reduce,
             table.broadcast, table.all_gather, table.reduce, table.reduce_scatter, table.send,
             table.receive);
  table.nccl_error = [](NcclCode /*code*/, NcclComm* /*comm*/) {
    return std::string("built without NCCL");
  };
}

bool nccl_built() { return false; }
std::string nccl_version() { return "built without NCCL"; }

}  // namespace hvd::gpu

#endif
