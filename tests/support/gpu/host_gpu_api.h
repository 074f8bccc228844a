#pragma once
/// An GpuApi over host memory, for testing what the NCCL backend does with NCCL and CUDA on a
/// machine that has neither. One HostCluster per test; one HostDevice per rank, used by that rank's
/// thread only. Streams are queues whose operations run when an event is asked, in an order that a
/// schedule chooses (host_streams.h), so what is not ordered by stream and events goes wrong here
/// as it would there; and where the data happen to be right, the clocks say so (happens_before.h).
/// Collectives meet in the cluster and really compute. Memory is poison until it is written. Any
/// call can be made to fail, by its name; every handle is counted; misuse is noted.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ops/gpu/api/gpu_api.h"
#include "tests/support/gpu/checks/poisoned_memory.h"
#include "tests/support/gpu/host_comm.h"
#include "tests/support/gpu/host_streams.h"
#include "tests/support/host_cluster.h"

namespace hvd::gpu::test {

class HostDevice {
  HostCluster& cluster_;
  const int index_;
  HostStreams streams_;

 public:
  /// How the device behaves; set before use.
  Schedule& schedule = streams_.schedule;  ///< when operations run
  int& delay = streams_.delay;  ///< an operation lets up to so many queries pass before it runs
  int settle_polls =
      0;  ///< so many polls say InProgress after each NCCL call on a non-blocking communicator
  std::size_t memory_bytes = std::size_t{1} << 40;  ///< what mem_alloc has to give
  std::size_t registration_bytes =
      0;                     ///< what a window or a registration takes of the memory besides
  int nccl_version = 22907;  ///< what ncclGetVersion says
  bool no_windows = false;   ///< NCCL has no use for any: their handles are null
  bool windows_say_in_progress =
      false;                   ///< as NCCL 2.27 says it; 2.28 says Success, and is not done either
  bool ipc = true;             ///< cudaDevAttrIpcEventSupport
  bool multicast = false;      ///< CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
  int capability = 80;         ///< of each device
  int devices = 1;             ///< what cudaGetDeviceCount says
  int async_error_after = -1;  ///< polls of ncclCommGetAsyncError until it reports `async_error`
  NcclCode async_error = NcclCode::RemoteError;
  /// What each byte is where an aborted collective would have written: NaN, unless a test wants
  /// what looks like a result.
  std::uint8_t aborted_byte = 0xff;

  HostDevice(HostCluster& cluster, int index);
  ~HostDevice();
  HostDevice(const HostDevice&) = delete;
  HostDevice& operator=(const HostDevice&) = delete;

  const GpuApi& table() const { return table_; }
  /// As NCCL before 2.27.
  void lack_windows() { table_.window_register = nullptr, table_.window_deregister = nullptr; }

  /// The nth call (from 1) of that name fails, once.
  void fail_call(const std::string& name, int code, int nth = 1) {
    failures_[name] = {code, calls(name) + nth};
  }
  bool fail_pending(const std::string& name) const { return failures_.contains(name); }

  int calls(const std::string& name) const;
  /// The calls that enqueue something, in order: "cudaStreamWaitEvent", "launch_batched_copy",
  /// "ncclAllReduce"...
  std::vector<std::string> enqueued;
  /// Each launch_batched_copy.
  struct Launch {
    std::vector<CopyItem> items;
    DataType from = DataType::Float32;
    DataType to = DataType::Float32;
  };
  std::vector<Launch> launches;
  /// Each collective that goes through `collective`, as it was called.
  std::vector<Contribution> collectives;
  std::vector<std::string> ranges;       ///< what profilers would have shown
  std::vector<std::string> names;        ///< of communicators
  std::vector<std::size_t> allocations;  ///< sizes asked of ncclMemAlloc
  std::map<NcclComm*, int> aborts;       ///< how often each communicator was aborted

  /// Time passes, in which the device goes on by itself.
  void go_on() { streams_.pump(nullptr, 0); }

  std::size_t live_memory() const { return memory_.size(); }
  /// "", or what was made and not let go.
  std::string leaks() const;

  /// An event of the user's, which happens when asked `queries` times for progress; `before` runs
  /// just before that.
  void* user_event(int queries, std::function<void()> before);
  /// One that happens once the gate is open. The gate outlives it.
  void* user_event(const std::atomic<bool>& gate);

  int current_device = 0;  ///< what threads begin with
  int& current();          ///< the calling thread's, as cudaSetDevice has left it
  std::map<std::byte*, std::size_t>
      pinned;              ///< registered host memory: where it begins, and its bytes
  std::set<int> contexts;  ///< the devices on which some call has made a context
  bool users = false;      ///< the calls are the user's own: none of them is left out
  bool capturing =
      false;  ///< somebody captures a CUDA graph, in the mode that all threads' calls can break

 private:
  struct Event;
  using Stream = HostStreams::Stream;
  struct UserEvent;

  /// Counts the call; its injected failure, or Success.
  template <class Code>
  Code enter(const std::string& name);

  void note_side_effects(const std::string& name);
  bool is_current(const std::string& call);
  void look_at_pinned(const void* memory, std::size_t bytes);
  Event* known(CudaEvent* event);
  HostComm* known(NcclComm* comm, const char* call, bool may_be_busy = false);

  bool is_left_out(Omissions::Kind kind, const std::string& call);
  void enqueue(CudaStream* stream, const std::string& call, UseOfMemory use,
               std::function<void()> work);
  void pump(const Event& asked);
  /// One collective of a communicator, or of the open group.
  NcclCode collective(const Contribution& contribution, NcclComm* handle,
                      CudaStream* stream_handle);
  /// One side of a message.
  NcclCode message(const Contribution& contribution, bool sends, int peer, NcclComm* handle,
                   CudaStream* stream_handle);
  NcclCode issue_or_group(HostComm* comm);
  NcclCode end_group();
  NcclCode async_state(HostComm* comm, NcclCode* state);
  NcclCode register_buffer(HostComm* comm, void* memory, std::size_t bytes, void** registration);
  NcclCode register_window(HostComm* comm, void* memory, std::size_t bytes, void** window);
  void* new_registration();
  void put(const HostComm& comm, void* stream, StreamOperation operation);
  [[nodiscard]] std::string name_of(const std::string& call) const;
  NcclCode allocate(void** memory, std::size_t bytes);
  CudaEvent* adopt(std::shared_ptr<HostCluster::SharedEvent> shared);
  bool take_memory(void** memory, std::size_t bytes, const char* call);
  void give_memory(void* memory, const char* call);
  void fill_cuda();
  void fill_kernels();
  void fill_contexts();
  void fill_streams();
  void fill_events();
  void fill_memory();
  void fill_sharing();
  void fill_nccl();
  void fill_registration();
  void fill_collectives();
  void fill_host_memory();

  GpuApi table_;
  std::map<std::thread::id, int> current_;
  std::map<std::thread::id, std::vector<int>> pushed_;  ///< the devices that were current before
  std::map<std::thread::id, CaptureMode> modes_;  ///< those that are not what threads begin with
  std::map<std::string, int> calls_;
  std::map<std::string, std::pair<int, int>> failures_;  ///< code, number of the call
  std::vector<std::unique_ptr<Event>> events_;
  std::size_t user_events_ = 0;
  std::vector<UserEvent> user_;
  std::vector<std::unique_ptr<HostComm>> comms_;  ///< aborted ones too
  std::size_t live_comms_ = 0;
  std::map<void*, PoisonedMemory> memory_;
  std::vector<PoisonedMemory> freed_;  ///< where what comes too late finds poison
  std::set<const void*> host_memory_;
  std::size_t opened_ = 0;  ///< of other ranks' memory
  std::uintptr_t last_registration_ = 0;
  std::set<const HostComm*>
      at_work_;  ///< of which a collective has begun, and waits for other ranks
  int open_ranges_ = 0;
  int group_depth_ = 0;
  std::set<HostComm*> grouped_;
};

}  // namespace hvd::gpu::test
