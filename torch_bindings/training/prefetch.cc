#include "torch_bindings/training/prefetch.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include "hvd/base/text.h"
#include "torch_bindings/platform/stream_set.h"

namespace hvd::detail {

struct DeviceFeed::Stream {
  c10::impl::VirtualGuardImpl device;  ///< LibTorch's door to whatever device that is
  c10::Stream own;
};

struct DeviceFeed::Mark {
  StreamEvent event;
};

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
  stream_ = std::make_unique<Stream>(Stream{guard, guard.getStreamFromGlobalPool(device)});
}

DeviceFeed::~DeviceFeed() = default;

std::shared_ptr<DeviceFeed::Mark> DeviceFeed::send(const std::vector<at::Tensor*>& tensors) {
  if (tensors.empty())
    throw InvalidArgument(
        "prefetch_to_device: a batch in which no tensor can be found; give tensors, "
        "torch::data::Example, or lists, tuples and maps of them");
  const c10::MultiStreamGuard guard(stream_->own);  // of the stream alone: no device is current
  const at::NoGradGuard no_gradient;
  for (at::Tensor* const tensor : tensors) {
    const bool pinned = tensor->is_cpu() && tensor->layout() == at::kStrided;
    *tensor = (pinned ? tensor->pin_memory() : *tensor)
                  .to(stream_->own.device(), /*non_blocking=*/pinned);
  }
  const auto mark = std::make_shared<Mark>(Mark{StreamEvent(stream_->own.device())});
  mark->event.record(stream_->own);
  return mark;
}

void DeviceFeed::receive(const Mark& mark, const std::vector<at::Tensor*>& tensors) {
  const c10::Stream current = stream_->device.getStream(stream_->own.device());
  mark.event.block(current);
  for (at::Tensor* const tensor : tensors)
    if (tensor->layout() == at::kStrided) tensor->record_stream(current);
}

void check_depth(std::size_t depth) {
  if (depth == 0)
    throw InvalidArgument("prefetch_to_device: a depth of 0 reads nothing ahead; give 1 at least");
}

}  // namespace hvd::detail
