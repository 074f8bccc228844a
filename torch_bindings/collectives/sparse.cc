/// Sparse tensors: what each rank has travels as rows of indices and rows of values, in one group.

#include <torch/torch.h>

#include <bit>

#include "hvd/api/world.h"
#include "hvd/base/text.h"
#include "hvd/negotiation/values/signature.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd {

namespace {

void check(const at::Tensor& tensor, const AllreduceOptions& options) {
  require_running();
  if (!tensor.defined())
    throw InvalidArgument(
        formatted("sparse_allreduce '{}': an undefined tensor; a rank that has nothing to give "
                  "gives one without entries",
                  options.name));
  if (tensor.layout() != at::kSparse)
    throw InvalidArgument(formatted(
        "sparse_allreduce '{}': the tensor is not sparse (COO); use allreduce", options.name));
  if (options.op != ReduceOp::Average && options.op != ReduceOp::Sum)
    throw InvalidArgument(formatted(
        "sparse_allreduce '{}': {} of sparse tensors is not supported, only average and sum",
        options.name, name_of(options.op)));
  options.compression.refuse_memory("sparse_allreduce");
  const DataType dtype = detail::data_type_of(tensor, "sparse_allreduce", options.name);
  if (dtype == DataType::Bool)
    throw InvalidArgument(formatted("sparse_allreduce '{}': bool is not supported", options.name));
}

/// The numbers that come first in a row, before the type and the sizes: all ranks must ask for the
/// same.
constexpr std::int64_t kTerms = 3;
std::vector<std::int64_t> row_of(const at::Tensor& tensor, const AllreduceOptions& options) {
  std::vector<std::int64_t> row{
      static_cast<std::int64_t>(options.op), std::bit_cast<std::int64_t>(options.prescale_factor),
      std::bit_cast<std::int64_t>(options.postscale_factor),
      static_cast<std::int64_t>(detail::data_type_of(tensor, "sparse_allreduce"))};
  row.insert(row.end(), tensor.sizes().begin(), tensor.sizes().end());
  return row;
}

/// The rows that the ranks sent must be the same.
void check_rows(const at::Tensor& rows, const std::string& name, const std::vector<int>& ranks) {
  if (rows.eq(rows[0]).all().item<bool>()) return;
  const at::Tensor tensors = rows.slice(1, kTerms);
  const bool same_tensors = tensors.eq(tensors[0]).all().item<bool>();
  std::vector<std::string> texts;
  for (std::int64_t i = 0; i < rows.size(0); ++i) {
    const at::Tensor row = rows[i].contiguous();
    const auto* const said = row.const_data_ptr<std::int64_t>();
    texts.push_back(same_tensors
                        ? formatted("{} * {} * {}", name_of(static_cast<ReduceOp>(said[0])),
                                    std::bit_cast<double>(said[1]), std::bit_cast<double>(said[2]))
                        : formatted("{} {}", name_of(static_cast<DataType>(said[kTerms])),
                                    to_string(Shape(said + kTerms + 1, said + row.numel()))));
  }
  throw Mismatch(formatted("sparse_allreduce '{}': the {} between ranks: {}", name,
                           same_tensors ? "reduce op and scale factors differ" : "tensor differs",
                           grouped_by_rank(ranks, texts)));
}

/// Returns the type that values are added up in: as of dense tensors, sums of 16-bit floats and of
/// integers do not overflow on the way.
at::ScalarType type_of_sum(at::ScalarType type) {
  if (at::isIntegralType(type, true)) return at::kLong;
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

/// Multiplies as allreduce does: integers in double, and rounded toward zero.
at::Tensor scaled(const at::Tensor& values, double factor) {
  if (factor == 1) return values;
  const auto type = values.scalar_type();
  return at::isIntegralType(type, true) ? values.to(at::kDouble).mul(factor).to(type)
                                        : values.mul(factor);
}

}  // namespace

Handle<at::Tensor> sparse_allreduce_async(const at::Tensor& tensor,
                                          const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  check(tensor, options);
  const at::NoGradGuard no_gradient;
  const at::Tensor mine = tensor.detach().coalesce();
  const auto type = mine.scalar_type();
  const DataType wire =
      options.compression.wire_type(detail::data_type_of(mine, "sparse_allreduce"));
  const at::Tensor values = scaled(mine.values().to(type_of_sum(type)), options.prescale_factor)
                                .to(type)
                                .to(detail::scalar_type_of(wire));
  const at::Tensor indices = mine.indices().t().contiguous();
  const at::Tensor rows =
      torch::tensor(row_of(mine, options), at::kLong).to(mine.device()).unsqueeze(0);
  const std::string name = options.name.empty() ? "" : options.name + ".sparse";
  const auto handle = grouped_allgather_async(
      {rows, indices, values},
      {.name = name, .process_set = options.process_set, .deadline = options.deadline});
  // Who waits may be in another world.
  return handle.map<at::Tensor>([options, type, shape = mine.sizes().vec(),
                                 ranks = options.process_set.ranks()](const auto& parts) {
    const at::NoGradGuard no_gradient_here;
    check_rows(parts[0].cpu(), options.name, ranks);
    at::Tensor sum =
        at::sparse_coo_tensor(parts[1].t(), parts[2].to(type_of_sum(type)), shape).coalesce();
    at::Tensor all = sum.values();
    if (options.op == ReduceOp::Average)
      all = all.div(static_cast<std::int64_t>(ranks.size()),
                    at::isIntegralType(type, true) ? "trunc" : c10::optional<c10::string_view>());
    all = scaled(all, options.postscale_factor).to(type);
    return at::_sparse_coo_tensor_unsafe(sum.indices(), all, shape)._coalesced_(true);
  });
}

at::Tensor sparse_allreduce(const at::Tensor& tensor, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  return sparse_allreduce_async(tensor, options).wait();
}

}  // namespace hvd
