#include "tests/support/gpu/host_gpu_api.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>
#include <type_traits>

#include "ops/gpu/kernels/poison_kernel.h"
#include "tests/support/gpu/host_kernels.h"

namespace hvd::gpu::test {

struct HostDevice::Event {
  bool imported = false;      ///< from another rank
  bool interprocess = false;  ///< other ranks may see it
  int device = 0;             ///< that was current when it was made
  std::shared_ptr<HostCluster::SharedEvent> shared = std::make_shared<HostCluster::SharedEvent>();
};

struct HostDevice::UserEvent {
  Event* event;
  int queries;
  std::function<void()> before;
  const std::atomic<bool>* gate = nullptr;
};

namespace {
UseOfMemory use_of(const CopyJob& job) {
  UseOfMemory use{.reads_results = true};
  for (const CopyItem& item : job.items) {
    const auto count = static_cast<std::size_t>(std::max<std::int64_t>(item.count, 0));
    use.reads.push_back({item.src, count * element_bytes(job.from)});
    use.writes.push_back({item.dst, count * element_bytes(job.to)});
  }
  return use;
}

UseOfMemory use_of(const ReduceJob& job) {
  UseOfMemory use;
  const auto ins = static_cast<std::size_t>(job.ins), outs = static_cast<std::size_t>(job.outs);
  for (std::size_t item = 0; item < job.counts.size(); ++item) {
    const std::size_t bytes =
        static_cast<std::size_t>(std::max<std::int64_t>(job.counts[item], 0)) *
        element_bytes(job.dtype);
    for (const void* input : job.inputs.subspan(item * ins, ins))
      use.reads.push_back({input, bytes});
    for (const void* output : job.outputs.subspan(item * outs, outs))
      use.writes.push_back({output, bytes});
  }
  return use;
}
}  // namespace

HostDevice::HostDevice(HostCluster& cluster, int index)
    : cluster_(cluster), index_(index), streams_(cluster.order(), index) {
  fill_cuda();
  fill_nccl();
  cluster_.order().watch(&at_work_, 1, "the order of NCCL's work on rank " + std::to_string(index));
}

HostDevice::~HostDevice() {
  for (const void* memory : host_memory_)
    ::operator delete(const_cast<void*>(memory), std::align_val_t(4096));
}

int HostDevice::calls(const std::string& name) const {
  const auto found = calls_.find(name);
  return found == calls_.end() ? 0 : found->second;
}

std::string HostDevice::leaks() const {
  std::string text;
  const auto count = [&](const char* what, std::size_t number) {
    if (number != 0) text += std::to_string(number) + " " + what + " ";
  };
  count("streams", streams_.size());
  count("events", events_.size() - user_events_);
  count("communicators", live_comms_);
  count("pieces of memory", memory_.size());
  count("pieces of pinned host memory", host_memory_.size());
  count("opened pieces of memory", opened_);
  for (const auto& comm : comms_)
    if (!comm->is_aborted()) count("registrations", comm->places());
  count("capture modes", modes_.size());
  count("pieces of registered host memory", pinned.size());
  for (const auto& [thread, before] : pushed_) count("pushed contexts", before.size());
  count("open groups", static_cast<std::size_t>(group_depth_));
  count("open ranges", static_cast<std::size_t>(open_ranges_));
  return text;
}

void* HostDevice::user_event(int queries, std::function<void()> before) {
  auto& event = *events_.emplace_back(std::make_unique<Event>());
  event.shared->recorded = 1;
  ++user_events_;
  user_.push_back({&event, queries, std::move(before)});
  return &event;
}

void* HostDevice::user_event(const std::atomic<bool>& gate) {
  void* event = user_event(0, {});
  user_.back().gate = &gate;
  return event;
}

int& HostDevice::current() {
  return current_.try_emplace(std::this_thread::get_id(), current_device).first->second;
}

/// A call that works on a device makes a context on the one that is current; some calls break the
/// capture of a graph.
void HostDevice::note_side_effects(const std::string& name) {
  static const std::set<std::string> harmless{
      "cudaGetDevice",           "cudaSetDevice",          "cudaGetDeviceCount",
      "cudaGetDeviceProperties", "cudaDeviceGetAttribute", "cuDevicePrimaryCtxGetState",
      "cuCtxPushCurrent",        "cuCtxPopCurrent",        "cuDeviceGetAttribute"};
  static const std::set<std::string> unsafe{
      "cudaEventQuery",   "cudaMalloc",         "cudaFree",      "ncclMemAlloc", "ncclMemFree",
      "cudaHostRegister", "cudaHostUnregister", "cudaHostAlloc", "cudaFreeHost"};
  if (!harmless.contains(name)) contexts.insert(current());
  if (capturing && unsafe.contains(name) &&
      modes_[std::this_thread::get_id()] != CaptureMode::Relaxed)
    cluster_.note(name + " breaks the capture of a graph");
}

template <class Code>
Code HostDevice::enter(const std::string& name) {
  if (std::is_same_v<Code, CudaCode> || name.starts_with("ncclMem")) note_side_effects(name);
  const int number = ++calls_[name];
  const auto failure = failures_.find(name);
  if (failure == failures_.end() || failure->second.second != number) return Code::Success;
  const auto code = static_cast<Code>(failure->second.first);
  failures_.erase(failure);
  return code;
}

/// CUDA refuses what belongs to a device while another one is current.
bool HostDevice::is_current(const std::string& call) {
  if (current() == index_) return true;
  cluster_.note(call + " while another device is current");
  return false;
}

HostDevice::Event* HostDevice::known(CudaEvent* event) {
  for (auto& owned : events_) {
    if (owned.get() == reinterpret_cast<Event*>(event)) return owned.get();
  }
  throw std::logic_error("unknown event");
}

HostComm* HostDevice::known(NcclComm* comm, const char* call, bool may_be_busy) {
  for (auto& owned : comms_) {
    if (owned.get() != reinterpret_cast<HostComm*>(comm)) continue;
    owned->look_at(call, may_be_busy);
    return owned.get();
  }
  throw std::logic_error("unknown communicator");
}

/// Whether the test leaves this call out.
bool HostDevice::is_left_out(Omissions::Kind kind, const std::string& call) {
  if (users) return false;
  const std::string after = enqueued.empty() ? "nothing" : enqueued.back();
  return cluster_.omissions().happens(kind, index_,
                                      call + " " + std::to_string(calls(call)) + " on rank " +
                                          std::to_string(index_) + ", after " + after +
                                          (open_ranges_ > 0 ? ", in " + ranges.back() : ""));
}

/// Puts work that waits for nobody on the stream.
void HostDevice::enqueue(CudaStream* handle, const std::string& call, UseOfMemory use,
                         std::function<void()> work) {
  Stream* const stream = streams_.known(handle);
  use.name = call + " " + std::to_string(calls(call)) + " on " + streams_.name_of(stream) +
             (open_ranges_ > 0 ? " (" + ranges.back() + ")" : "");
  streams_.enqueue(stream, {.use = std::move(use), .run = [work = std::move(work)](Clock&) {
                              work();
                              return true;
                            }});
}

void HostDevice::pump(const Event& asked) {
  for (auto& user : user_) {
    if (user.event->shared->happened == 0 &&
        (user.gate != nullptr ? user.gate->load() : user.queries-- <= 0)) {
      if (user.before) user.before();
      user.event->shared->happen(1, cluster_.order().now());
    }
  }
  streams_.pump(asked.shared, asked.shared->recorded.load());
}

/// For messages of errors.
std::string HostDevice::name_of(const std::string& call) const {
  return call + " " + std::to_string(calls(call)) + " on rank " + std::to_string(index_) +
         (open_ranges_ > 0 ? " (" + ranges.back() + ")" : "");
}

NcclCode HostDevice::collective(const Contribution& contribution, NcclComm* handle,
                                CudaStream* stream_handle) {
  HostComm* comm = known(handle, contribution.call.c_str());
  const std::string call = text_of(contribution.call);
  const NcclCode code = enter<NcclCode>(call);
  if (code != NcclCode::Success) return code;
  enqueued.push_back(call);
  collectives.push_back(
      comm->collective(streams_.known(stream_handle), contribution, name_of(call)));
  return issue_or_group(comm);
}

NcclCode HostDevice::message(const Contribution& contribution, bool sends, int peer,
                             NcclComm* handle, CudaStream* stream_handle) {
  HostComm* comm = known(handle, contribution.call.c_str());
  const std::string call = text_of(contribution.call);
  const NcclCode code = enter<NcclCode>(call);
  if (code != NcclCode::Success) return code;
  enqueued.push_back(call);
  comm->message(streams_.known(stream_handle), contribution, sends, peer, name_of(call));
  return issue_or_group(comm);
}

/// NCCL wants the work of several communicators in an order.
void HostDevice::put(const HostComm& comm, void* stream, StreamOperation operation) {
  operation.use.writes.push_back({&at_work_, 1});
  operation.run = [this, own = &comm, run = std::move(operation.run)](Clock& clock) {
    const auto is_another = [&](const HostComm* one) { return one != own && !one->is_aborted(); };
    if (at_work_.insert(own).second && std::any_of(at_work_.begin(), at_work_.end(), is_another))
      cluster_.note("communicators at work at the same time, in no order");
    const bool over = run(clock);
    if (over) at_work_.erase(own);
    return over;
  };
  streams_.enqueue(static_cast<Stream*>(stream), std::move(operation));
}

NcclCode HostDevice::issue_or_group(HostComm* comm) {
  if (group_depth_ == 0) return comm->issue(settle_polls);
  grouped_.insert(comm);
  return NcclCode::Success;
}

NcclCode HostDevice::end_group() {
  if (--group_depth_ < 0) cluster_.note("ncclGroupEnd without ncclGroupStart");
  NcclCode code = enter<NcclCode>("ncclGroupEnd");
  for (HostComm* comm : std::exchange(grouped_, {})) {
    if (code != NcclCode::Success && code != NcclCode::InProgress) continue;
    if (!comm->is_aborted() && comm->issue(settle_polls) == NcclCode::InProgress)
      code = NcclCode::InProgress;
  }
  return code;
}

NcclCode HostDevice::async_state(HostComm* comm, NcclCode* state) {
  const NcclCode code = enter<NcclCode>("ncclCommGetAsyncError");
  if (code != NcclCode::Success) return code;
  const bool counts = comm->is_settled();
  *state = comm->poll();
  if (counts && async_error_after >= 0 && async_error_after-- == 0 && *state == NcclCode::Success)
    *state = async_error;
  return code;
}

NcclCode HostDevice::register_buffer(HostComm* comm, void* memory, std::size_t bytes,
                                     void** registration) {
  const NcclCode code = enter<NcclCode>("ncclCommRegister");
  if (code != NcclCode::Success) return code;
  if (!memory_.contains(memory) || memory_.at(memory).bytes() != bytes)
    cluster_.note("ncclCommRegister of memory that is not from ncclMemAlloc");
  *registration = new_registration();
  comm->add_place(memory, bytes, "buffer", *registration);
  return code;
}

NcclCode HostDevice::register_window(HostComm* comm, void* memory, std::size_t bytes,
                                     void** window) {
  const NcclCode code = enter<NcclCode>("ncclCommWindowRegister");
  if (code != NcclCode::Success) return code;
  if (!memory_.contains(memory) || memory_.at(memory).bytes() != bytes)
    cluster_.note("ncclCommWindowRegister of memory that is not from ncclMemAlloc");
  comm->open_window(memory, bytes, [this, window]() -> void* {
    return no_windows ? nullptr : *window = new_registration();
  });
  if (!comm->blocking) return windows_say_in_progress ? NcclCode::InProgress : NcclCode::Success;
  comm->wait_until_settled();
  return code;
}

void* HostDevice::new_registration() {
  memory_bytes -= registration_bytes;
  return reinterpret_cast<void*>(++last_registration_);
}

NcclCode HostDevice::allocate(void** memory, std::size_t bytes) {
  allocations.push_back(bytes);
  const NcclCode code = enter<NcclCode>("ncclMemAlloc");
  if (code != NcclCode::Success) return code;
  if (!is_current("ncclMemAlloc")) return NcclCode::UnhandledCudaError;
  return take_memory(memory, bytes, "ncclMemAlloc") ? code : NcclCode::UnhandledCudaError;
}

void HostDevice::fill_cuda() {
  table_.get_device = [this](int* device) {
    *device = current();
    return enter<CudaCode>("cudaGetDevice");
  };
  table_.set_device = [this](int device) {
    const CudaCode code = enter<CudaCode>("cudaSetDevice");
    if (code != CudaCode::Success) return code;
    if (is_left_out(Omissions::Kind::Device, "cudaSetDevice")) return code;
    current() = device;
    contexts.insert(device);  // since CUDA 12
    return code;
  };
  table_.has_context = [this](int device, bool* exists) {
    *exists = contexts.contains(device);
    return enter<CudaCode>("cuDevicePrimaryCtxGetState");
  };
  table_.exchange_capture_mode = [this](CaptureMode* mode) {
    const CudaCode code = enter<CudaCode>("cudaThreadExchangeStreamCaptureMode");
    if (code != CudaCode::Success) return code;
    if (is_left_out(Omissions::Kind::Capture, "cudaThreadExchangeStreamCaptureMode")) return code;
    const auto own = modes_.try_emplace(std::this_thread::get_id(), CaptureMode::Global).first;
    std::swap(own->second, *mode);
    if (own->second == CaptureMode::Global) modes_.erase(own);
    return code;
  };
  table_.mem_info = [this](std::size_t* free_bytes, std::size_t* total_bytes) {
    *free_bytes = memory_bytes;
    *total_bytes = std::size_t{8} << 30;
    if (current() != index_) cluster_.note("cudaMemGetInfo of the wrong device");
    return enter<CudaCode>("cudaMemGetInfo");
  };
  fill_kernels();
  table_.range_push = [this](const char* text) {
    ranges.emplace_back(text);
    ++open_ranges_;
  };
  table_.range_pop = [this] { --open_ranges_; };
  fill_contexts();
  fill_streams();
  fill_events();
  fill_memory();
  fill_sharing();
  fill_host_memory();
  table_.cuda_error = [](CudaCode code) {
    return "host CUDA says " + std::to_string(static_cast<int>(code));
  };
}

void HostDevice::fill_kernels() {
  table_.batched_copy = [this](const CopyJob& job, CudaStream* stream) {
    const CudaCode code = enter<CudaCode>("launch_batched_copy");
    if (code != CudaCode::Success) return code;
    if (!is_current("launch_batched_copy")) return CudaCode::InvalidValue;
    if (!copy_supported(job)) return CudaCode::InvalidValue;
    enqueued.emplace_back("launch_batched_copy");
    launches.push_back({{job.items.begin(), job.items.end()}, job.from, job.to});
    enqueue(stream, "launch_batched_copy", use_of(job),
            [job, items = std::vector<CopyItem>(job.items.begin(), job.items.end())] {
              CopyJob kept = job;
              kept.items = items;
              copy_on_host(kept);
            });
    return code;
  };
  table_.poison = [this](const PoisonJob& job, CudaStream* stream) {
    const CudaCode code = enter<CudaCode>("launch_poison");
    if (code != CudaCode::Success) return code;
    if (!is_current("launch_poison")) return CudaCode::InvalidValue;
    enqueued.emplace_back("launch_poison");
    const bool is_pinned = std::any_of(pinned.begin(), pinned.end(), [&](const auto& piece) {
      return piece.first == static_cast<const void*>(job.mark);
    });
    if (!host_memory_.contains(job.mark) && !is_pinned)
      cluster_.note("launch_poison with a mark that the device does not see");
    UseOfMemory use;
    for (const PoisonItem& item : job.items) use.writes.push_back({item.begin, item.bytes});
    return poison::in_launches(job, [&](const poison::Table& table, int blocks) {
      enqueue(
          stream, "launch_poison", use,
          [table, mark = job.mark, threads = static_cast<std::size_t>(blocks) * poison::kThreads] {
            if (std::atomic_ref(*const_cast<std::uint32_t*>(mark)).load() == 0) return;
            for (std::size_t thread = 0; thread < threads; ++thread)
              poison::fill(table, thread, threads);
          });
      return code;
    });
  };
  table_.shared_reduce = [this](const ReduceJob& job, CudaStream* stream) {
    const CudaCode code = enter<CudaCode>("launch_shared_reduce");
    if (code != CudaCode::Success) return code;
    if (!is_current("launch_shared_reduce")) return CudaCode::InvalidValue;
    enqueued.emplace_back("launch_shared_reduce");
    enqueue(stream, "launch_shared_reduce", use_of(job),
            [job, inputs = std::vector(job.inputs.begin(), job.inputs.end()),
             outputs = std::vector(job.outputs.begin(), job.outputs.end()),
             counts = std::vector(job.counts.begin(), job.counts.end())] {
              ReduceJob kept = job;
              kept.inputs = inputs;
              kept.outputs = outputs;
              kept.counts = counts;
              reduce_job_on_host(kept);
            });
    return code;
  };
}

void HostDevice::fill_contexts() {
  table_.push_device = [this](int device) {
    const CudaCode code = enter<CudaCode>("cuCtxPushCurrent");
    if (code != CudaCode::Success) return code;
    pushed_[std::this_thread::get_id()].push_back(current());
    if (is_left_out(Omissions::Kind::Device, "cuCtxPushCurrent")) return code;
    current() = device;
    contexts.insert(device);
    return code;
  };
  table_.pop_device = [this] {
    auto& before = pushed_[std::this_thread::get_id()];
    if (before.empty()) throw std::logic_error("nothing was pushed");
    current() = before.back();
    before.pop_back();
    return enter<CudaCode>("cuCtxPopCurrent");
  };
}

void HostDevice::fill_streams() {
  table_.stream_create = [this](CudaStream** stream) {
    const CudaCode code = enter<CudaCode>("cudaStreamCreateWithPriority");
    if (current() != index_) cluster_.note("a stream on the wrong device");
    if (code == CudaCode::Success) *stream = reinterpret_cast<CudaStream*>(streams_.create());
    return code;
  };
  table_.stream_destroy = [this](CudaStream* stream) {
    Stream* found = streams_.known(stream);
    if (!streams_.is_idle(found)) cluster_.note("a stream destroyed with work pending");
    streams_.destroy(found);
    return enter<CudaCode>("cudaStreamDestroy");
  };
  table_.stream_wait_event = [this](CudaStream* stream, CudaEvent* event) {
    const CudaCode code = enter<CudaCode>("cudaStreamWaitEvent");
    if (code != CudaCode::Success) return code;
    if (is_left_out(Omissions::Kind::Wait, "cudaStreamWaitEvent")) return code;
    enqueued.emplace_back("cudaStreamWaitEvent");
    streams_.enqueue(streams_.known(stream), waiting_for(known(event)->shared));
    return code;
  };
}

void HostDevice::fill_events() {
  table_.event_create = [this](CudaEvent** event) {
    const CudaCode code = enter<CudaCode>("cudaEventCreateWithFlags");
    if (code != CudaCode::Success) return code;
    Event* const made = events_.emplace_back(std::make_unique<Event>()).get();
    made->device = current();
    *event = reinterpret_cast<CudaEvent*>(made);
    return code;
  };
  table_.event_destroy = [this](CudaEvent* event) {
    Event* found = known(event);
    if (found->imported) {
      --found->shared->open;
    } else if (found->shared->open.load() > 0) {
      cluster_.note("cudaEventDestroy of an event that another rank has open");
    }
    std::erase_if(events_, [&](const auto& owned) { return owned.get() == found; });
    return enter<CudaCode>("cudaEventDestroy");
  };
  table_.event_record = [this](CudaEvent* event, CudaStream* stream) {
    const CudaCode code = enter<CudaCode>("cudaEventRecord");
    if (code != CudaCode::Success) return code;
    if (!is_current("cudaEventRecord")) return CudaCode::InvalidValue;
    if (is_left_out(Omissions::Kind::Record, "cudaEventRecord")) return code;
    enqueued.emplace_back("cudaEventRecord");
    Event* const found = known(event);
    if (found->device != index_) {
      cluster_.note("cudaEventRecord of another device's event");
      return CudaCode::InvalidValue;
    }
    streams_.enqueue(streams_.known(stream), recording_of(found->shared));
    return code;
  };
  table_.event_query = [this](CudaEvent* event) {
    const CudaCode code = enter<CudaCode>("cudaEventQuery");
    if (code != CudaCode::Success) return code;
    const Event& asked = *known(event);
    pump(asked);
    const std::uint64_t turn = asked.shared->recorded.load();
    if (asked.shared->happened.load() < turn) return CudaCode::NotReady;
    cluster_.order().learn(asked.shared->clock_of(turn));
    return CudaCode::Success;
  };
}

void HostDevice::fill_memory() {
  table_.device_count = [this](int* count) {
    *count = devices;
    return enter<CudaCode>("cudaGetDeviceCount");
  };
  table_.device_id = [this](int device, std::string* id) {
    *id = "host GPU " + std::to_string(device);
    return enter<CudaCode>("cudaGetDeviceProperties");
  };
  table_.ipc_supported = [this](int, bool* supported) {
    *supported = ipc;
    return enter<CudaCode>("cudaDeviceGetAttribute");
  };
  table_.capability = [this](int, int* number) {
    *number = capability;
    return enter<CudaCode>("cudaDeviceGetAttribute");
  };
  table_.multicast_supported = [this](int, bool* supported) {
    *supported = multicast;
    return enter<CudaCode>("cuDeviceGetAttribute");
  };
  table_.device_malloc = [this](void** memory, std::size_t bytes) {
    allocations.push_back(bytes);
    const CudaCode code = enter<CudaCode>("cudaMalloc");
    if (code != CudaCode::Success) return code;
    if (!is_current("cudaMalloc")) return CudaCode::InvalidValue;
    return take_memory(memory, bytes, "cudaMalloc") ? code : CudaCode::OutOfMemory;
  };
  table_.device_free = [this](void* memory) {
    if (cluster_.is_open(memory)) cluster_.note("cudaFree of memory that another rank has open");
    give_memory(memory, "cudaFree");
    return enter<CudaCode>("cudaFree");
  };
  table_.memcpy_async = [this](void* to, const void* from, std::size_t bytes, CudaStream* stream) {
    const CudaCode code = enter<CudaCode>("cudaMemcpyAsync");
    if (code != CudaCode::Success) return code;
    enqueued.emplace_back("cudaMemcpyAsync");
    look_at_pinned(to, bytes);
    look_at_pinned(from, bytes);
    enqueue(stream, "cudaMemcpyAsync",
            {.reads = {{from, bytes}}, .writes = {{to, bytes}}, .reads_results = true},
            [=] { std::memcpy(to, from, bytes); });
    return code;
  };
}

/// CUDA refuses a copy of memory that is registered in part.
void HostDevice::look_at_pinned(const void* memory, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(memory);
  for (const auto& [at, size] : pinned) {
    const bool touches = begin < at + size && at < begin + bytes;
    if (touches && (begin < at || begin + bytes > at + size))
      cluster_.note("cudaMemcpyAsync of memory that is registered in part");
  }
}

void HostDevice::fill_host_memory() {
  table_.host_malloc = [this](void** memory, std::size_t bytes) {
    const CudaCode code = enter<CudaCode>("cudaHostAlloc");
    if (code != CudaCode::Success) return code;
    *memory = ::operator new(bytes, std::align_val_t(4096));
    std::memset(*memory, 0, bytes);
    host_memory_.insert(*memory);
    return code;
  };
  table_.host_free = [this](void* memory) {
    if (host_memory_.erase(memory) != 1) {
      cluster_.note("cudaFreeHost of something unknown");
    } else {
      ::operator delete(memory, std::align_val_t(4096));
    }
    return enter<CudaCode>("cudaFreeHost");
  };
  table_.host_register = [this](void* memory, std::size_t bytes) {
    const CudaCode code = enter<CudaCode>("cudaHostRegister");
    if (code != CudaCode::Success) return code;
    auto* const begin = static_cast<std::byte*>(memory);
    for (const auto& [at, size] : pinned)
      if (begin < at + size && at < begin + bytes)
        cluster_.note("cudaHostRegister of memory that is registered");
    pinned[begin] = bytes;
    cluster_.order().watch(begin, bytes,
                           "host memory that rank " + std::to_string(index_) + " has registered");
    return code;
  };
  table_.host_unregister = [this](void* memory) {
    if (pinned.erase(static_cast<std::byte*>(memory)) != 1)
      cluster_.note("cudaHostUnregister of something unknown");
    cluster_.order().free(memory, "cudaHostUnregister on rank " + std::to_string(index_));
    cluster_.order().forget(memory);
    return enter<CudaCode>("cudaHostUnregister");
  };
  table_.host_device_pointer = [this](void** address, void* memory) {
    if (!pinned.contains(static_cast<std::byte*>(memory)))
      cluster_.note("cudaHostGetDevicePointer of something unknown");
    *address = memory;
    return enter<CudaCode>("cudaHostGetDevicePointer");
  };
}

void HostDevice::fill_sharing() {
  table_.ipc_get_memory = [this](IpcHandle* handle, void* memory) {
    const CudaCode code = enter<CudaCode>("cudaIpcGetMemHandle");
    if (!memory_.contains(memory))
      cluster_.note("cudaIpcGetMemHandle of memory that is not from cudaMalloc");
    if (code == CudaCode::Success) *handle = cluster_.publish(index_, memory);
    return code;
  };
  table_.ipc_open_memory = [this](void** memory, const IpcHandle& handle) {
    const CudaCode code = enter<CudaCode>("cudaIpcOpenMemHandle");
    if (code != CudaCode::Success) return code;
    const auto found = cluster_.published(handle);
    if (found.memory == nullptr || found.owner == index_) return CudaCode::InvalidValue;
    *memory = found.memory;
    cluster_.opened(found.memory, 1);
    ++opened_;
    return code;
  };
  table_.ipc_close_memory = [this](void* memory) {
    cluster_.opened(memory, -1);
    --opened_;
    return enter<CudaCode>("cudaIpcCloseMemHandle");
  };
  table_.ipc_event_create = [this](CudaEvent** event) {
    const CudaCode code = enter<CudaCode>("cudaEventCreateWithFlags");
    if (code != CudaCode::Success) return code;
    *event = adopt(std::make_shared<HostCluster::SharedEvent>());
    reinterpret_cast<Event*>(*event)->interprocess = true;
    return code;
  };
  table_.ipc_get_event = [this](IpcHandle* handle, CudaEvent* event) {
    const CudaCode code = enter<CudaCode>("cudaIpcGetEventHandle");
    Event* found = known(event);
    if (!found->interprocess)
      cluster_.note("cudaIpcGetEventHandle of an event that is not for other processes");
    if (code == CudaCode::Success) *handle = cluster_.publish(index_, found->shared);
    return code;
  };
  table_.ipc_open_event = [this](CudaEvent** event, const IpcHandle& handle) {
    const CudaCode code = enter<CudaCode>("cudaIpcOpenEventHandle");
    if (code != CudaCode::Success) return code;
    const auto found = cluster_.published(handle);
    if (found.event == nullptr || found.owner == index_) return CudaCode::InvalidValue;
    *event = adopt(found.event);
    reinterpret_cast<Event*>(*event)->imported = true;
    ++found.event->open;
    return code;
  };
}

CudaEvent* HostDevice::adopt(std::shared_ptr<HostCluster::SharedEvent> shared) {
  auto& made = *events_.emplace_back(std::make_unique<Event>());
  made.shared = std::move(shared);
  made.device = current();
  return reinterpret_cast<CudaEvent*>(&made);
}

bool HostDevice::take_memory(void** memory, std::size_t bytes, const char* call) {
  if (bytes > memory_bytes) return false;
  memory_bytes -= bytes;
  PoisonedMemory made(bytes);
  *memory = made.data();
  memory_.emplace(*memory, std::move(made));
  cluster_.order().watch(*memory, bytes,
                         "what " + std::string(call) + " " + std::to_string(calls(call)) +
                             " on rank " + std::to_string(index_) + " gave");
  return true;
}

void HostDevice::give_memory(void* memory, const char* call) {
  for (auto& comm : comms_)
    if (!comm->is_aborted() && comm->has_place(memory))
      cluster_.note(std::string(call) + " of registered memory");
  const auto found = memory_.find(memory);
  if (found == memory_.end()) return cluster_.note(std::string(call) + " of something unknown");
  memory_bytes += found->second.bytes();
  cluster_.order().free(memory, std::string(call) + " on rank " + std::to_string(index_));
  found->second.poison();
  freed_.push_back(std::move(found->second));
  memory_.erase(found);
}

void HostDevice::fill_nccl() {
  table_.get_version = [this](int* version) {
    *version = nccl_version;
    return enter<NcclCode>("ncclGetVersion");
  };
  table_.get_unique_id = [this](NcclUniqueId* id) {
    const NcclCode code = enter<NcclCode>("ncclGetUniqueId");
    if (code == NcclCode::Success) *id = cluster_.new_id();
    return code;
  };
  table_.comm_init_rank = [this](NcclComm** comm, int ranks, const NcclUniqueId& id, int rank,
                                 bool blocking, const char* name) {
    const NcclCode code = enter<NcclCode>("ncclCommInitRankConfig");
    if (code != NcclCode::Success) return code;
    if (current() != index_) cluster_.note("a communicator on the wrong device");
    HostComm::Device hooks{
        .put = [this](const HostComm& of, void* stream,
                      StreamOperation operation) { put(of, stream, std::move(operation)); },
        .spoil =
            [this](const MemoryRange& range) {
              std::memset(const_cast<void*>(range.begin), aborted_byte, range.bytes);
            },
        .on_host = [](const void* memory) { return const_cast<void*>(memory); }};
    HostComm& made = *comms_.emplace_back(
        std::make_unique<HostComm>(cluster_, id, ranks, rank, blocking, std::move(hooks)));
    ++live_comms_;
    names.emplace_back(name);
    *comm = reinterpret_cast<NcclComm*>(&made);
    if (!blocking) return NcclCode::InProgress;
    made.wait_until_settled();
    return code;
  };
  table_.comm_abort = [this](NcclComm* comm) {
    known(comm, "ncclCommAbort", true)->abort();
    ++aborts[comm];
    --live_comms_;
    return enter<NcclCode>("ncclCommAbort");
  };
  table_.comm_get_async_error = [this](NcclComm* comm, NcclCode* error) {
    return async_state(known(comm, "ncclCommGetAsyncError", true), error);
  };
  fill_registration();
  fill_collectives();
  table_.nccl_error = [](NcclCode code, NcclComm*) {
    return "host NCCL says " + std::to_string(static_cast<int>(code));
  };
}

void HostDevice::fill_registration() {
  table_.comm_register = [this](NcclComm* comm, void* memory, std::size_t bytes,
                                void** registration) {
    return register_buffer(known(comm, "ncclCommRegister"), memory, bytes, registration);
  };
  table_.window_register = [this](NcclComm* comm, void* memory, std::size_t bytes, void** window) {
    return register_window(known(comm, "ncclCommWindowRegister"), memory, bytes, window);
  };
  table_.window_deregister = [this](NcclComm* comm, void* window) {
    if (!known(comm, "ncclCommWindowDeregister")->drop_place(window))
      cluster_.note("ncclCommWindowDeregister of something unknown");
    return enter<NcclCode>("ncclCommWindowDeregister");
  };
  table_.comm_deregister = [this](NcclComm* comm, void* registration) {
    if (!known(comm, "ncclCommDeregister")->drop_place(registration))
      cluster_.note("ncclCommDeregister of something unknown");
    return enter<NcclCode>("ncclCommDeregister");
  };
  table_.mem_alloc = [this](void** memory, std::size_t bytes) { return allocate(memory, bytes); };
  table_.mem_free = [this](void* memory) {
    give_memory(memory, "ncclMemFree");
    return enter<NcclCode>("ncclMemFree");
  };
}

void HostDevice::fill_collectives() {
  table_.group_start = [this] {
    const NcclCode code = enter<NcclCode>("ncclGroupStart");
    if (code == NcclCode::Success) ++group_depth_;
    return code;
  };
  table_.group_end = [this] { return end_group(); };
  table_.all_reduce = [this](const void* send, void* receive, std::size_t count, NcclType type,
                             NcclOp op, NcclComm* comm, CudaStream* stream) {
    return collective({"ncclAllReduce", send, receive, count, type, static_cast<int>(op)}, comm,
                      stream);
  };
  table_.broadcast = [this](const void* send, void* receive, std::size_t count, NcclType type,
                            int root, NcclComm* comm, CudaStream* stream) {
    return collective({"ncclBroadcast", send, receive, count, type, root}, comm, stream);
  };
  table_.all_gather = [this](const void* send, void* receive, std::size_t count, NcclType type,
                             NcclComm* comm, CudaStream* stream) {
    return collective({"ncclAllGather", send, receive, count, type, 0}, comm, stream);
  };
  table_.reduce = [this](const void* send, void* receive, std::size_t count, NcclType type,
                         NcclOp op, int root, NcclComm* comm, CudaStream* stream) {
    return collective({"ncclReduce", send, receive, count, type, static_cast<int>(op), root}, comm,
                      stream);
  };
  table_.reduce_scatter = [this](const void* send, void* receive, std::size_t count, NcclType type,
                                 NcclOp op, NcclComm* comm, CudaStream* stream) {
    return collective({"ncclReduceScatter", send, receive, count, type, static_cast<int>(op)}, comm,
                      stream);
  };
  table_.send = [this](const void* send, std::size_t count, NcclType type, int to, NcclComm* comm,
                       CudaStream* stream) {
    return message({"ncclSend", send, nullptr, count, type}, true, to, comm, stream);
  };
  table_.receive = [this](void* receive, std::size_t count, NcclType type, int from, NcclComm* comm,
                          CudaStream* stream) {
    return message({"ncclRecv", nullptr, receive, count, type}, false, from, comm, stream);
  };
}

}  // namespace hvd::gpu::test
