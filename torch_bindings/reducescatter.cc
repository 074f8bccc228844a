// Reducescatter of tensors.
#include <torch/torch.h>

#include "hvd/engine/engine.h"
#include "torch_bindings/collectives.h"
#include "torch_bindings/operation.h"
#include "torch_bindings/small_calls.h"
#include "torch_bindings/tensors.h"

namespace hvd {

namespace {

using detail::Form;
using detail::Operation;
using Tensors = std::vector<at::Tensor>;

std::shared_ptr<Operation> scattering(const Tensors& tensors, const ReducescatterOptions& options) {
  constexpr std::string_view kWhat = "reducescatter";
  detail::check_group(tensors, kWhat, options.name, Form::Fresh);
  auto operation = std::make_shared<Operation>();
  operation->given = tensors;
  operation->submission = request(OpKind::Reducescatter, options, detail::device_of(tensors.front()));
  for (const auto& tensor : tensors) operation->add(detail::dense_of(tensor), {}, kWhat);
  detail::allocate_rows(operation);
  if (detail::needs_gradient(tensors)) {
    operation->backward = [options](const Tensors& gradients) {
      const std::string name = options.name.empty() ? "" : options.name + ".gradient";
      const double ranks = options.op == ReduceOp::Sum ? options.process_set.size() : 1;
      Tensors whole = grouped_allgather(gradients, {.name = name, .process_set = options.process_set});
      for (auto& gradient : whole) gradient.mul_(ranks * options.prescale_factor * options.postscale_factor);
      return whole;
    };
  }
  return operation;
}

}  // namespace

at::Tensor reducescatter(const at::Tensor& tensor, const ReducescatterOptions& options) {
  if (const auto own = detail::run_by_rows(OpKind::Reducescatter, tensor, options); own.defined()) return own;
  return detail::start(scattering({tensor}, options), After::Wait).wait().front();
}
Handle<at::Tensor> reducescatter_async(const at::Tensor& tensor, const ReducescatterOptions& options) {
  return detail::first(detail::start(scattering({tensor}, options), After::Return));
}
Tensors grouped_reducescatter(const Tensors& tensors, const ReducescatterOptions& options) {
  return detail::start(scattering(tensors, options), After::Wait).wait();
}
Handle<Tensors> grouped_reducescatter_async(const Tensors& tensors, const ReducescatterOptions& options) {
  return detail::start(scattering(tensors, options), After::Return);
}

}  // namespace hvd
