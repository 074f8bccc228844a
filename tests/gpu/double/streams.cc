// Devices, contexts, streams, events, captures, and the driver's calls that hvd looks up.
#include "tests/gpu/double/streams.h"

#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "tests/gpu/double/sites.h"
#include "tests/support/random.h"

namespace hvd::gpu::test::cuda {

namespace {

struct Thread {
  cudaError_t last = cudaSuccess;
  int device = std::getenv("HVD_TEST_GPU_CURRENT") == nullptr
                   ? 0
                   : std::atoi(std::getenv("HVD_TEST_GPU_CURRENT"));
  std::vector<int> pushed;       ///< what was current before
  std::optional<int> pretended;  ///< to whoever asks whether a push that is left out was made
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
};
Thread& thread() {
  static thread_local Thread own;
  return own;
}

/// What this process has. Never destroyed: others call when it ends.
struct Process {
  HostStreams streams{order(), process()};
  std::map<CUstream_st*, std::unique_ptr<CUstream_st>> known;
  std::array<std::unique_ptr<CUstream_st>, kMostDevices> defaults;
  std::set<CUevent_st*> events;
  std::vector<std::unique_ptr<CUstream_st>> leaving;  ///< destroyed, with work on them
  std::set<int> contexts;
  std::set<int> broken;  ///< devices on which a kernel of this process has had no memory
  std::set<std::pair<int, int>> peers;  ///< devices whose kernels reach another's memory
  std::vector<std::weak_ptr<Graph>> captures;
  unsigned long long graphs = 0, operations = 0;
  std::uint64_t pumped = 0;
  bool ended = false;
  hvd::test::Random random{schedule_of_environment().seed * 1000 +
                           static_cast<std::uint64_t>(cuda::process())};
};

/// A device goes on, slowly, when nobody asks it.
void go_on_alone(Process& own) {
  for (std::uint64_t seen = 0;;) {
    ::usleep(5000);
    const Lock lock;
    if (own.ended) return;
    if (own.pumped == seen) go_on(nullptr, 0);
    seen = own.pumped;
  }
}

Process& self() {
  static auto* const own = [] {
    auto* const made = new Process;
    std::atexit([] {
      const Lock lock;
      self().ended = true;
    });
    std::thread([made] { go_on_alone(*made); }).detach();
    return made;
  }();
  return *own;
}

std::unique_ptr<CUstream_st> make_stream(int device) {
  auto made = std::make_unique<CUstream_st>();
  made->queue = self().streams.create();
  made->device = device;
  made->name = self().streams.name_of(made->queue) + " on GPU " + std::to_string(device);
  return made;
}

std::shared_ptr<CUevent_st::Shared> make_shared_event(bool interprocess) {
  auto* const made = new (allocate_state(sizeof(CUevent_st::Shared))) CUevent_st::Shared;
  return {made, [interprocess](CUevent_st::Shared* event) {
            if (interprocess) return;  // another process may have it
            event->~SharedEvent();
            free_state(event, sizeof(CUevent_st::Shared));
          }};
}

CUstream_st* default_stream(int device) {
  auto& own = self().defaults.at(static_cast<std::size_t>(device));
  if (own == nullptr) own = make_stream(device);
  return own.get();
}

/// The captures that have not ended.
std::vector<std::shared_ptr<Graph>> captures() {
  std::vector<std::shared_ptr<Graph>> found;
  std::erase_if(self().captures, [](const auto& graph) { return graph.expired(); });
  for (const auto& graph : self().captures) found.push_back(graph.lock());
  return found;
}

/// HVD_TEST_GPU_UNTOUCHED is a device that nobody is to make one on.
void make_context(int device) {
  if (!self().contexts.insert(device).second) return;
  static const char* const untouched = std::getenv("HVD_TEST_GPU_UNTOUCHED");
  if (untouched != nullptr && std::atoi(untouched) == device)
    complain("a context on GPU " + std::to_string(device) + ", for a call at" + callers());
}

void end_capture(const std::shared_ptr<Graph>& graph) {
  std::erase_if(self().captures, [&](const auto& other) { return other.lock() == graph; });
  const auto leave = [&](CUstream_st* stream) {
    if (stream != nullptr && stream->captures == graph)
      stream->captures = nullptr, stream->began_capture = false;
  };
  for (auto& [unused, stream] : self().known) leave(stream.get());
  for (auto& stream : self().defaults) leave(stream.get());
}

bool is_broken(int device) { return self().broken.contains(device); }

cudaError_t wait_for(const std::shared_ptr<CUevent_st::Shared>& event, std::uint64_t turn,
                     int device) {
  for (;;) {
    for (int i = 0; i < 50; ++i) {
      const Lock lock;
      if (is_broken(device)) return done(cudaErrorIllegalAddress);
      if (event->happened.load() >= turn) {
        order().learn(event->clock_of(turn));
        return cudaSuccess;
      }
      go_on(event, turn);
    }
    ::usleep(20);
  }
}

/// A device on which a kernel has failed does nothing more for this process.
void put(const CUstream_st& stream, StreamOperation operation) {
  operation.run = [run = std::move(operation.run), device = stream.device](Clock& clock) {
    return !is_broken(device) && run(clock);
  };
  self().streams.enqueue(stream.queue, std::move(operation));
}

/// Whether a kernel finds memory there.
bool is_there(const MemoryRange& range) {
  if (range.bytes == 0) return true;
  const auto* const begin = static_cast<const std::byte*>(range.begin);
  if (!is_device_memory(begin)) return number_of(begin) >= 4096;
  return piece_at(begin) != nullptr && piece_at(begin + range.bytes - 1) != nullptr;
}

cudaError_t make_event(cudaEvent_t* event, unsigned flags) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  auto* const made = new CUevent_st;
  made->shared = make_shared_event((flags & cudaEventInterprocess) != 0);
  made->device = current_device();
  made->flags = flags;
  self().events.insert(made);
  *event = made;
  return cudaSuccess;
}

cudaError_t record_event(cudaEvent_t event, cudaStream_t handle) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  CUstream_st* const stream = known(handle);
  if (stream == nullptr || !is_known(event) || stream->device != event->device)
    return done(cudaErrorInvalidResourceHandle);
  if (is_left_out("record")) return cudaSuccess;
  event->recorded = true;
  event->captured = stream->captures;
  if (!stream->captures) put(*stream, recording_of(event->shared));
  look_for_errors();
  return cudaSuccess;
}

cudaError_t wait_for_event(cudaStream_t handle, cudaEvent_t event) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  CUstream_st* const stream = known(handle);
  if (stream == nullptr || !is_known(event)) return done(cudaErrorInvalidResourceHandle);
  if (is_left_out("wait")) return cudaSuccess;
  // becomes a part of the capture
  if (event->captured && !stream->captures) stream->captures = event->captured;
  if (stream->captures) {
    if (stream->captures == event->captured) return cudaSuccess;
    stream->captures->broken = true;
    return done(cudaErrorStreamCaptureIsolation);
  }
  put(*stream, waiting_for(event->shared));
  look_for_errors();
  return cudaSuccess;
}

cudaError_t capture_info(cudaStream_t handle, cudaStreamCaptureStatus* status,
                         unsigned long long* id) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  CUstream_st* const stream = known(handle);
  if (stream == nullptr) return done(cudaErrorInvalidResourceHandle);
  *status = !stream->captures          ? cudaStreamCaptureStatusNone
            : stream->captures->broken ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  if (id != nullptr && stream->captures) *id = stream->captures->id;
  return cudaSuccess;
}

}  // namespace

namespace {
std::size_t& depth() {
  static thread_local std::size_t own = 0;
  return own;
}
}  // namespace

Speaker::Speaker(const void* caller) {
  if (depth()++ > 0 || !is_programs(caller)) return;
  const Lock lock;
  order().speak_as(1);
}
Speaker::~Speaker() {
  if (--depth() > 0) return;
  const Lock lock;
  order().speak_as(0);
}

cudaError_t done(cudaError_t error) {
  if (error != cudaSuccess) thread().last = error;
  return error;
}

int current_device() { return thread().device; }

cudaError_t enter(Capture kind) {
  if (device_count() == 0) return done(cudaErrorNoDevice);
  make_context(thread().device);
  if (is_broken(thread().device)) return done(cudaErrorIllegalAddress);
  if (kind == Capture::Allowed || thread().mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  for (const auto& graph : captures()) {
    const bool own =
        graph->thread == std::this_thread::get_id() && graph->mode != cudaStreamCaptureModeRelaxed;
    const bool anybodys =
        graph->mode == cudaStreamCaptureModeGlobal && thread().mode == cudaStreamCaptureModeGlobal;
    if (!own && !anybodys) continue;
    graph->broken = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  return done(error);
}

CUstream_st* known(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
    return default_stream(current_device());
  const auto found = self().known.find(stream);
  return found == self().known.end() ? nullptr : found->second.get();
}

void check_access(const CUstream_st& stream, const UseOfMemory& use) {
  for (const auto* const ranges : {&use.reads, &use.writes})
    for (const MemoryRange& range : *ranges)
      if (is_device_memory(range.begin) && device_of(range.begin) != stream.device &&
          !self().peers.contains({stream.device, device_of(range.begin)}))
        complain(use.name + " on " + stream.name + " uses memory of GPU " +
                 std::to_string(device_of(range.begin)) + ", to which it has no access");
}

bool is_known(cudaEvent_t event) { return self().events.contains(event); }

cudaError_t enqueue(CUstream_st& stream, StreamOperation operation) {
  if (stream.captures) {
    stream.captures->operations.push_back(std::move(operation));
    return cudaSuccess;
  }
  put(stream, std::move(operation));
  look_for_errors();
  return cudaSuccess;
}

cudaError_t enqueue(CUstream_st& stream, Work work) {
  work.use.name += " " + std::to_string(++self().operations) + " on " + stream.name;
  const auto run = [run = std::move(work.run), use = work.use, device = stream.device](Clock&) {
    const bool well = std::all_of(use.reads.begin(), use.reads.end(), is_there) &&
                      std::all_of(use.writes.begin(), use.writes.end(), is_there);
    if (!well) self().broken.insert(device);
    return well && run();
  };
  return enqueue(stream, {.use = std::move(work.use), .run = run});
}

cudaError_t wait(const CUstream_st& stream) {
  std::shared_ptr<CUevent_st::Shared> event;
  {
    const Lock lock;
    event = make_shared_event(false);
    put(stream, recording_of(event));
  }
  return wait_for(event, 1, stream.device);
}

cudaError_t wait_for_device(int device) {
  std::vector<CUstream_st*> streams;
  {
    const Lock lock;
    std::erase_if(self().leaving,
                  [](const auto& stream) { return self().streams.is_idle(stream->queue); });
    for (auto& stream : self().leaving)
      if (stream->device == device) streams.push_back(stream.get());
    for (auto& [unused, stream] : self().known)
      if (stream->device == device && !stream->captures) streams.push_back(stream.get());
    streams.push_back(default_stream(device));
  }
  for (const CUstream_st* stream : streams)
    if (const cudaError_t error = wait(*stream); error != cudaSuccess) return error;
  return cudaSuccess;
}

void go_on(const std::shared_ptr<CUevent_st::Shared>& asked, std::uint64_t turn) {
  ++self().pumped;
  self().streams.pump(asked, turn);
  look_for_errors();
}

std::uint64_t random_number() { return self().random.next(); }

}  // namespace hvd::gpu::test::cuda

using namespace hvd::gpu::test;
using namespace hvd::gpu::test::cuda;

HVD_EXPORTED void hvd_double_hand_on(const void* memory, std::size_t bytes) {
  const Lock lock;
  order().hand_on(memory, bytes);
}
/// For a process that is about to die: in the midst of nothing that the others use.
HVD_EXPORTED void hvd_double_hold() { static_cast<void>(new Lock); }
HVD_EXPORTED int hvd_double_enqueue(CUstream_st* handle, Work&& work) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  CUstream_st* const stream = known(handle);
  if (stream == nullptr || stream->device != current_device())
    return done(cudaErrorInvalidResourceHandle);
  return enqueue(*stream, std::move(work));
}

// ---- devices
HVD_EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return done(*count == 0 ? cudaErrorNoDevice : cudaSuccess);
}
HVD_EXPORTED cudaError_t cudaGetDevice(int* device) {
  *device = std::exchange(thread().pretended, {}).value_or(thread().device);
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return done(cudaErrorInvalidDevice);
  const Lock lock;
  if (is_left_out("device")) return cudaSuccess;
  thread().device = device;
  return enter();
}
HVD_EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= device_count()) return done(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "virtual GPU %d", device);
  std::memset(properties->uuid.bytes, 0x70 + device, sizeof properties->uuid.bytes);
  properties->totalGlobalMem = kDeviceBytes;
  properties->major = 9;
  properties->multiProcessorCount = 4;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->pciDeviceID = device;
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= device_count()) return done(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrIpcEventSupport:
    case cudaDevAttrConcurrentManagedAccess: *value = 1; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
    default:
      std::fprintf(stderr, "virtual GPU: attribute %d is not known\n", static_cast<int>(attribute));
      std::abort();
  }
}
HVD_EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer ? 1 : 0;
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned /*flags*/) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  self().peers.emplace(current_device(), peer);
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaDeviceSynchronize() {
  const Speaker speaker(__builtin_return_address(0));
  {
    const Lock lock;
    if (const cudaError_t error = enter(Capture::Unsafe); error != cudaSuccess) return error;
  }
  return wait_for_device(current_device());
}

// ---- errors
HVD_EXPORTED cudaError_t cudaGetLastError() { return std::exchange(thread().last, cudaSuccess); }
HVD_EXPORTED cudaError_t cudaPeekAtLastError() { return thread().last; }
HVD_EXPORTED const char* cudaGetErrorName(cudaError_t error) {
  static thread_local std::string text;
  text = "cudaError" + std::to_string(static_cast<int>(error));
  return text.c_str();
}
HVD_EXPORTED const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  static thread_local std::string text;
  text = "the virtual GPU's error " + std::to_string(static_cast<int>(error));
  return text.c_str();
}

// ---- streams
HVD_EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                                      int /*priority*/) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  if ((flags & cudaStreamNonBlocking) == 0)
    complain("a stream that waits for the default stream, which is not simulated");
  auto made = make_stream(current_device());
  *stream = made.get();
  self().known.emplace(made.get(), std::move(made));
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  const auto found = self().known.find(handle);
  if (found == self().known.end()) return done(cudaErrorInvalidResourceHandle);
  if (self().streams.is_idle(handle->queue)) {
    self().streams.destroy(handle->queue);
  } else {
    self().leaving.push_back(std::move(found->second));  // it ends by itself
  }
  self().known.erase(found);
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                             unsigned /*flags*/) {
  const Speaker speaker(__builtin_return_address(0));
  return wait_for_event(stream, event);
}
HVD_EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const Speaker speaker(__builtin_return_address(0));
  CUstream_st* stream = nullptr;
  {
    const Lock lock;
    if (const cudaError_t error = enter(Capture::Unsafe); error != cudaSuccess) return error;
    stream = known(handle);
    if (stream == nullptr) return done(cudaErrorInvalidResourceHandle);
  }
  return wait(*stream);
}
HVD_EXPORTED cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Speaker speaker(__builtin_return_address(0));
  const Lock lock;
  if (const cudaError_t error = enter(Capture::Unsafe); error != cudaSuccess) return error;
  CUstream_st* const stream = known(handle);
  if (stream == nullptr) return done(cudaErrorInvalidResourceHandle);
  go_on(nullptr, 0);
  if (!self().streams.is_idle(stream->queue)) return done(cudaErrorNotReady);
  order().learn(self().streams.clock_of(stream->queue));
  return cudaSuccess;
}

// ---- events
HVD_EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return make_event(event, flags);
}
HVD_EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* event) { return make_event(event, 0); }
HVD_EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  if (!is_known(event)) return done(cudaErrorInvalidResourceHandle);
  if (event->imported) {
    --event->shared->open;
  } else if (event->shared->open.load() > 0) {
    complain("cudaEventDestroy of an event that another process has open");
  }
  self().events.erase(event);
  delete event;
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Speaker speaker(__builtin_return_address(0));
  return record_event(event, stream);
}
HVD_EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream,
                                                  unsigned /*flags*/) {
  const Speaker speaker(__builtin_return_address(0));
  return record_event(event, stream);
}
HVD_EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Speaker speaker(__builtin_return_address(0));
  {
    const Lock lock;
    if (const cudaError_t error = enter(Capture::Unsafe); error != cudaSuccess) return error;
    if (!is_known(event)) return done(cudaErrorInvalidResourceHandle);
    if (event->captured && !event->captured->broken) return done(cudaErrorCapturedEvent);
    const std::uint64_t turn = event->shared->recorded.load();
    go_on(event->shared, turn);
    if (event->shared->happened.load() >= turn) {
      order().learn(event->shared->clock_of(turn));
      return cudaSuccess;
    }
  }
  std::this_thread::yield();
  return done(cudaErrorNotReady);
}
HVD_EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const Speaker speaker(__builtin_return_address(0));
  std::shared_ptr<CUevent_st::Shared> shared;
  {
    const Lock lock;
    if (const cudaError_t error = enter(Capture::Unsafe); error != cudaSuccess) return error;
    if (!is_known(event)) return done(cudaErrorInvalidResourceHandle);
    shared = event->shared;
  }
  return wait_for(shared, shared->recorded.load(), event->device);
}
HVD_EXPORTED cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t /*begin*/,
                                              cudaEvent_t /*end*/) {
  *milliseconds = 1;
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  if (!is_known(event) || (event->flags & cudaEventInterprocess) == 0)
    return done(cudaErrorInvalidResourceHandle);
  *handle = {};
  const std::array<std::uintptr_t, 3> content{1, number_of(event->shared.get()),
                                              static_cast<std::uintptr_t>(::getpid())};
  std::memcpy(handle, content.data(), sizeof content);
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  std::array<std::uintptr_t, 3> content{};
  std::memcpy(content.data(), &handle, sizeof content);
  if (content[0] != 1 || content[2] == static_cast<std::uintptr_t>(::getpid()))
    return done(cudaErrorInvalidResourceHandle);
  auto* const made = new CUevent_st;
  made->shared = {reinterpret_cast<CUevent_st::Shared*>(content[1]), [](CUevent_st::Shared*) {}};
  ++made->shared->open;
  made->device = current_device();
  made->imported = true;
  self().events.insert(made);
  *event = made;
  return cudaSuccess;
}

// ---- captures
HVD_EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const Lock lock;
  std::swap(thread().mode, *mode);
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                               cudaStreamCaptureStatus* status) {
  return capture_info(stream, status, nullptr);
}
HVD_EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream,
                                                  cudaStreamCaptureStatus* status,
                                                  unsigned long long* id, cudaGraph_t* graph,
                                                  const cudaGraphNode_t** nodes,
                                                  const cudaGraphEdgeData** /*edges*/,
                                                  std::size_t* count) {
  if (graph != nullptr) *graph = nullptr;
  if (nodes != nullptr) *nodes = nullptr;
  if (count != nullptr) *count = 0;
  return capture_info(stream, status, id);
}
HVD_EXPORTED cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  CUstream_st* const stream = known(handle);
  if (handle == nullptr || stream == nullptr || stream->captures)
    return done(cudaErrorStreamCaptureUnsupported);
  stream->captures = std::make_shared<Graph>();
  stream->captures->mode = mode;
  stream->captures->thread = std::this_thread::get_id();
  stream->captures->id = ++self().graphs;
  stream->began_capture = true;
  self().captures.push_back(stream->captures);
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const Lock lock;
  CUstream_st* const stream = known(handle);
  if (stream == nullptr || !stream->began_capture) return done(cudaErrorStreamCaptureUnmatched);
  const std::shared_ptr<Graph> made = stream->captures;
  end_capture(made);
  *graph = nullptr;
  if (made->broken) return done(cudaErrorStreamCaptureInvalidated);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph(*made));
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph,
                                              unsigned long long /*flags*/) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
  const Speaker speaker(__builtin_return_address(0));
  const Lock lock;
  CUstream_st* const stream = known(handle);
  if (stream == nullptr) return done(cudaErrorInvalidResourceHandle);
  for (const StreamOperation& operation : reinterpret_cast<Graph*>(graph)->operations)
    enqueue(*stream, StreamOperation(operation));
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

// ---- the driver
namespace {

CUresult initialise(unsigned /*flags*/) {
  return device_count() == 0 ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}
CUresult context_state(CUdevice device, unsigned* flags, int* active) {
  const Lock lock;
  *flags = 0;
  *active = self().contexts.contains(device) ? 1 : 0;
  return CUDA_SUCCESS;
}
CUresult driver_attribute(int* value, CUdevice_attribute /*attribute*/, CUdevice /*device*/) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult retain_context(CUcontext* context, CUdevice device) {
  const Lock lock;
  make_context(device);
  *context = reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device) + 1);
  return CUDA_SUCCESS;
}
CUresult push_context(CUcontext context) {
  const Lock lock;
  thread().pushed.push_back(thread().device);
  const int device = static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1;
  if (is_left_out("device")) {
    thread().pretended = device;
  } else {
    thread().device = device;
  }
  return CUDA_SUCCESS;
}
CUresult pop_context(CUcontext* context) {
  if (thread().pushed.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(thread().device) + 1);
  thread().device = thread().pushed.back();
  thread().pushed.pop_back();
  return CUDA_SUCCESS;
}
[[noreturn]] void unknown_call() {
  std::fputs("virtual GPU: a call of the driver that it does not have\n", stderr);
  std::abort();
}

}  // namespace

HVD_EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found,
                                                          unsigned /*version*/,
                                                          unsigned long long /*flags*/,
                                                          cudaDriverEntryPointQueryResult* status) {
  static const std::map<std::string, void*> calls{
      {"cuInit", reinterpret_cast<void*>(initialise)},
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(context_state)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(driver_attribute)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(retain_context)},
      {"cuCtxPushCurrent", reinterpret_cast<void*>(push_context)},
      {"cuCtxPopCurrent", reinterpret_cast<void*>(pop_context)}};
  const auto call = calls.find(name);
  *found = call == calls.end() ? reinterpret_cast<void*>(unknown_call) : call->second;
  if (status != nullptr) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
