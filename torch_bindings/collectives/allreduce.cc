// Allreduce of tensors.
#include <torch/torch.h>

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

detail::GradientRule allreduce_rule(const AllreduceOptions& options) {
  return [options](const Tensors& gradients) {
    AllreduceOptions same = options;
    same.name = detail::gradient_name(options.name, gradients);
    return grouped_allreduce(gradients, same);
  };
}

std::shared_ptr<Operation> allreduction(const Tensors& tensors, const AllreduceOptions& options,
                                        Form form) {
  return detail::operation_of_same_shapes(OpKind::Allreduce, tensors, options, form,
                                          options.compression, allreduce_rule);
}

}  // namespace

at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  if (detail::may_run_small(tensor, options) && !detail::needs_gradient({tensor})) {
    SmallCall call = detail::small_call(OpKind::Allreduce, tensor, options);
    if (const auto output = at::empty(tensor.sizes(), tensor.options().requires_grad(false));
        detail::run_small(call, output))
      return output;
  }
  return detail::start(allreduction({tensor}, options, Form::Fresh), After::Wait).wait().front();
}
at::Tensor allreduce_(at::Tensor tensor, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  if (detail::may_run_small(tensor, options) &&
      !detail::changes_history(tensor, "allreduce", options.name)) {
    SmallCall call = detail::small_call(OpKind::Allreduce, tensor, options);
    if (detail::run_small_in_place(call, tensor)) return tensor;
  }
  return detail::run_in_place("allreduce", {tensor}, options, allreduction, allreduce_rule).front();
}
Handle<at::Tensor> allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  return detail::first(detail::start(allreduction({tensor}, options, Form::Fresh), After::Return));
}
Handle<at::Tensor> allreduce_async_(at::Tensor tensor, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  return detail::first(
      detail::start_in_place("allreduce", {tensor}, options, allreduction, allreduce_rule));
}

Tensors grouped_allreduce(const Tensors& tensors, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  return detail::start(allreduction(tensors, options, Form::Fresh), After::Wait).wait();
}
Tensors grouped_allreduce_(Tensors tensors, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  if (detail::run_small_in_place(tensors, options)) return tensors;
  return detail::run_in_place("allreduce", tensors, options, allreduction, allreduce_rule);
}
Handle<Tensors> grouped_allreduce_async(const Tensors& tensors, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  return detail::start(allreduction(tensors, options, Form::Fresh), After::Return);
}
Handle<Tensors> grouped_allreduce_async_(Tensors tensors, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  return detail::start_in_place("allreduce", tensors, options, allreduction, allreduce_rule);
}

}  // namespace hvd
