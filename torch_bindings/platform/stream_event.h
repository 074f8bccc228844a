#pragma once
/// An event of a device's streams that any thread may use, and drop. LibTorch's own makes the
/// device current again that was, and so a context on one that has none: on the first GPU, where
/// threads begin. Methods throw what LibTorch's throw.
// Tested in tests/gpu/torch_omissions.cc

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>

#include <exception>
#include <memory>

namespace hvd::detail {

class StreamEvent {
 public:
  explicit StreamEvent(c10::Device device)
      : device_(device), event_(std::make_unique<c10::Event>(device.type())) {}
  ~StreamEvent() {
    if (event_ == nullptr) return;  // moved from
    try {
      const c10::DeviceGuard guard(device_);
      event_.reset();
    } catch (const std::exception&) {  // the process ends
    }
  }
  StreamEvent(StreamEvent&&) = default;
  StreamEvent& operator=(StreamEvent&&) = delete;  // it would let go of the event without a guard
  StreamEvent(const StreamEvent&) = delete;
  StreamEvent& operator=(const StreamEvent&) = delete;

  void record(const c10::Stream& stream) {
    const c10::DeviceGuard guard(device_);
    event_->record(stream);
  }
  void block(const c10::Stream& stream) const {
    const c10::DeviceGuard guard(stream.device());
    event_->block(stream);
  }
  void synchronize() const {
    const c10::DeviceGuard guard(device_);
    event_->synchronize();
  }

 private:
  c10::Device device_;
  std::unique_ptr<c10::Event> event_;
};

}  // namespace hvd::detail
