// Reducescatter of tensors.
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

using detail::Operation;
using Tensors = std::vector<at::Tensor>;

detail::GradientRule scatter_rule(const ReducescatterOptions& options) {
  return [options](const Tensors& gradients) {
    const std::string name = detail::gradient_name(options.name, gradients, /*rows_differ=*/true);
    const double ranks = options.op == ReduceOp::Sum ? options.process_set.size() : 1;
    Tensors whole =
        grouped_allgather(gradients, {.name = name, .process_set = options.process_set});
    for (auto& gradient : whole)
      gradient.mul_(ranks * options.prescale_factor * options.postscale_factor);
    return whole;
  };
}

/// Returns the tensor in one dimension if elements are counted, and as it is otherwise, or where it
/// is refused later.
at::Tensor dealt(const at::Tensor& tensor, const ReducescatterOptions& options) {
  return options.counts.empty() || !tensor.defined() || tensor.layout() != at::kStrided
             ? tensor
             : tensor.reshape({-1});
}

std::shared_ptr<Operation> scattering(const Tensors& given, const ReducescatterOptions& options) {
  require_running();
  const auto counts = counts_of(options, given.size());
  Tensors tensors;
  for (const auto& tensor : given) tensors.push_back(dealt(tensor, options));
  auto operation = detail::operation_by_rows(OpKind::Reducescatter, tensors, options);
  operation->submission.tensors.front().splits = counts;
  if (detail::needs_gradient(tensors)) operation->backward = scatter_rule(options);
  return operation;
}

Handle<Tensors> scatter_into(const detail::Target& target, const ReducescatterOptions& options,
                             After after) {
  const auto operation = target.operation(options, options.counts);
  return target.start(operation, after, scatter_rule(options));
}

}  // namespace

at::Tensor reducescatter(const at::Tensor& tensor, const ReducescatterOptions& options) {
  const WorldScope scope(options.world);
  if (options.counts.empty())
    if (const auto own = detail::run_by_rows(OpKind::Reducescatter, tensor, options); own.defined())
      return own;
  return detail::start(scattering({tensor}, options), After::Wait).wait().front();
}
Handle<at::Tensor> reducescatter_async(const at::Tensor& tensor,
                                       const ReducescatterOptions& options) {
  const WorldScope scope(options.world);
  return detail::first(detail::start(scattering({tensor}, options), After::Return));
}
Tensors grouped_reducescatter(const Tensors& tensors, const ReducescatterOptions& options) {
  const WorldScope scope(options.world);
  return detail::start(scattering(tensors, options), After::Wait).wait();
}
Handle<Tensors> grouped_reducescatter_async(const Tensors& tensors,
                                            const ReducescatterOptions& options) {
  const WorldScope scope(options.world);
  return detail::start(scattering(tensors, options), After::Return);
}

at::Tensor reducescatter_into(at::Tensor output, const at::Tensor& input,
                              const ReducescatterOptions& options) {
  const WorldScope scope(options.world);
  const detail::Target target(std::move(output), dealt(input, options), OpKind::Reducescatter,
                              options.name);
  if (!options.counts.empty() || !target.run_small(options))
    scatter_into(target, options, After::Wait);
  return target.output();
}
Handle<at::Tensor> reducescatter_into_async(at::Tensor output, const at::Tensor& input,
                                            const ReducescatterOptions& options) {
  const WorldScope scope(options.world);
  const detail::Target target(std::move(output), dealt(input, options), OpKind::Reducescatter,
                              options.name);
  return detail::first(scatter_into(target, options, After::Return));
}

}  // namespace hvd
