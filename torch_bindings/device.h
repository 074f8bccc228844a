#pragma once
/// The few things LibTorch knows of a GPU's streams. The null twin (device_none.cc) is for builds without CUDA: there
/// are no GPU tensors there.

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "hvd/submission.h"

namespace hvd::detail {

/// A native event that follows all work queued so far on the current stream of the tensor's device; null for host tensors.
/// The event lives as long as the pointer.
std::shared_ptr<void> ready_event(const at::Tensor& tensor);
/// Makes the current stream of the tensor's device wait for what follows the outputs.
void wait_on_current_stream(const at::Tensor& tensor, const std::vector<HandleState::Completion>& completions);

}  // namespace hvd::detail
