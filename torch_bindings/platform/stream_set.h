#pragma once
/// A StreamSet is the streams of a GPU on which tensors were written that are to be read together:
/// gradients of one bucket, say, where a part of the model has run on a stream of its own. Knows of
/// host tensors that they need none. Owns nothing. One thread at a time.
// Tested in tests/gpu/torch_streams.cc

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <vector>

namespace hvd::detail {

/// The streams of one group of tensors.
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

/// Returns the current stream of each of these devices; of the CPU none.
std::vector<c10::Stream> current_streams(const std::vector<at::Device>& devices);
/// Keeps the tensor's memory, when it is freed, from being handed out again before the current
/// stream has passed what is queued on it now.
void keep_for_current_stream(const at::Tensor& tensor);

}  // namespace hvd::detail
