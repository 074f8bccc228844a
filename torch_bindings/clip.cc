#include "torch_bindings/clip.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "hvd/base/text.h"

namespace hvd {

namespace {

/// What there is of the gradients, each once; of sparse ones the values.
std::vector<at::Tensor> values_of_gradients(DistributedOptimizer& optimizer) {
  std::vector<at::Tensor> values;
  std::set<const void*> seen;
  for (auto& group : optimizer.param_groups()) {
    for (auto& parameter : group.params()) {
      at::Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      if (gradient.is_sparse() && !gradient.is_coalesced()) gradient = gradient.coalesce();
      values.push_back(gradient.is_sparse() ? gradient._values() : gradient);
    }
  }
  return values;
}

double norm_of(const std::vector<at::Tensor>& all, double norm_type) {
  std::map<std::string, std::vector<at::Tensor>> norms;  // by device: one transfer from each
  for (const auto& values : all) {
    if (values.numel() == 0) continue;
    const bool sixteen_bits = values.scalar_type() == at::kHalf || values.scalar_type() == at::kBFloat16;
    const at::Tensor wide = sixteen_bits ? values.to(at::kFloat) : values;
    norms[values.device().str()].push_back(at::linalg_vector_norm(wide, norm_type).to(at::kDouble));
  }
  std::vector<at::Tensor> here;
  for (const auto& [device, each] : norms) here.push_back(at::stack(each).cpu());
  return here.empty() ? 0 : at::linalg_vector_norm(at::cat(here), norm_type).item<double>();
}

}  // namespace

double clip_grad_norm_(DistributedOptimizer& optimizer, double max_norm, double norm_type) {
  if (!(max_norm >= 0)) throw InvalidArgument(formatted("clip_grad_norm_: max_norm is {}; it must be at least 0", max_norm));
  if (!(norm_type > 0)) throw InvalidArgument(formatted("clip_grad_norm_: norm_type is {}; it must be greater than 0", norm_type));
  optimizer.synchronize_once();
  const at::NoGradGuard no_gradient;
  const auto all = values_of_gradients(optimizer);
  const double norm = norm_of(all, norm_type);
  const double factor = max_norm / (norm + 1e-6);
  if (factor >= 1) return norm;
  for (const auto& values : all) values.mul_(factor);
  return norm;
}

}  // namespace hvd
