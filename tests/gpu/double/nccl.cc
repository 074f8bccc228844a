// NCCL among processes: collectives are computed by the rank that comes last
// (tests/support/host_cluster.h), in the memory of all.
#include <nccl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "tests/gpu/double/kernels.h"
#include "tests/gpu/double/streams.h"

struct ncclComm {
  using Group = hvd::gpu::test::HostCluster::CommGroup;
  Group* group = nullptr;
  int rank = 0;
  int device = 0;
  bool blocking = true, initialised = false, aborted = false, aborting = false;
  int busy = 0;  ///< so many questions say that it is in progress
  std::uint64_t next = 0, windows = 0;
  std::map<std::pair<int, int>, std::uint64_t> messages;  ///< by sender and receiver
  struct Issued {
    CUstream_st* stream;
    hvd::gpu::test::StreamOperation operation;
    bool is_message;
  };
  std::vector<Issued> issued;  ///< not on their streams before the communicator has settled
  std::map<int, std::pair<ncclDataType_t, double>> operators;
  int last_operator = 100;
  std::map<const std::byte*, std::pair<std::size_t, std::string>> places;  ///< registered memory
  ncclWindow_t* awaited_window = nullptr;
  std::pair<std::byte*, std::size_t> awaited_memory;
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

/// Whether the call may be made; complains otherwise.
bool may(ncclComm* comm, const char* call, bool also_in_progress = false) {
  if (!comms().contains(comm)) return false;
  if (comm->aborting) complain(std::string(call) + " while another thread aborts the communicator");
  if (!also_in_progress &&
      (comm->busy > 0 || !comm->initialised || comm->awaited_window != nullptr))
    complain(std::string(call) + " on a communicator in progress");
  return true;
}

UseOfMemory use_of(const ncclComm& comm, const Contribution& part, const void* send,
                   void* receive) {
  const std::size_t bytes = part.count * bytes_of_type(part.type), ranks = comm.group->ranks;
  const bool is_source = part.call == "ncclBroadcast" && part.extra == comm.rank;
  const bool writes =
      (part.call != "ncclReduce" || part.root == comm.rank) && !(is_source && send == receive);
  UseOfMemory use{.name = text_of(part.call)};
  if (send != nullptr && (part.call != "ncclBroadcast" || is_source))
    use.reads.push_back({send, part.call == "ncclReduceScatter" ? bytes * ranks : bytes});
  if (receive != nullptr && writes)
    use.writes.push_back({receive, part.call == "ncclAllGather" ? bytes * ranks : bytes});
  return use;
}

/// Where an aborted call would have written.
void spoil(const UseOfMemory& use) {
  for (const MemoryRange& range : use.writes)
    std::memset(to_executor(const_cast<void*>(range.begin)), 0xff, range.bytes);
}

StateText place_of(const ncclComm& comm, const void* memory) {
  for (const auto& [begin, place] : comm.places)
    if (memory >= begin && memory < begin + place.first)
      return StateText(place.second + " at " +
                       std::to_string(static_cast<const std::byte*>(memory) - begin));
  return {};
}

/// Messages of one group on one stream travel together; collectives go one after the other.
void put_on_streams(ncclComm* comm) {
  std::map<CUstream_st*, StreamOperation> together;
  for (auto& [stream, operation, is_message] : std::exchange(comm->issued, {})) {
    if (!is_message) {
      enqueue(*stream, std::move(operation));
      continue;
    }
    StreamOperation& all = together[stream];
    all.use.name = operation.use.name;
    all.use.reads.insert(all.use.reads.end(), operation.use.reads.begin(),
                         operation.use.reads.end());
    all.use.writes.insert(all.use.writes.end(), operation.use.writes.begin(),
                          operation.use.writes.end());
    all.run = [before = std::move(all.run), one = std::move(operation.run),
               over = std::array{false, false}](Clock& clock) mutable {
      over[0] = over[0] || !before || before(clock);
      over[1] = over[1] || one(clock);
      return over[0] && over[1];
    };
  }
  for (auto& [stream, operation] : together) enqueue(*stream, std::move(operation));
}

ncclResult_t issue(ncclComm* comm) {
  comm->busy = comm->blocking ? 0 : static_cast<int>(random_number() % 3);
  if (comm->busy > 0) return ncclInProgress;
  put_on_streams(comm);
  return ncclSuccess;
}

ncclResult_t issue_or_group(ncclComm* comm) {
  if (open_group().depth == 0) return issue(comm);
  auto& grouped = open_group().comms;
  if (std::find(grouped.begin(), grouped.end(), comm) == grouped.end()) grouped.push_back(comm);
  return ncclSuccess;
}

ncclResult_t put(ncclComm* comm, cudaStream_t handle, const UseOfMemory& use,
                 std::function<bool(Clock&)> run, bool is_message) {
  CUstream_st* const stream = known(handle);
  if (stream == nullptr || stream->device != comm->device) return ncclInvalidUsage;
  check_access(*stream, use);
  UseOfMemory named = use;
  named.name += " of rank " + std::to_string(comm->rank) + " on " + stream->name;
  comm->issued.push_back({stream, {.use = std::move(named), .run = std::move(run)}, is_message});
  return issue_or_group(comm);
}

ncclResult_t collective(const char* call, const void* send, void* receive, std::size_t count,
                        ncclDataType_t type, int extra, int root, ncclComm* comm,
                        cudaStream_t stream, bool reduces) {
  const Lock lock;
  if (!may(comm, call)) return ncclInvalidArgument;
  if (enter() != cudaSuccess) return ncclUnhandledCudaError;
  Contribution part{StateText(call),
                    to_executor(send),
                    to_executor(receive),
                    count,
                    static_cast<NcclType>(type),
                    extra,
                    root};
  if (reduces && extra > ncclMin + 1) {
    const auto own = comm->operators.find(extra);
    if (own == comm->operators.end() || own->second.first != type) {
      complain("an operation that is not there, or is of another type, in " + std::string(call));
      return ncclInvalidArgument;
    }
    part.extra = ncclSum;
    part.factor = own->second.second;
    part.multiplied = true;
  }
  part.send_place = place_of(*comm, send);
  part.receive_place = place_of(*comm, receive);
  const UseOfMemory use = use_of(*comm, part, send, receive);
  const std::uint64_t number = comm->next++;
  return put(
      comm, stream, use,
      [comm, number, part, use](Clock& clock) {
        HostCluster& cluster = world().cluster;
        if ((comm->aborted || cluster.is_left(*comm->group)) &&
            !cluster.has_met(*comm->group, number)) {
          spoil(use);
          return true;
        }
        return comm->aborted || cluster.meet(*comm->group, number, comm->rank, part, clock);
      },
      false);
}

ncclResult_t message(const char* call, const void* send, void* receive, std::size_t count,
                     ncclDataType_t type, int peer, ncclComm* comm, cudaStream_t stream) {
  const Lock lock;
  if (!may(comm, call)) return ncclInvalidArgument;
  if (enter() != cudaSuccess) return ncclUnhandledCudaError;
  const bool sends = receive == nullptr;
  const std::pair<int, int> ends =
      sends ? std::pair(comm->rank, peer) : std::pair(peer, comm->rank);
  const HostCluster::CommGroup::Way way{ends.first, ends.second, comm->messages[ends]++};
  const Contribution part{StateText(call), to_executor(send), to_executor(receive), count,
                          static_cast<NcclType>(type)};
  const UseOfMemory use = use_of(*comm, part, send, receive);
  return put(
      comm, stream, use,
      [comm, way, sends, part, use](Clock& clock) {
        HostCluster& cluster = world().cluster;
        if ((comm->aborted || cluster.is_left(*comm->group)) &&
            !cluster.has_moved(*comm->group, way)) {
          spoil(use);
          return true;
        }
        return comm->aborted || cluster.transfer(*comm->group, way, sends, part, clock);
      },
      true);
}

void finish_window(ncclComm* comm) {
  const auto [memory, bytes] = comm->awaited_memory;
  comm->places[memory] = {bytes, "window " + std::to_string(comm->windows)};
  *std::exchange(comm->awaited_window, nullptr) = reinterpret_cast<ncclWindow_t>(memory);
}

ncclResult_t forget_place(ncclComm* comm, void* memory, const char* call) {
  const Lock lock;
  if (!may(comm, call)) return ncclInvalidArgument;
  return comm->places.erase(static_cast<std::byte*>(memory)) == 1 ? ncclSuccess
                                                                  : ncclInvalidArgument;
}

double factor_of(const void* scalar, ncclDataType_t type) {
  switch (type) {
    case ncclFloat32: {
      float value;
      std::memcpy(&value, scalar, sizeof value);
      return static_cast<double>(value);
    }
    case ncclFloat64: {
      double value;
      std::memcpy(&value, scalar, sizeof value);
      return value;
    }
    case ncclFloat16: {
      __extension__ _Float16 value;
      std::memcpy(&value, scalar, sizeof value);
      return static_cast<double>(value);
    }
    default: {
      std::uint16_t high;
      std::memcpy(&high, scalar, sizeof high);
      const std::uint32_t bits = std::uint32_t{high} << 16;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      return static_cast<double>(value);
    }
  }
}

}  // namespace

}  // namespace hvd::gpu::test::cuda

using namespace hvd::gpu::test;
using namespace hvd::gpu::test::cuda;

HVD_EXPORTED ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
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
  auto* const made = new ncclComm;
  {
    const Lock lock;
    if (enter() != cudaSuccess) return ncclUnhandledCudaError;
    hvd::gpu::NcclUniqueId known_id;
    std::memcpy(known_id.bytes.data(), &id, known_id.bytes.size());
    made->group = world().cluster.join(known_id, ranks, rank);
    made->rank = rank;
    made->device = current_device();
    made->blocking = config->blocking != 0;
    comms().insert(made);
    *comm = made;
    if (!made->blocking) return ncclInProgress;
  }
  for (;;) {
    {
      const Lock lock;
      made->initialised = world().cluster.complete(*made->group);
      if (made->initialised) return ncclSuccess;
    }
    std::this_thread::yield();
  }
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
  comm->aborted = true;
  comm->issued.clear();
  world().cluster.withdraw(*comm->group, comm->rank);
  comms().erase(comm);  // and is kept, as streams have it
  look_for_errors();
  return ncclSuccess;
}
HVD_EXPORTED ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  const Speaker speaker(__builtin_return_address(0));
  const Lock lock;
  if (!may(comm, "ncclCommGetAsyncError", true)) return ncclInvalidArgument;
  *state = ncclSuccess;
  if (!comm->initialised) {
    comm->initialised = world().cluster.complete(*comm->group);
    if (!comm->initialised) *state = ncclInProgress;
  } else if (comm->awaited_window != nullptr) {
    if (world().cluster.window_complete(*comm->group, comm->windows)) finish_window(comm);
    if (comm->awaited_window != nullptr) *state = ncclInProgress;
  } else if (comm->busy > 0) {
    if (--comm->busy > 0) *state = ncclInProgress;
    if (comm->busy == 0) put_on_streams(comm);
  }
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
  enter();
  for (const ncclComm* comm : comms())
    if (comm->places.contains(static_cast<std::byte*>(memory)))
      complain("ncclMemFree of registered memory");
  return give(memory, "ncclMemFree on rank " + std::to_string(process())) ? ncclSuccess
                                                                          : ncclInvalidArgument;
}
HVD_EXPORTED ncclResult_t ncclCommRegister(ncclComm_t comm, void* memory, std::size_t bytes,
                                           void** handle) {
  const Lock lock;
  if (!may(comm, "ncclCommRegister") || piece_at(memory) == nullptr) return ncclInvalidArgument;
  comm->places[static_cast<std::byte*>(memory)] = {bytes, "buffer"};
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
    world().cluster.open_window(*comm->group, ++comm->windows, comm->rank, bytes);
    comm->awaited_window = window;
    comm->awaited_memory = {static_cast<std::byte*>(memory), bytes};
    if (!comm->blocking) return ncclSuccess;
  }
  for (;;) {
    {
      const Lock lock;
      if (world().cluster.window_complete(*comm->group, comm->windows)) {
        finish_window(comm);
        return ncclSuccess;
      }
    }
    std::this_thread::yield();
  }
}
HVD_EXPORTED ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  return forget_place(comm, reinterpret_cast<void*>(window), "ncclCommWindowDeregister");
}

// ---- operations of one's own
HVD_EXPORTED ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar,
                                                   ncclDataType_t type,
                                                   ncclScalarResidence_t /*place*/,
                                                   ncclComm_t comm) {
  const Lock lock;
  if (!may(comm, "ncclRedOpCreatePreMulSum")) return ncclInvalidArgument;
  comm->operators[++comm->last_operator] = {type, factor_of(scalar, type)};
  *op = static_cast<ncclRedOp_t>(comm->last_operator);
  return ncclSuccess;
}
HVD_EXPORTED ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  const Lock lock;
  if (!may(comm, "ncclRedOpDestroy")) return ncclInvalidArgument;
  return comm->operators.erase(static_cast<int>(op)) == 1 ? ncclSuccess : ncclInvalidArgument;
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
  return collective("ncclAllReduce", send, receive, count, type, static_cast<int>(op), 0, comm,
                    stream, true);
}
HVD_EXPORTED ncclResult_t ncclBroadcast(const void* send, void* receive, std::size_t count,
                                        ncclDataType_t type, int root, ncclComm_t comm,
                                        cudaStream_t stream) {
  const Speaker speaker(__builtin_return_address(0));
  return collective("ncclBroadcast", send, receive, count, type, root, 0, comm, stream, false);
}
HVD_EXPORTED ncclResult_t ncclAllGather(const void* send, void* receive, std::size_t count,
                                        ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  const Speaker speaker(__builtin_return_address(0));
  return collective("ncclAllGather", send, receive, count, type, 0, 0, comm, stream, false);
}
HVD_EXPORTED ncclResult_t ncclReduce(const void* send, void* receive, std::size_t count,
                                     ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
                                     cudaStream_t stream) {
  const Speaker speaker(__builtin_return_address(0));
  return collective("ncclReduce", send, receive, count, type, static_cast<int>(op), root, comm,
                    stream, true);
}
HVD_EXPORTED ncclResult_t ncclReduceScatter(const void* send, void* receive, std::size_t count,
                                            ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                            cudaStream_t stream) {
  const Speaker speaker(__builtin_return_address(0));
  return collective("ncclReduceScatter", send, receive, count, type, static_cast<int>(op), 0, comm,
                    stream, true);
}
HVD_EXPORTED ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t type,
                                   int peer, ncclComm_t comm, cudaStream_t stream) {
  const Speaker speaker(__builtin_return_address(0));
  return message("ncclSend", send, nullptr, count, type, peer, comm, stream);
}
HVD_EXPORTED ncclResult_t ncclRecv(void* receive, std::size_t count, ncclDataType_t type, int peer,
                                   ncclComm_t comm, cudaStream_t stream) {
  const Speaker speaker(__builtin_return_address(0));
  return message("ncclRecv", nullptr, receive, count, type, peer, comm, stream);
}
