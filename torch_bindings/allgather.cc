// Allgather of tensors.
#include <torch/torch.h>

#include <numeric>

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

std::shared_ptr<Operation> gathering(const Tensors& tensors, const AllgatherOptions& options) {
  constexpr std::string_view kWhat = "allgather";
  detail::check_group(tensors, kWhat, options.name, Form::Fresh);
  auto operation = std::make_shared<Operation>();
  operation->given = tensors;
  operation->submission = request(OpKind::Allgather, options, detail::device_of(tensors.front()));
  for (const auto& tensor : tensors) operation->add(detail::dense_of(tensor), {}, kWhat);
  detail::allocate_rows(operation);
  if (detail::needs_gradient(tensors)) {
    operation->backward = [options, rows = operation->rows](const Tensors& gradients) {
      const std::string name = options.name.empty() ? "" : options.name + ".gradient";
      const Tensors means = grouped_allreduce(gradients, {.name = name, .process_set = options.process_set});
      const auto self = static_cast<std::size_t>(options.process_set.rank());
      Tensors own;
      for (std::size_t i = 0; i < means.size(); ++i) {
        const auto& of_ranks = rows->at(i);
        const auto begin = std::accumulate(of_ranks.begin(), of_ranks.begin() + static_cast<std::ptrdiff_t>(self), std::int64_t{0});
        own.push_back(means[i].slice(0, begin, begin + of_ranks[self]));
      }
      return own;
    };
  }
  return operation;
}

}  // namespace

at::Tensor allgather(const at::Tensor& tensor, const AllgatherOptions& options) {
  if (const auto gathered = detail::run_by_rows(OpKind::Allgather, tensor, options); gathered.defined()) return gathered;
  return detail::start(gathering({tensor}, options), After::Wait).wait().front();
}
Handle<at::Tensor> allgather_async(const at::Tensor& tensor, const AllgatherOptions& options) {
  return detail::first(detail::start(gathering({tensor}, options), After::Return));
}
Tensors grouped_allgather(const Tensors& tensors, const AllgatherOptions& options) {
  return detail::start(gathering(tensors, options), After::Wait).wait();
}
Handle<Tensors> grouped_allgather_async(const Tensors& tensors, const AllgatherOptions& options) {
  return detail::start(gathering(tensors, options), After::Return);
}

}  // namespace hvd
