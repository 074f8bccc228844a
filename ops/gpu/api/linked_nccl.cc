// The table of the real libraries: NCCL's half, and what there is instead where this is built with
// CUDA alone.

#include "ops/gpu/api/gpu_api.h"

#ifdef HVD_HAVE_NCCL

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>

#include <cstring>
#include <type_traits>

#include "hvd/base/text.h"

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

template <class T>
T native(T value) {
  return value;
}
cudaStream_t native(CudaStream* stream) { return reinterpret_cast<cudaStream_t>(stream); }
ncclComm_t native(NcclComm* comm) { return reinterpret_cast<ncclComm_t>(comm); }
ncclDataType_t native(NcclType type) { return static_cast<ncclDataType_t>(type); }
ncclRedOp_t native(NcclOp op) { return static_cast<ncclRedOp_t>(op); }

/// The entry that hands its arguments to this call of NCCL's.
template <auto kCall>
constexpr auto kForward =
    [](auto... arguments) { return quietly([&] { return kCall(native(arguments)...); }); };

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

}  // namespace

void fill_nccl(GpuApi& table) {
  table.get_version = [](int* version) { return static_cast<NcclCode>(ncclGetVersion(version)); };
  table.get_unique_id = get_unique_id;
  table.comm_init_rank = init_rank;
  table.comm_abort = kForward<ncclCommAbort>;
  table.comm_get_async_error = [](NcclComm* comm, NcclCode* error) {
    ncclResult_t state = ncclSuccess;
    const NcclCode code = quietly([&] { return ncclCommGetAsyncError(native(comm), &state); });
    *error = static_cast<NcclCode>(state);
    return code;
  };
  table.comm_register = kForward<ncclCommRegister>;
  table.comm_deregister = kForward<ncclCommDeregister>;
  fill_windows(table);
  table.mem_alloc = kForward<ncclMemAlloc>;
  table.mem_free = kForward<ncclMemFree>;
  table.group_start = kForward<ncclGroupStart>;
  table.group_end = kForward<ncclGroupEnd>;
  table.all_reduce = kForward<ncclAllReduce>;
  table.broadcast = kForward<ncclBroadcast>;
  table.all_gather = kForward<ncclAllGather>;
  table.reduce = kForward<ncclReduce>;
  table.reduce_scatter = kForward<ncclReduceScatter>;
  table.send = kForward<ncclSend>;
  table.receive = kForward<ncclRecv>;
  table.nccl_error = describe;
}

bool nccl_built() { return true; }

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "NCCL of unknown version";
  return formatted("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace hvd::gpu

#else

namespace hvd::gpu {

void fill_nccl(GpuApi& table) {
  const auto refuse = [](auto&... entries) {
    ((entries = [](auto&&... /*unused*/) { return NcclCode::InvalidUsage; }), ...);
  };
  refuse(table.get_version, table.get_unique_id, table.comm_init_rank, table.comm_abort,
         table.comm_get_async_error, table.comm_register, table.comm_deregister, table.mem_alloc,
         table.mem_free, table.group_start, table.group_end, table.all_reduce, table.broadcast,
         table.all_gather, table.reduce, table.reduce_scatter, table.send, table.receive);
  table.nccl_error = [](NcclCode /*code*/, NcclComm* /*comm*/) {
    return std::string("built without NCCL");
  };
}

bool nccl_built() { return false; }
std::string nccl_version() { return "built without NCCL"; }

}  // namespace hvd::gpu

#endif
