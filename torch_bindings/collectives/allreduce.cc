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

std::shared_ptr<Operation> allreduction(const Tensors& tensors, const AllreduceOptions& options, Form form) {
  constexpr std::string_view kWhat = "allreduce";
  detail::check_group(tensors, kWhat, options.name, form);
  options.compression.refuse_memory(kWhat);
  const bool differentiable = form == Form::Fresh && detail::needs_gradient(tensors);
  auto operation = std::make_shared<Operation>();
  operation->given = tensors;
  operation->in_place = form == Form::InPlace;
  operation->submission = request(OpKind::Allreduce, options, detail::device_of(tensors.front()));
  const at::NoGradGuard no_gradient;
  const Tensors all_dense = form == Form::InPlace ? detail::dense_in_place(tensors) : Tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const DataType dtype = detail::data_type_of(tensor, kWhat);
    const DataType wire = options.compression.wire_type(dtype);
    const at::Tensor dense = form == Form::InPlace ? all_dense[i] : detail::dense_of(tensor);
    if (wire != dtype) {
      const at::Tensor packed = detail::empty_shared(tensor.sizes(), dense.options().dtype(detail::scalar_type_of(wire)));
      packed.copy_(dense);
      operation->add(packed, packed, kWhat);
      operation->results.push_back(form == Form::InPlace ? tensor : at::empty(tensor.sizes(), dense.options()));
    } else if (form == Form::InPlace) {
      operation->add(dense, dense, kWhat);
      operation->results.push_back(dense.is_alias_of(tensor) ? dense : tensor);
    } else {
      const at::Tensor output = detail::empty_shared(tensor.sizes(), dense.options());
      operation->add(dense, output, kWhat);
      operation->results.push_back(output);
    }
  }
  if (differentiable) operation->backward = allreduce_rule(options);
  return operation;
}

}  // namespace

at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options) {
  if (detail::may_run_small(tensor, options) && !detail::needs_gradient({tensor})) {
    SmallCall call = detail::small_call(OpKind::Allreduce, tensor, options);
    if (const auto output = at::empty(tensor.sizes(), tensor.options().requires_grad(false)); detail::run_small(call, output))
      return output;
  }
  return detail::start(allreduction({tensor}, options, Form::Fresh), After::Wait).wait().front();
}
at::Tensor allreduce_(at::Tensor tensor, const AllreduceOptions& options) {
  if (detail::may_run_small(tensor, options) && !detail::changes_history(tensor, "allreduce", options.name)) {
    SmallCall call = detail::small_call(OpKind::Allreduce, tensor, options);
    if (detail::run_small_in_place(call, tensor)) return tensor;
  }
  return detail::run_in_place("allreduce", {tensor}, options, allreduction, allreduce_rule).front();
}
Handle<at::Tensor> allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options) {
  return detail::first(detail::start(allreduction({tensor}, options, Form::Fresh), After::Return));
}
Handle<at::Tensor> allreduce_async_(at::Tensor tensor, const AllreduceOptions& options) {
  return detail::first(detail::start_in_place("allreduce", {tensor}, options, allreduction, allreduce_rule));
}

Tensors grouped_allreduce(const Tensors& tensors, const AllreduceOptions& options) {
  return detail::start(allreduction(tensors, options, Form::Fresh), After::Wait).wait();
}
Tensors grouped_allreduce_(Tensors tensors, const AllreduceOptions& options) {
  if (detail::run_small_in_place(tensors, options)) return tensors;
  return detail::run_in_place("allreduce", tensors, options, allreduction, allreduce_rule);
}
Handle<Tensors> grouped_allreduce_async(const Tensors& tensors, const AllreduceOptions& options) {
  return detail::start(allreduction(tensors, options, Form::Fresh), After::Return);
}
Handle<Tensors> grouped_allreduce_async_(Tensors tensors, const AllreduceOptions& options) {
  return detail::start_in_place("allreduce", tensors, options, allreduction, allreduce_rule);
}

}  // namespace hvd
