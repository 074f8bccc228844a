#include "torch_bindings/collectives/encodings.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "hvd/base/text.h"

namespace hvd::detail {

namespace {

/// Does what orthonormal() does, in place and on the CPU; returns which columns are empty.
template <class T>
std::vector<std::int64_t> orthonormalise(at::Tensor& matrix) {
  auto p = matrix.accessor<T, 2>();
  const std::int64_t rows = matrix.size(0);
  std::vector<std::int64_t> empty;
  for (std::int64_t j = 0; j < matrix.size(1); ++j) {
    double before = 0;
    for (std::int64_t row = 0; row < rows; ++row)
      before += static_cast<double>(p[row][j]) * static_cast<double>(p[row][j]);
    for (std::int64_t i = 0; i < j; ++i) {
      double dot = 0;
      for (std::int64_t row = 0; row < rows; ++row)
        dot += static_cast<double>(p[row][i]) * static_cast<double>(p[row][j]);
      for (std::int64_t row = 0; row < rows; ++row)
        p[row][j] =
            static_cast<T>(static_cast<double>(p[row][j]) - dot * static_cast<double>(p[row][i]));
    }
    double after = 0;
    for (std::int64_t row = 0; row < rows; ++row)
      after += static_cast<double>(p[row][j]) * static_cast<double>(p[row][j]);
    constexpr double kRounding = 16 * static_cast<double>(std::numeric_limits<T>::epsilon());
    const bool none = !(std::sqrt(after) > kRounding * std::sqrt(before));
    const double scale = none ? 0 : 1 / std::sqrt(after);
    for (std::int64_t row = 0; row < rows; ++row)
      p[row][j] = static_cast<T>(static_cast<double>(p[row][j]) * scale);
    if (none) empty.push_back(j);
  }
  return empty;
}

template <class T>
at::Tensor product(const at::Tensor& left, const at::Tensor& right) {
  const auto p = left.accessor<T, 2>();
  const at::Tensor transposed = right.t().contiguous();
  const auto q = transposed.accessor<T, 2>();
  at::Tensor result = at::zeros({left.size(0), right.size(0)}, left.options());
  auto* to = result.mutable_data_ptr<T>();
  for (std::int64_t row = 0; row < left.size(0); ++row, to += right.size(0)) {
    for (std::int64_t j = 0; j < left.size(1); ++j) {
      const T factor = p[row][j];
      const T* from = q[j].data();
      for (std::int64_t column = 0; column < right.size(0); ++column)
        to[column] += factor * from[column];
    }
  }
  return result;
}

}  // namespace

std::string words_of(const Compression& compression) {
  switch (compression.kind()) {
    case Compression::Kind::Int8: return "int8";
    case Compression::Kind::TopK: return formatted("topk({})", compression.ratio());
    default: return formatted("powersgd({})", compression.rank());
  }
}

at::ScalarType encoded_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

bool is_encoded(const Compression& compression, const at::Tensor& tensor) {
  if (!compression.needs_memory() || !at::isFloatingType(tensor.scalar_type()) ||
      tensor.numel() == 0)
    return false;
  if (compression.kind() != Compression::Kind::PowerSgd) return true;
  if (tensor.dim() < 2) return false;
  const std::int64_t rows = tensor.size(0), columns = tensor.numel() / rows;
  return compression.rank() * (rows + columns) < rows * columns;
}

at::Tensor encode_int8(const at::Tensor& blocks) {
  at::Tensor scales = blocks.abs().amax(1, true).div_(127).to(at::kFloat);
  // too small to divide by: all is left out
  scales.masked_fill_(scales.lt(std::numeric_limits<float>::min()), 0);
  const at::Tensor wide = scales.to(blocks.scalar_type());
  at::Tensor steps = blocks * at::where(wide.gt(0), wide.reciprocal(), at::zeros_like(wide));
  // their scale says what they are
  if (!scales.isfinite().all().item<bool>()) steps.nan_to_num_(0, 0, 0);
  return at::cat({steps.round_().clamp_(-127, 127).to(at::kChar), scales.view(at::kChar)}, 1);
}
at::Tensor decode_int8(const at::Tensor& rows, at::ScalarType type) {
  const at::Tensor scales = rows.narrow(1, kInt8Block, sizeof(float)).contiguous().view(at::kFloat);
  return rows.narrow(1, 0, kInt8Block).to(type).mul_(scales.to(type));
}

std::pair<at::Tensor, at::Tensor> largest(const at::Tensor& values, double ratio) {
  const auto count = std::clamp<std::int64_t>(
      static_cast<std::int64_t>(std::ceil(ratio * static_cast<double>(values.numel()))), 1,
      values.numel());
  at::Tensor places = std::get<1>(values.abs().topk(count, 0, true, false));
  at::Tensor chosen = values.index_select(0, places);
  const bool narrow = values.numel() <= std::numeric_limits<std::int32_t>::max();
  return {narrow ? places.to(at::kInt) : places, chosen};
}

at::Tensor random_columns(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kDouble));
}

at::Tensor orthonormal(const at::Tensor& columns, std::vector<std::int64_t>* empty) {
  at::Tensor here = columns.cpu();
  if (here.is_same(columns)) here = here.clone();
  auto none = here.scalar_type() == at::kDouble ? orthonormalise<double>(here)
                                                : orthonormalise<float>(here);
  if (!columns.isfinite().all().item<bool>()) here.fill_(std::numeric_limits<double>::quiet_NaN());
  if (empty != nullptr) *empty = std::move(none);
  return here.to(columns.device());
}

at::Tensor low_rank_product(const at::Tensor& left, const at::Tensor& right) {
  if (!left.is_cpu()) return left.mm(right.t());
  return left.scalar_type() == at::kDouble ? product<double>(left, right)
                                           : product<float>(left, right);
}

}  // namespace hvd::detail
