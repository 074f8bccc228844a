#include "torch_bindings/training/prefetch.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include "hvd/base/text.h"
#include "torch_bindings/platform/stream_set.h"

namespace hvd::detail {

DeviceFeed::DeviceFeed(at::Device device) {
  if (device.is_cpu()) return;
  const auto count = c10::impl::hasDeviceGuardImpl(device.type())
                         ? c10::impl::VirtualGuardImpl(device.type()).deviceCount()
                         : 0;
  if (count == 0 || device.index() >= static_cast<int>(count))
    throw InvalidArgument(formatted("prefetch_to_device: there is no {} here ({} of the kind)",
                                    device.str(), static_cast<int>(count)));
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (!device.has_index()) device = guard.getDevice();
  stream_ = guard.getStreamFromGlobalPool(device);
}

std::shared_ptr<StreamEvent> DeviceFeed::send(const std::vector<at::Tensor*>& tensors) {
  if (tensors.empty())
    throw InvalidArgument(
        "prefetch_to_device: a batch in which no tensor can be found; give tensors, "
        "torch::data::Example, or lists, tuples and maps of them");
  const c10::MultiStreamGuard guard(*stream_);  // of the stream alone: no device is current
  const at::NoGradGuard no_gradient;
  for (at::Tensor* const tensor : tensors) {
    const bool pinned = tensor->is_cpu() && tensor->layout() == at::kStrided;
    *tensor =
        (pinned ? tensor->pin_memory() : *tensor).to(stream_->device(), /*non_blocking=*/pinned);
  }
  auto sent = std::make_shared<StreamEvent>(stream_->device());
  sent->record(*stream_);
  return sent;
}

void DeviceFeed::receive(const StreamEvent& sent, const std::vector<at::Tensor*>& tensors) {
  const c10::impl::VirtualGuardImpl guard(stream_->device_type());
  const c10::Stream current = guard.getStream(stream_->device());
  sent.block(current);
  for (at::Tensor* const tensor : tensors)
    if (tensor->layout() == at::kStrided) tensor->record_stream(current);
}

}  // namespace hvd::detail
