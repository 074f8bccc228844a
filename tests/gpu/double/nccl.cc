// NCCL among processes: collectives are computed by the rank that comes last
// (tests/support/host_cluster.h), in the memory of all.
#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "tests/gpu/double/streams.h"
#include "tests/support/gpu/host_comm.h"

struct ncclComm : hvd::gpu::test::HostComm {
  using HostComm::HostComm;
  int device = 0;
  bool aborting = false;
};

namespace hvd::gpu::test::cuda {

namespace {

/// Never destroyed.
std::set<ncclComm*>& comms() {
  static auto* const all = new std::set<ncclComm*>;
  return *all;
}

struct OpenGroup {
  int depth = 0;
  std::vector<ncclComm*> comms;
};
OpenGroup& open_group() {
  static thread_local OpenGroup own;
  return own;
}

/// Stands for what the kernels of this process's communicators hold of a GPU until all ranks are
/// there: where those of two may be at work at once, each rank may let another one in first, and
/// all wait (NCCL's guide, "Using multiple NCCL communicators concurrently"). A kernel writes it.
MemoryRange turn_of(int device) {
  static std::map<int, void*> turns;
  void*& turn = turns[device];
  if (turn == nullptr)
    turn = take(device, 1, "the turn of NCCL's kernels of process " + std::to_string(process()));
  return {turn, 1};
}

/// Whether the call may be made; complains of one that may not now.
bool may(ncclComm* comm, const char* call, bool may_be_busy = false) {
  if (!comms().contains(comm)) return false;
  if (comm->aborting) complain(std::string(call) + " while another thread aborts the communicator");
  comm->look_at(call, may_be_busy);
  look_for_errors();
  return true;
}

ncclResult_t issue(ncclComm* comm) {
  return static_cast<ncclResult_t>(comm->issue(static_cast<int>(random_number() % 3)));
}

ncclResult_t issue_or_group(ncclComm* comm) {
  if (open_group().depth == 0) return issue(comm);
  auto& grouped = open_group().comms;
  if (std::find(grouped.begin(), grouped.end(), comm) == grouped.end()) grouped.push_back(comm);
  return ncclSuccess;
}

/// Calls `add_to(stream, name)` if the call is allowed.
template <class Add>
ncclResult_t add(const char* call, ncclComm* comm, cudaStream_t handle, const Add& add_to) {
  const Lock lock;
  if (!may(comm, call)) return ncclInvalidArgument;
  if (enter() != cudaSuccess) return ncclUnhandledCudaError;
  CUstream_st* const stream = known(handle);
  if (stream == nullptr || stream->device != comm->device) return ncclInvalidUsage;
  add_to(stream, call + (" of rank " + std::to_string(comm->rank) + " on " + stream->name));
  return issue_or_group(comm);
}

ncclResult_t collective(const Contribution& part, ncclComm* comm, cudaStream_t stream) {
  return add(part.call.c_str(), comm, stream,
             [&](CUstream_st* on, const std::string& name) { comm->collective(on, part, name); });
}
ncclResult_t message(const Contribution& part, int peer, ncclComm* comm, cudaStream_t stream) {
  return add(part.call.c_str(), comm, stream, [&](CUstream_st* on, const std::string& name) {
    comm->message(on, part, part.receive == nullptr, peer, name);
  });
}

/// Asks again and again, without a Lock.
void wait_until_settled(ncclComm* comm) {
  for (;;) {
    {
      const Lock lock;
      if (comm->poll() == hvd::gpu::NcclCode::Success) return;
    }
    std::this_thread::yield();
  }
}

ncclResult_t forget_place(ncclComm* comm, const void* memory, const char* call) {
  const Lock lock;
  return may(comm, call) && comm->drop_place(memory) ? ncclSuccess : ncclInvalidArgument;
}

NcclType type_of(ncclDataType_t type) { return static_cast<NcclType>(type); }

}  // namespace

}  // namespace hvd::gpu::test::cuda

using namespace hvd::gpu::test;
using namespace hvd::gpu::test::cuda;

HVD_EXPORTED ncclResult_t ncclGetVersion(int* version) {
  // another one's, where a test says so
  const char* const other = std::getenv("HVD_TEST_GPU_NCCL");
  *version = other == nullptr ? NCCL_VERSION_CODE : std::atoi(other);
  return ncclSuccess;
}
HVD_EXPORTED ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const Lock lock;
  const hvd::gpu::NcclUniqueId made = world().cluster.new_id();
  std::memcpy(id, made.bytes.data(), made.bytes.size());
  return ncclSuccess;
}
HVD_EXPORTED const char* ncclGetErrorString(ncclResult_t error) {
  static thread_local std::string text;
  text = "the virtual NCCL's error " + std::to_string(static_cast<int>(error));
  return text.c_str();
}
HVD_EXPORTED const char* ncclGetLastError(ncclComm_t /*comm*/) { return ""; }
HVD_EXPORTED ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id,
                                                 int rank, ncclConfig_t* config) {
  ncclComm* made = nullptr;
  {
    const Lock lock;
    if (enter() != cudaSuccess) return ncclUnhandledCudaError;
    hvd::gpu::NcclUniqueId known_id;
    std::memcpy(known_id.bytes.data(), &id, known_id.bytes.size());
    const HostComm::Device hooks{
        .put =
            [](const HostComm& /*comm*/, void* on, StreamOperation operation) {
              auto& stream = *static_cast<CUstream_st*>(on);
              operation.use.writes.push_back(turn_of(stream.device));
              check_access(stream, operation.use);
              enqueue(stream, std::move(operation));
            },
        .spoil =
            [](const MemoryRange& range) {
              std::memset(to_executor(const_cast<void*>(range.begin)), 0xff, range.bytes);
            },
        .on_host = [](const void* memory) { return to_executor(const_cast<void*>(memory)); }};
    made = new ncclComm(world().cluster, known_id, ranks, rank, config->blocking != 0, hooks);
    made->device = current_device();
    comms().insert(made);
    *comm = made;
    if (!made->blocking) return ncclInProgress;
  }
  wait_until_settled(made);
  return ncclSuccess;
}
HVD_EXPORTED ncclResult_t ncclCommAbort(ncclComm_t comm) {
  {
    const Lock lock;
    if (!may(comm, "ncclCommAbort", true)) return ncclInvalidArgument;
    enter();  // NCCL makes the device current again that was
    comm->aborting = true;
  }
  std::this_thread::yield();
  const Lock lock;
  comm->abort();
  comms().erase(comm);  // and is kept, as streams have it
  look_for_errors();
  return ncclSuccess;
}
HVD_EXPORTED ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  const Speaker speaker(__builtin_return_address(0));
  const Lock lock;
  if (!may(comm, "ncclCommGetAsyncError", true)) return ncclInvalidArgument;
  *state = static_cast<ncclResult_t>(comm->poll());
  return ncclSuccess;
}

// ---- registered memory
HVD_EXPORTED ncclResult_t ncclMemAlloc(void** memory, std::size_t bytes) {
  const Speaker speaker(__builtin_return_address(0));
  const Lock lock;
  if (enter(Capture::Unsafe) != cudaSuccess) return ncclUnhandledCudaError;
  *memory =
      take(current_device(), bytes, "what ncclMemAlloc gave rank " + std::to_string(process()));
  return *memory == nullptr ? ncclUnhandledCudaError : ncclSuccess;
}
HVD_EXPORTED ncclResult_t ncclMemFree(void* memory) {
  const Speaker speaker(__builtin_return_address(0));
  const Lock lock;
  if (enter() != cudaSuccess) return ncclUnhandledCudaError;
  for (const ncclComm* comm : comms())
    if (comm->has_place(memory)) complain("ncclMemFree of registered memory");
  return give(memory, "ncclMemFree on rank " + std::to_string(process())) ? ncclSuccess
                                                                          : ncclInvalidArgument;
}
HVD_EXPORTED ncclResult_t ncclCommRegister(ncclComm_t comm, void* memory, std::size_t bytes,
                                           void** handle) {
  const Lock lock;
  if (!may(comm, "ncclCommRegister") || piece_at(memory) == nullptr) return ncclInvalidArgument;
  comm->add_place(memory, bytes, "buffer", memory);
  *handle = memory;
  return ncclSuccess;
}
HVD_EXPORTED ncclResult_t ncclCommDeregister(ncclComm_t comm, void* handle) {
  return forget_place(comm, handle, "ncclCommDeregister");
}
HVD_EXPORTED ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* memory, std::size_t bytes,
                                                 ncclWindow_t* window, int /*flags*/) {
  {
    const Lock lock;
    if (!may(comm, "ncclCommWindowRegister") || piece_at(memory) == nullptr)
      return ncclInvalidArgument;
    comm->open_window(memory, bytes, [memory, window] {
      *window = reinterpret_cast<ncclWindow_t>(memory);
      return memory;
    });
    if (!comm->blocking) return ncclSuccess;
  }
  wait_until_settled(comm);
  return ncclSuccess;
}
HVD_EXPORTED ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  return forget_place(comm, reinterpret_cast<void*>(window), "ncclCommWindowDeregister");
}

// ---- groups, collectives, messages
HVD_EXPORTED ncclResult_t ncclGroupStart() {
  ++open_group().depth;
  return ncclSuccess;
}
HVD_EXPORTED ncclResult_t ncclGroupEnd() {
  const Speaker speaker(__builtin_return_address(0));
  const Lock lock;
  if (--open_group().depth < 0) complain("ncclGroupEnd without ncclGroupStart");
  if (open_group().depth > 0) return ncclSuccess;
  ncclResult_t result = ncclSuccess;
  for (ncclComm* comm : std::exchange(open_group().comms, {}))
    if (comms().contains(comm) && issue(comm) == ncclInProgress) result = ncclInProgress;
  return result;
}
HVD_EXPORTED ncclResult_t ncclAllReduce(const void* send, void* receive, std::size_t count,
                                        ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                        cudaStream_t stream) {
  const Speaker speaker(__builtin_return_address(0));
  return collective({"ncclAllReduce", send, receive, count, type_of(type), op}, comm, stream);
}
HVD_EXPORTED ncclResult_t ncclBroadcast(const void* send, void* receive, std::size_t count,
                                        ncclDataType_t type, int root, ncclComm_t comm,
                                        cudaStream_t stream) {
  const Speaker speaker(__builtin_return_address(0));
  return collective({"ncclBroadcast", send, receive, count, type_of(type), root}, comm, stream);
}
HVD_EXPORTED ncclResult_t ncclAllGather(const void* send, void* receive, std::size_t count,
                                        ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  const Speaker speaker(__builtin_return_address(0));
  return collective({"ncclAllGather", send, receive, count, type_of(type)}, comm, stream);
}
HVD_EXPORTED ncclResult_t ncclReduce(const void* send, void* receive, std::size_t count,
                                     ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
                                     cudaStream_t stream) {
  const Speaker speaker(__builtin_return_address(0));
  return collective({"ncclReduce", send, receive, count, type_of(type), op, root}, comm, stream);
}
HVD_EXPORTED ncclResult_t ncclReduceScatter(const void* send, void* receive, std::size_t count,
                                            ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                            cudaStream_t stream) {
  const Speaker speaker(__builtin_return_address(0));
  return collective({"ncclReduceScatter", send, receive, count, type_of(type), op}, comm, stream);
}
HVD_EXPORTED ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t type,
                                   int peer, ncclComm_t comm, cudaStream_t stream) {
  const Speaker speaker(__builtin_return_address(0));
  return message({"ncclSend", send, nullptr, count, type_of(type)}, peer, comm, stream);
}
HVD_EXPORTED ncclResult_t ncclRecv(void* receive, std::size_t count, ncclDataType_t type, int peer,
                                   ncclComm_t comm, cudaStream_t stream) {
  const Speaker speaker(__builtin_return_address(0));
  return message({"ncclRecv", nullptr, receive, count, type_of(type)}, peer, comm, stream);
}
