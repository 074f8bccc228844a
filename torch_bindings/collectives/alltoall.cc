// Alltoall of tensors.
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/in_place.h"
#include "torch_bindings/collectives/operation.h"
#include "torch_bindings/collectives/small_calls.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd {

at::Device detail::device_of_splits(const AlltoallOptions& options) {
  return options.splits ? options.splits->device() : at::Device(at::kCPU);
}

at::Tensor detail::received_splits(const std::vector<std::int64_t>& rows, at::Device device) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const bool is_wide = std::ranges::any_of(rows, [](std::int64_t here) { return here > kMost; });
  return torch::tensor(rows, at::kLong).to(device, is_wide ? at::kLong : at::kInt);
}

std::vector<std::int64_t> detail::splits_of(const at::Tensor& tensor,
                                            const AlltoallOptions& options) {
  const int ranks = options.process_set.size();
  if (!options.splits)
    return tensor.dim() == 0 ? std::vector<std::int64_t>{}
                             : even_splits(tensor.size(0), ranks, options.name);
  const at::Tensor& splits = *options.splits;
  if (!splits.defined())
    throw InvalidArgument(
        formatted("alltoall '{}': the splits are an undefined tensor", options.name));
  const bool whole = splits.scalar_type() == at::kInt || splits.scalar_type() == at::kLong;
  if (!whole || splits.dim() != 1)
    throw InvalidArgument(
        formatted("alltoall '{}': splits must be a 1-D tensor of int32 or int64", options.name));
  const at::Tensor here = splits.detach().to(at::kCPU, at::kLong).contiguous();
  return {here.const_data_ptr<std::int64_t>(), here.const_data_ptr<std::int64_t>() + here.numel()};
}

namespace {

using detail::Operation;
using Tensors = std::vector<at::Tensor>;

/// `rows`: of the operation, once it is done.
detail::GradientRule exchange_rule(const AlltoallOptions& options, const at::Tensor& input,
                                   const std::vector<std::int64_t>& splits,
                                   const std::shared_ptr<Operation::Rows>& rows) {
  if (input.dim() == 0) return {};  // the engine refuses scalars
  const std::int64_t unsent =
      input.size(0) - std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
  return [options, unsent, rows](const Tensors& gradients) {
    AlltoallOptions back{
        .name = detail::gradient_name(options.name, gradients, /*rows_differ=*/true),
        .splits = {},
        .process_set = options.process_set};
    back.splits = torch::tensor(rows->at(0));
    at::Tensor gradient = alltoall(gradients.front(), back).output;
    if (unsent > 0) {
      auto sizes = gradient.sizes().vec();
      sizes.front() = unsent;
      gradient = at::cat({gradient, at::zeros(sizes, gradient.options())});
    }
    return Tensors{gradient};
  };
}

std::shared_ptr<Operation> exchanging(const at::Tensor& tensor, const AlltoallOptions& options) {
  auto operation = detail::operation_by_rows(OpKind::Alltoall, Tensors{tensor}, options);
  const auto splits = detail::splits_of(tensor, options);
  operation->submission.tensors.front().splits = splits;
  if (detail::needs_gradient({tensor}))
    operation->backward = exchange_rule(options, tensor, splits, operation->rows);
  return operation;
}

Handle<AlltoallResult> with_splits(const Handle<Tensors>& handle,
                                   const std::shared_ptr<Operation>& operation,
                                   const AlltoallOptions& options) {
  const at::Device device = detail::device_of_splits(options);
  return handle.map<AlltoallResult>([rows = operation->rows, device](const Tensors& tensors) {
    return AlltoallResult{tensors.front(), detail::received_splits(rows->at(0), device)};
  });
}

Handle<AlltoallResult> start_exchange(const std::shared_ptr<Operation>& operation,
                                      const AlltoallOptions& options, After after) {
  return with_splits(detail::start(operation, after), operation, options);
}

Handle<AlltoallResult> exchange_into(at::Tensor output, const at::Tensor& input,
                                     const AlltoallOptions& options, After after) {
  const detail::Target target(std::move(output), input, OpKind::Alltoall, options.name);
  const auto splits = detail::splits_of(input, options);
  const auto operation = target.operation(options, splits);
  const auto rule = exchange_rule(options, input, splits, operation->rows);
  return with_splits(target.start(operation, after, rule), operation, options);
}

}  // namespace

AlltoallResult alltoall(const at::Tensor& tensor, const AlltoallOptions& options) {
  const WorldScope scope(options.world);
  if (detail::is_plain(tensor) && detail::is_small(tensor, OpKind::Alltoall) && tensor.dim() > 0) {
    const auto splits = detail::splits_of(tensor, options);
    std::vector<std::int64_t> received(splits.size());
    const at::Tensor output =
        detail::run_by_rows(OpKind::Alltoall, tensor, options, splits, received);
    if (output.defined())
      return {output, detail::received_splits(received, detail::device_of_splits(options))};
  }
  return start_exchange(exchanging(tensor, options), options, After::Wait).wait();
}
Handle<AlltoallResult> alltoall_async(const at::Tensor& tensor, const AlltoallOptions& options) {
  const WorldScope scope(options.world);
  return start_exchange(exchanging(tensor, options), options, After::Return);
}

AlltoallResult alltoall_into(at::Tensor output, const at::Tensor& input,
                             const AlltoallOptions& options) {
  const WorldScope scope(options.world);
  return exchange_into(std::move(output), input, options, After::Wait).wait();
}
Handle<AlltoallResult> alltoall_into_async(at::Tensor output, const at::Tensor& input,
                                           const AlltoallOptions& options) {
  const WorldScope scope(options.world);
  return exchange_into(std::move(output), input, options, After::Return);
}

}  // namespace hvd
