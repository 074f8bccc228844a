#include "torch_bindings/platform/stream_set.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace hvd::detail {

namespace {
c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}
}  // namespace

void StreamSet::note(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return;
  const c10::Stream stream = current_stream(tensor.device());
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end())
    streams_.push_back(stream);
}

bool StreamSet::join(at::Device device) {
  const auto noted = std::exchange(streams_, {});
  if (noted.empty()) return false;
  const c10::Stream now = current_stream(device);
  bool others = false;
  for (const c10::Stream& stream : noted) {
    if (stream == now) continue;
    others = true;
    StreamEvent event(stream.device());
    event.record(stream);
    event.block(now);
  }
  return others;
}

std::vector<c10::Stream> current_streams(const std::vector<at::Device>& devices) {
  std::vector<c10::Stream> streams;
  for (const at::Device& device : devices)
    if (!device.is_cpu()) streams.push_back(current_stream(device));
  return streams;
}

void keep_for_current_stream(const at::Tensor& tensor) {
  if (tensor.is_cpu() || !tensor.has_storage()) return;
  const c10::impl::VirtualGuardImpl implementation(tensor.device().type());
  implementation.recordDataPtrOnStream(tensor.storage().data_ptr(),
                                       implementation.getStream(tensor.device()));
}

}  // namespace hvd::detail
