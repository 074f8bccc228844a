/// Sparse tensors: what each rank has travels as rows of indices and rows of values, in one group.

#include <torch/torch.h>

#include "hvd/base/text.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd {

namespace {

void check(const at::Tensor& tensor, const AllreduceOptions& options) {
  if (!tensor.defined())
    throw InvalidArgument(
        formatted("sparse_allreduce '{}': an undefined tensor; a rank that has nothing to give gives one without entries", options.name));
  if (tensor.layout() != at::kSparse)
    throw InvalidArgument(formatted("sparse_allreduce '{}': the tensor is not sparse (COO); use allreduce", options.name));
  if (options.op != ReduceOp::Average && options.op != ReduceOp::Sum)
    throw InvalidArgument(
        formatted("sparse_allreduce '{}': {} of sparse tensors is not supported, only average and sum", options.name, name_of(options.op)));
  options.compression.refuse_memory("sparse_allreduce");
  const DataType dtype = detail::data_type_of(tensor, "sparse_allreduce", options.name);
  if (dtype == DataType::Bool) throw InvalidArgument(formatted("sparse_allreduce '{}': bool is not supported", options.name));
}

/// The sizes that the ranks sent, one row each, must be the same.
void check_sizes(const at::Tensor& sizes, const std::string& name, const std::vector<int>& ranks) {
  if (sizes.eq(sizes[0]).all().item<bool>()) return;
  std::string text;
  for (std::int64_t i = 0; i < sizes.size(0); ++i) {
    const at::Tensor row = sizes[i].contiguous();
    const Shape shape(row.const_data_ptr<std::int64_t>(), row.const_data_ptr<std::int64_t>() + row.numel());
    text += formatted("{}rank {}: {}", i == 0 ? "" : "; ", ranks[static_cast<std::size_t>(i)], to_string(shape));
  }
  throw Mismatch(formatted("sparse_allreduce '{}': the shape differs between ranks: {}", name, text));
}

at::Tensor scaled(const at::Tensor& values, double factor) { return factor == 1 ? values : values.mul(factor).to(values.scalar_type()); }

}  // namespace

Handle<at::Tensor> sparse_allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  check(tensor, options);
  const at::NoGradGuard no_gradient;
  const at::Tensor mine = tensor.detach().coalesce();
  const auto type = mine.scalar_type();
  const DataType wire = options.compression.wire_type(detail::data_type_of(mine, "sparse_allreduce"));
  const at::Tensor values = scaled(mine.values(), options.prescale_factor).to(detail::scalar_type_of(wire));
  const at::Tensor indices = mine.indices().t().contiguous();
  const at::Tensor sizes = torch::tensor(mine.sizes(), at::kLong).to(mine.device()).unsqueeze(0);
  const std::string name = options.name.empty() ? "" : options.name + ".sparse";
  const auto handle =
      grouped_allgather_async({sizes, indices, values}, {.name = name, .process_set = options.process_set, .deadline = options.deadline});
  // Who waits may be in another world.
  return handle.map<at::Tensor>([options, type, shape = mine.sizes().vec(), ranks = options.process_set.ranks()](const auto& parts) {
    const at::NoGradGuard no_gradient_here;
    check_sizes(parts[0].cpu(), options.name, ranks);
    at::Tensor sum = at::sparse_coo_tensor(parts[1].t(), parts[2].to(type), shape).coalesce();
    at::Tensor all = sum.values();
    if (options.op == ReduceOp::Average)
      all = all.div(static_cast<std::int64_t>(ranks.size()), at::isIntegralType(type, true) ? "trunc" : c10::optional<c10::string_view>());
    all = scaled(all.to(type), options.postscale_factor);
    return at::_sparse_coo_tensor_unsafe(sum.indices(), all, shape)._coalesced_(true);
  });
}

at::Tensor sparse_allreduce(const at::Tensor& tensor, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  return sparse_allreduce_async(tensor, options).wait();
}

}  // namespace hvd
