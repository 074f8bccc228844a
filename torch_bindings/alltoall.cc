// Alltoall of tensors.
#include <torch/torch.h>

#include <numeric>

#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/collectives.h"
#include "torch_bindings/operation.h"
#include "torch_bindings/tensors.h"

namespace hvd {

namespace {

using detail::Form;
using detail::Operation;
using Tensors = std::vector<at::Tensor>;

std::vector<std::int64_t> splits_of(const at::Tensor& tensor, const AlltoallOptions& options) {
  const int ranks = options.process_set.size();
  if (!options.splits) return tensor.dim() == 0 ? std::vector<std::int64_t>{} : even_splits(tensor.size(0), ranks, options.name);
  const at::Tensor& splits = *options.splits;
  if (!splits.defined()) throw InvalidArgument(formatted("alltoall '{}': the splits are an undefined tensor", options.name));
  const bool whole = splits.scalar_type() == at::kInt || splits.scalar_type() == at::kLong;
  if (!whole || splits.dim() != 1)
    throw InvalidArgument(formatted("alltoall '{}': splits must be a 1-D tensor of int32 or int64", options.name));
  const at::Tensor here = splits.detach().to(at::kCPU, at::kLong).contiguous();
  return {here.const_data_ptr<std::int64_t>(), here.const_data_ptr<std::int64_t>() + here.numel()};
}

std::shared_ptr<Operation> exchanging(const at::Tensor& tensor, const AlltoallOptions& options) {
  constexpr std::string_view kWhat = "alltoall";
  detail::check_group({tensor}, kWhat, options.name, Form::Fresh);
  auto operation = std::make_shared<Operation>();
  operation->given = {tensor};
  operation->submission = request(OpKind::Alltoall, options, detail::device_of(tensor));
  operation->add(detail::dense_of(tensor), {}, kWhat);
  const auto splits = splits_of(tensor, options);
  operation->submission.tensors.front().splits = splits;
  detail::allocate_rows(operation);
  if (detail::needs_gradient({tensor})) {
    const std::int64_t unsent = tensor.size(0) - std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
    operation->backward = [options, unsent, rows = operation->rows](const Tensors& gradients) {
      AlltoallOptions back{
          .name = options.name.empty() ? "" : options.name + ".gradient", .splits = {}, .process_set = options.process_set};
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
  return operation;
}

Handle<AlltoallResult> start_exchange(const std::shared_ptr<Operation>& operation, const AlltoallOptions& options, After after) {
  const at::Device device = options.splits ? options.splits->device() : at::Device(at::kCPU);
  return detail::start(operation, after).map<AlltoallResult>([rows = operation->rows, device](const Tensors& tensors) {
    return AlltoallResult{tensors.front(), torch::tensor(rows->at(0), at::kLong).to(device, at::kInt)};
  });
}

}  // namespace

AlltoallResult alltoall(const at::Tensor& tensor, const AlltoallOptions& options) {
  return start_exchange(exchanging(tensor, options), options, After::Wait).wait();
}
Handle<AlltoallResult> alltoall_async(const at::Tensor& tensor, const AlltoallOptions& options) {
  return start_exchange(exchanging(tensor, options), options, After::Return);
}

}  // namespace hvd
