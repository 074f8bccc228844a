#pragma once
/// The few things LibTorch knows of a GPU's streams. The null twin (device_none.cc) is for builds
/// without CUDA: there are no GPU tensors there. Any thread; what CUDA refuses is a BackendError.
// Tested in tests/gpu/torch_streams.cc

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hvd/submission.h"

namespace hvd::detail {

/// A StreamPoint is where in its device's work a submission stands: the stream that was current
/// then, and an event that follows what was queued on it. One serves all tensors of the submission.
/// It is kept by the submission and by its handles.
class StreamPoint {
 public:
  virtual ~StreamPoint() = default;
  /// Returns the native event after which the submission's memory may be used.
  [[nodiscard]] virtual void* event() const = 0;
  /// Returns what `make` makes while that stream is current, from its share of LibTorch's cache:
  /// memory that a kernel of the stream may still use is handed out again only there; where that
  /// stream is being captured into a CUDA graph by now, another stream and its share. From now on
  /// the event follows that, too. For the thread that has the turn.
  [[nodiscard]] virtual at::Tensor allocate(const std::function<at::Tensor()>& make) = 0;
  /// Returns memory of the host that the device reaches, for a result that there is no memory for
  /// on the device.
  [[nodiscard]] virtual at::Tensor allocate_on_host(at::IntArrayRef sizes,
                                                    const at::TensorOptions& options) = 0;
  /// Makes the stream that is current now wait for what follows the outputs, once for each batch.
  /// Where that is another stream, it keeps the memory of `tensors` from being handed out again
  /// before it has passed what is queued on it until they are freed.
  virtual void hand_over(const std::vector<at::Tensor>& tensors,
                         const std::vector<HandleState::Completion>& completions) const = 0;
};

/// Returns the point at which the current stream of the tensor's device stands; null for host
/// tensors. Throws InvalidArgument, which begins with `what`, where that stream is being captured
/// into a CUDA graph: what ranks have to agree on cannot be replayed.
std::shared_ptr<StreamPoint> stream_point(const at::Tensor& tensor, const std::string& what);
/// Makes the current stream of the tensor's device wait for what follows the outputs. Throws as
/// stream_point does.
void wait_on_current_stream(const at::Tensor& tensor,
                            const std::vector<HandleState::Completion>& completions,
                            const std::string& what);
/// Has LibTorch give back what it keeps in its cache where this library finds no memory on a GPU.
/// `current`: that GPU becomes the calling thread's current one, without a context on it before it
/// is used.
void set_up_device(int device, bool current);

}  // namespace hvd::detail
