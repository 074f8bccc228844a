// Allgather of tensors.
#include <torch/torch.h>

#include <numeric>
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

/// `rows`: of the operation, once it is done.
detail::GradientRule gather_rule(const Tensors& tensors, const AllgatherOptions& options,
                                 const std::shared_ptr<Operation::Rows>& rows) {
  return [options, rows, places = detail::differentiable(tensors)](const Tensors& gradients) {
    const std::string name = detail::gradient_name(options.name, gradients);
    const Tensors means =
        grouped_allreduce(gradients, {.name = name, .process_set = options.process_set});
    const auto self = static_cast<std::size_t>(options.process_set.rank());
    Tensors own;
    for (std::size_t i = 0; i < means.size(); ++i) {
      const auto& of_ranks = rows->at(places[i]);
      const auto begin = std::accumulate(
          of_ranks.begin(), of_ranks.begin() + static_cast<std::ptrdiff_t>(self), std::int64_t{0});
      own.push_back(means[i].slice(0, begin, begin + of_ranks[self]));
    }
    return own;
  };
}

std::shared_ptr<Operation> gathering(const Tensors& tensors, const AllgatherOptions& options) {
  auto operation = detail::operation_by_rows(OpKind::Allgather, tensors, options);
  if (detail::needs_gradient(tensors))
    operation->backward = gather_rule(tensors, options, operation->rows);
  return operation;
}

Handle<Tensors> gather_into(const detail::Target& target, const AllgatherOptions& options,
                            After after) {
  const auto operation = target.operation(options);
  return target.start(operation, after, gather_rule({target.output()}, options, operation->rows));
}

}  // namespace

at::Tensor allgather(const at::Tensor& tensor, const AllgatherOptions& options) {
  const WorldScope scope(options.world);
  if (const auto gathered = detail::run_by_rows(OpKind::Allgather, tensor, options);
      gathered.defined())
    return gathered;
  return detail::start(gathering({tensor}, options), After::Wait).wait().front();
}
Handle<at::Tensor> allgather_async(const at::Tensor& tensor, const AllgatherOptions& options) {
  const WorldScope scope(options.world);
  return detail::first(detail::start(gathering({tensor}, options), After::Return));
}
Tensors grouped_allgather(const Tensors& tensors, const AllgatherOptions& options) {
  const WorldScope scope(options.world);
  return detail::start(gathering(tensors, options), After::Wait).wait();
}
Handle<Tensors> grouped_allgather_async(const Tensors& tensors, const AllgatherOptions& options) {
  const WorldScope scope(options.world);
  return detail::start(gathering(tensors, options), After::Return);
}

at::Tensor allgather_into(at::Tensor output, const at::Tensor& input,
                          const AllgatherOptions& options) {
  const WorldScope scope(options.world);
  const detail::Target target(std::move(output), input, OpKind::Allgather, options.name);
  if (!target.run_small(options)) gather_into(target, options, After::Wait);
  return target.output();
}
Handle<at::Tensor> allgather_into_async(at::Tensor output, const at::Tensor& input,
                                        const AllgatherOptions& options) {
  const WorldScope scope(options.world);
  const detail::Target target(std::move(output), input, OpKind::Allgather, options.name);
  return detail::first(gather_into(target, options, After::Return));
}

}  // namespace hvd
