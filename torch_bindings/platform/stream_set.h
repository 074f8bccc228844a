#pragma once
/// A StreamSet is the streams of a GPU on which tensors were written that are to be read together:
/// gradients of one bucket, say, where a part of the model has run on a stream of its own. Knows of
/// host tensors that they need none. Owns nothing. One thread at a time.
// Tested in tests/gpu/torch_streams.cc, tests/gpu/torch_omissions.cc

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <exception>
#include <memory>
#include <vector>

namespace hvd::detail {

class StreamSet {
 public:
  /// Takes in the current stream of the tensor's device: what is queued there writes the tensor.
  void note(const at::Tensor& tensor);
  /// Makes the current stream of the device wait for what is queued on the others, and forgets them
  /// all. Returns whether there were others.
  bool join(at::Device device);
  void clear() { streams_.clear(); }

 private:
  std::vector<c10::Stream> streams_;
};

/// An event of a device's streams that any thread may use, and drop. LibTorch's own makes the
/// device current again that was, and so a context on one that has none: on the first GPU, where
/// threads begin. Methods throw what LibTorch's throw.
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

/// Returns the current stream of each of these devices; of the CPU none.
std::vector<c10::Stream> current_streams(const std::vector<at::Device>& devices);
/// Keeps the tensor's memory, when it is freed, from being handed out again before the current
/// stream has passed what is queued on it now.
void keep_for_current_stream(const at::Tensor& tensor);

}  // namespace hvd::detail
