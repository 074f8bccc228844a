#pragma once
/// This header has one owner for each CUDA handle, the current device included, and for an open NCCL group. They are for the thread that
/// has the turn. Constructors throw BackendError; destructors let go of the handle and ignore what the call says.

#include <utility>

#include "ops/gpu/api/call.h"

namespace hvd::nccl {

/// While a DeviceGuard lives the device of `site` is current: a user's thread may have the turn, and its device must not change under it.
class DeviceGuard {
 public:
  explicit DeviceGuard(const CallContext& site) : table_(site.table) {
    check(site, table_->get_device(&before_), "cudaGetDevice");
    if (before_ == site.device) return;
    check(site, table_->set_device(site.device), "cudaSetDevice");
    changed_ = true;
  }
  /// For destructors: tries, and does without.
  DeviceGuard(const GpuApi& table, int device) noexcept : table_(&table) {
    if (table_->get_device(&before_) != CudaCode::Success || before_ == device) return;
    changed_ = table_->set_device(device) == CudaCode::Success;
  }
  ~DeviceGuard() {
    if (changed_) table_->set_device(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const GpuApi* table_;
  int before_ = 0;
  bool changed_ = false;
};

/// A stream of the highest priority that does not wait for the default stream. Empty until `create`.
class Stream {
 public:
  Stream() = default;
  ~Stream() {
    if (stream_ != nullptr) table_->stream_destroy(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void create(const CallContext& site) {
    if (stream_ != nullptr) return;
    check(site, site.table->stream_create(&stream_), "cudaStreamCreateWithPriority");
    table_ = site.table;
  }
  CudaStream* get() const { return stream_; }

 private:
  const GpuApi* table_ = nullptr;
  CudaStream* stream_ = nullptr;
};

class Event {
 public:
  explicit Event(const CallContext& site) : table_(site.table) { check(site, table_->event_create(&event_), "cudaEventCreateWithFlags"); }
  /// One that other processes may wait for.
  static Event interprocess(const CallContext& site) {
    Event made(*site.table);
    check(site, site.table->ipc_event_create(&made.event_), "cudaEventCreateWithFlags");
    return made;
  }
  ~Event() {
    if (event_ != nullptr) table_->event_destroy(event_);
  }
  Event(Event&& other) noexcept : table_(other.table_), event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(table_, other.table_);
    std::swap(event_, other.event_);
    return *this;
  }

  void record(const CallContext& site, const Stream& stream) { check(site, table_->event_record(event_, stream.get()), "cudaEventRecord"); }
  CudaCode query() const { return table_->event_query(event_); }
  CudaEvent* get() const { return event_; }

 private:
  explicit Event(const GpuApi& table) : table_(&table) {}
  const GpuApi* table_;
  CudaEvent* event_ = nullptr;
};

/// Calls between construction and `end` become one NCCL operation. Left early, the group is closed all the same: it is a state of the
/// thread, and would swallow the next call on any communicator.
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

}  // namespace hvd::nccl
