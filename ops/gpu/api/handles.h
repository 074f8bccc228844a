#pragma once
/// This header has one owner for each CUDA handle, the current device included, for an open NCCL
/// group, and for a range of profilers. They are for the thread that has the turn. Constructors
/// throw BackendError; destructors let go of the handle and ignore what the call says.
// Tested in tests/ops/gpu/nccl/nccl_backend_test.cc, tests/gpu/staged_gpu_test.cc

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "ops/gpu/api/call.h"

namespace hvd::gpu {

/// While a DeviceGuard lives the device of `site` is current: a user's thread may have the turn,
/// and its device must not change under it. And no call breaks the capture of a CUDA graph, the
/// thread's own or another's: none of them is to be part of one. Every call of CUDA's that needs a
/// context is made under a guard: it would make one on the device that is current, which is half a
/// gigabyte on the first GPU for each rank of a host. To make a device current again makes one,
/// too: a thread whose device the process has no context on is lent that of `site` instead, and is
/// then as it was.
class DeviceGuard {
 public:
  explicit DeviceGuard(const CallContext& site) : table_(site.table) {
    check(site, table_->get_device(&before_), "cudaGetDevice");
    check(site, enter(site.device), "cudaSetDevice");
    allow_calls();
  }
  /// For destructors: tries, and does without.
  DeviceGuard(const GpuApi& table, int device) noexcept : table_(&table) {
    if (table_->get_device(&before_) != CudaCode::Success) return;
    static_cast<void>(enter(device));
    allow_calls();
  }
  ~DeviceGuard() {
    if (relaxed_) table_->exchange_capture_mode(&mode_);
    if (pushed_) table_->pop_device();
    if (changed_) table_->set_device(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  [[nodiscard]] CudaCode enter(int device) noexcept {
    if (before_ == device) return CudaCode::Success;
    const bool used = is_used(before_);
    pushed_ = !used && table_->push_device(device) == CudaCode::Success;
    if (pushed_) return CudaCode::Success;
    const CudaCode code = table_->set_device(device);
    changed_ = used && code == CudaCode::Success;
    return code;
  }
  void allow_calls() noexcept {
    relaxed_ = table_->exchange_capture_mode(&mode_) == CudaCode::Success;
  }
  [[nodiscard]] bool is_used(int device) const noexcept {
    bool exists = false;
    return table_->has_context(device, &exists) != CudaCode::Success || exists;
  }

  const GpuApi* table_;
  int before_ = 0;
  CaptureMode mode_ = CaptureMode::Relaxed;
  bool changed_ = false;  ///< to be set again
  bool pushed_ = false;
  bool relaxed_ = false;
};

/// While it lives, profilers show what the thread does.
class Range {
 public:
  Range(const GpuApi& table, const std::string& text) : table_(table) {
    table_.range_push(text.c_str());
  }
  ~Range() { table_.range_pop(); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const GpuApi& table_;
};

/// A stream of the highest priority that does not wait for the default stream. Empty until
/// `create`.
class Stream {
 public:
  Stream() = default;
  ~Stream() {
    if (stream_ == nullptr) return;
    const DeviceGuard guard(*table_, device_);
    table_->stream_destroy(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void create(const CallContext& site) {
    if (stream_ != nullptr) return;
    check(site, site.table->stream_create(&stream_), "cudaStreamCreateWithPriority");
    table_ = site.table;
    device_ = site.device;
  }
  CudaStream* get() const { return stream_; }
  /// Makes what comes later wait until the event has happened.
  void wait_for(const CallContext& site, CudaEvent* event) const {
    check(site, site.table->stream_wait_event(stream_, event), "cudaStreamWaitEvent");
  }

 private:
  const GpuApi* table_ = nullptr;
  int device_ = 0;
  CudaStream* stream_ = nullptr;
};

/// An event. Any thread may let go of it: the one that drops the last handle.
class Event {
 public:
  explicit Event(const CallContext& site) : Event(*site.table, site.device) {
    check(site, table_->event_create(&event_), "cudaEventCreateWithFlags");
  }
  /// One that other processes may wait for.
  static Event interprocess(const CallContext& site) {
    Event made(*site.table, site.device);
    check(site, site.table->ipc_event_create(&made.event_), "cudaEventCreateWithFlags");
    return made;
  }
  ~Event() {
    if (event_ == nullptr) return;
    const DeviceGuard guard(*table_, device_);
    table_->event_destroy(event_);
  }
  Event(Event&& other) noexcept
      : table_(other.table_),
        device_(other.device_),
        event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(table_, other.table_);
    std::swap(device_, other.device_);
    std::swap(event_, other.event_);
    return *this;
  }

  void record(const CallContext& site, const Stream& stream) {
    check(site, table_->event_record(event_, stream.get()), "cudaEventRecord");
  }
  CudaCode query() const { return table_->event_query(event_); }
  CudaEvent* get() const { return event_; }

 private:
  Event(const GpuApi& table, int device) : table_(&table), device_(device) {}
  const GpuApi* table_;
  int device_;
  CudaEvent* event_ = nullptr;
};

/// Returns whether the event has happened. What fails is not always the batch's own fault: an error
/// of any kernel of the process surfaces in whatever call comes next.
inline bool happened(const CallContext& site, const Event& event) {
  const CudaCode code = event.query();
  if (code == CudaCode::NotReady) return false;
  check(site, code, "cudaEventQuery (or an earlier kernel of this process)");
  return true;
}

/// Returns whether the stream (none made yet counts as well) has ended what it does, which is
/// waited for as long as `limit`: before memory is given back that its kernels use. For destructors
/// and `abort`: where a call is refused it does without.
inline bool comes_to_rest(const GpuApi& table, int device, const Stream& stream,
                          std::chrono::milliseconds limit) noexcept {
  if (stream.get() == nullptr) return true;
  const DeviceGuard guard(table, device);
  CudaEvent* event = nullptr;
  if (table.event_create(&event) != CudaCode::Success) return false;
  CudaCode code = table.event_record(event, stream.get());
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (code == CudaCode::Success) {
    code = table.event_query(event);
    if (code != CudaCode::NotReady || std::chrono::steady_clock::now() > deadline) break;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    code = CudaCode::Success;
  }
  table.event_destroy(event);
  return code == CudaCode::Success;
}

/// Calls between construction and `end` become one NCCL operation. Left early, the group is closed
/// all the same: it is a state of the thread, and would swallow the next call on any communicator.
class Group {
 public:
  explicit Group(const CallContext& site) : table_(site.table) {
    check(site, table_->group_start(), "ncclGroupStart");
    open_ = true;
  }
  ~Group() {
    if (open_) table_->group_end();
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  [[nodiscard]] NcclCode end() {
    open_ = false;
    return table_->group_end();
  }

 private:
  const GpuApi* table_;
  bool open_ = false;
};

}  // namespace hvd::gpu
