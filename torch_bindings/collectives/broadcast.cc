// Broadcast of tensors.
#include <torch/torch.h>

#include <utility>

#include "hvd/engine/engine.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/in_place.h"
#include "torch_bindings/collectives/operation.h"
#include "torch_bindings/collectives/small_calls.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd {

namespace {

using detail::Form;
using detail::Operation;
using Tensors = std::vector<at::Tensor>;

detail::GradientRule broadcast_rule(const BroadcastOptions& options) {
  return [options](const Tensors& gradients) {
    AllreduceOptions average{.name = detail::gradient_name(options.name, gradients),
                             .process_set = options.process_set};
    Tensors means = grouped_allreduce(gradients, average);
    if (rank() != options.root_rank)
      for (auto& mean : means) mean.zero_();
    return means;
  };
}

std::shared_ptr<Operation> broadcasting(const Tensors& tensors, const BroadcastOptions& options,
                                        Form form) {
  return detail::operation_of_same_shapes(OpKind::Broadcast, tensors, options, form,
                                          Compression::none(), broadcast_rule);
}

}  // namespace

at::Tensor broadcast(const at::Tensor& tensor, const BroadcastOptions& options) {
  const WorldScope scope(options.world);
  if (detail::is_plain(tensor) && detail::is_small(tensor, OpKind::Broadcast) &&
      !detail::needs_gradient({tensor})) {
    SmallCall call = detail::small_call(OpKind::Broadcast, tensor, options);
    const auto alike = tensor.options().requires_grad(false);
    const at::Tensor output = detail::is_tiny(tensor) ? at::empty(tensor.sizes(), alike)
                                                      : detail::empty_shared(tensor.sizes(), alike);
    if (detail::run_small(call, output)) return output;
  }
  return detail::start(broadcasting({tensor}, options, Form::Fresh), After::Wait).wait().front();
}
at::Tensor broadcast_(at::Tensor tensor, const BroadcastOptions& options) {
  const WorldScope scope(options.world);
  if (detail::is_plain(tensor) && detail::is_small(tensor, OpKind::Broadcast) &&
      !detail::changes_history(tensor, "broadcast", options.name)) {
    SmallCall call = detail::small_call(OpKind::Broadcast, tensor, options);
    if (detail::run_small_in_place(call, tensor)) return tensor;
  }
  return detail::run_in_place("broadcast", {tensor}, options, broadcasting, broadcast_rule).front();
}
Handle<at::Tensor> broadcast_async(const at::Tensor& tensor, const BroadcastOptions& options) {
  const WorldScope scope(options.world);
  return detail::first(detail::start(broadcasting({tensor}, options, Form::Fresh), After::Return));
}
Handle<at::Tensor> broadcast_async_(at::Tensor tensor, const BroadcastOptions& options) {
  const WorldScope scope(options.world);
  return detail::first(
      detail::start_in_place("broadcast", {tensor}, options, broadcasting, broadcast_rule));
}

namespace detail {
Handle<Tensors> grouped_broadcast_async_(Tensors tensors, std::vector<std::string> names,
                                         const BroadcastOptions& options) {
  const WorldScope scope(options.world);
  const auto operation = broadcasting(tensors, options, Form::InPlace);
  for (std::size_t i = 0; i < names.size(); ++i)
    operation->submission.tensors.at(i).name = std::move(names[i]);
  return detail::start(operation, After::Return);
}
}  // namespace detail

}  // namespace hvd
