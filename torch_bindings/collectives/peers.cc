// send and recv of tensors.
// Tested in tests/torch_bindings/collectives/peers_test.cc
#include <torch/torch.h>

#include <memory>
#include <mutex>
#include <utility>

#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/history.h"
#include "torch_bindings/collectives/in_place.h"
#include "torch_bindings/collectives/operation.h"

namespace hvd {

namespace {

using detail::Form;

/// A tensor of the caller's, and where its message lies: in it, or in host memory of its own.
struct Landing {
  at::Tensor tensor, memory;
  std::once_flag written;

  explicit Landing(at::Tensor to) : tensor(std::move(to)) {
    detail::check_group({tensor}, "recv", "", Form::InPlace);
    const bool is_plain =
        tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
    memory = is_plain ? tensor.detach()
                      : at::empty(tensor.sizes(),
                                  tensor.options().device(at::kCPU).requires_grad(false));
  }
  /// Comes once the message is there.
  void write() {
    std::call_once(written, [this] {
      const at::NoGradGuard no_gradient;
      if (!memory.is_alias_of(tensor)) tensor.detach().copy_(memory);
      detail::note_change(tensor);
    });
  }
};

/// Returns the tensor's values as they travel: on the host, dense.
at::Tensor departing(const at::Tensor& tensor) {
  detail::check_group({tensor}, "send", "", Form::Fresh);
  const at::NoGradGuard no_gradient;
  return detail::dense_of(tensor.detach().cpu());
}

}  // namespace

void send(const at::Tensor& tensor, const PeerOptions& options) {
  const WorldScope scope(options.world);
  send(detail::buffer_of(departing(tensor), "send"), options);
}

Handle<void> send_async(const at::Tensor& tensor, const PeerOptions& options) {
  const WorldScope scope(options.world);
  auto owner = std::make_shared<at::Tensor>(departing(tensor));
  const Buffer buffer = detail::buffer_of(*owner, "send");
  return send_async(buffer, options, std::move(owner));
}

int recv(at::Tensor tensor, const PeerOptions& options) {
  const WorldScope scope(options.world);
  Landing landing(std::move(tensor));
  const int from = recv(detail::buffer_of(landing.memory, "recv"), options);
  landing.write();
  return from;
}

Handle<int> recv_async(at::Tensor tensor, const PeerOptions& options) {
  const WorldScope scope(options.world);
  const auto landing = std::make_shared<Landing>(std::move(tensor));
  const Buffer buffer = detail::buffer_of(landing->memory, "recv");
  return recv_async(buffer, options, landing).map<int>([landing](int from) {
    landing->write();
    return from;
  });
}

}  // namespace hvd
