#include "torch_bindings/optimizer/clip.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "hvd/base/text.h"
#include "hvd/negotiation/values/unit_names.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/precision/master_copies.h"

namespace hvd {

namespace {

/// A gradient: of a sparse one its values.
struct ToClip {
  at::Tensor parameter;
  at::Tensor values;
  bool has_master = false;  ///< then it is in 16 bits, and what is clipped is the fp32 gradient
                            ///< that the optimizer will see
};

/// Returns the gradients that there are, each once.
template <class Groups>
std::vector<ToClip> gradients_of(Groups& groups, const detail::MasterCopies* masters) {
  std::vector<ToClip> all;
  std::set<const void*> seen;
  for (auto& group : groups) {
    for (auto& parameter : group.params()) {
      at::Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      if (gradient.is_sparse() && !gradient.is_coalesced()) gradient = gradient.coalesce();
      all.push_back({parameter, gradient.is_sparse() ? gradient._values() : gradient,
                     masters != nullptr && detail::MasterCopy::is_for(parameter)});
    }
  }
  return all;
}

/// Returns the gradients that this rank has after `synchronize()`, its shares included.
std::vector<ToClip> gradients_of(DistributedOptimizer& optimizer) {
  auto all = gradients_of(optimizer.param_groups(), optimizer.master_copies());
  for (const auto& [name, share] : optimizer.gradient_shares())
    all.push_back({at::Tensor(), share});
  return all;
}

double norm_of(const std::vector<ToClip>& all, const detail::MasterCopies* masters,
               double norm_type) {
  std::map<std::string, std::vector<at::Tensor>> norms;  // by device: one transfer from each
  for (const auto& [parameter, values, has_master] : all) {
    if (values.numel() == 0) continue;
    const bool sixteen_bits =
        values.scalar_type() == at::kHalf || values.scalar_type() == at::kBFloat16;
    const at::Tensor wide = has_master     ? masters->wide(parameter, values)
                            : sixteen_bits ? values.to(at::kFloat)
                                           : values;
    norms[values.device().str()].push_back(at::linalg_vector_norm(wide, norm_type).to(at::kDouble));
  }
  std::vector<at::Tensor> here;
  for (const auto& [device, each] : norms) here.push_back(at::stack(each).cpu());
  return here.empty() ? 0 : at::linalg_vector_norm(at::cat(here), norm_type).item<double>();
}

void check_norm(double norm_type) {
  if (!(norm_type > 0))
    throw InvalidArgument(
        formatted("norm of the gradients: norm_type is {}; it must be greater than 0", norm_type));
}

void check_clipping(double max_norm, double norm_type) {
  if (!(max_norm >= 0))
    throw InvalidArgument(
        formatted("clip_grad_norm_: max_norm is {}; it must be at least 0", max_norm));
  check_norm(norm_type);
}

/// Collective. Returns the norm of the shares of all ranks. With a `refusal` on any rank all throw
/// Mismatch, with its words.
double norm_of_all_shares(double mine, const ProcessSet& process_set, double norm_type,
                          const std::string& refusal) {
  const bool largest = std::isinf(norm_type);
  const at::Tensor part = at::full({1}, largest ? mine : std::pow(mine, norm_type), at::kDouble);
  const AllreduceOptions options{.name = library_name("clip_grad_norm_/shares"),
                                 .op = largest ? ReduceOp::Max : ReduceOp::Sum,
                                 .process_set = process_set};
  const double all = detail::allreduce_unless_refused(part, options, refusal).item<double>();
  return largest ? all : std::pow(all, 1 / norm_type);
}

double clip(const std::vector<ToClip>& all, detail::MasterCopies* masters, double norm,
            double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  if (factor >= 1) return norm;
  for (const auto& [parameter, values, has_master] : all) {
    if (has_master) {
      masters->multiply(parameter, factor);
    } else {
      values.mul_(factor);
    }
  }
  return norm;
}

void check_bound(double clip_value) {
  if (!(clip_value >= 0))
    throw InvalidArgument(
        formatted("clip_grad_value_: clip_value is {}; it must be at least 0", clip_value));
}

void clip_values(const std::vector<ToClip>& all, detail::MasterCopies* masters, double bound) {
  for (const auto& [parameter, values, has_master] : all) {
    if (has_master) {
      masters->clamp(parameter, bound);
    } else {
      values.clamp_(-bound, bound);
    }
  }
}

}  // namespace

double clip_grad_norm_(DistributedOptimizer& optimizer, double max_norm, double norm_type) {
  check_clipping(max_norm, norm_type);
  const double norm = grad_norm(optimizer, norm_type);
  const at::NoGradGuard no_gradient;
  return clip(gradients_of(optimizer), optimizer.master_copies(), norm, max_norm);
}

double grad_norm(DistributedOptimizer& optimizer, double norm_type) {
  check_norm(norm_type);
  const at::NoGradGuard no_gradient;
  const bool of_shares = optimizer.shards_gradients();
  double norm = 0;
  std::string refusal;
  try {
    optimizer.synchronize_once();
    norm = norm_of(gradients_of(optimizer), optimizer.master_copies(), norm_type);
  } catch (const InvalidArgument& error) {  // of this rank alone
    if (!of_shares) throw;
    refusal = error.what();
  }
  return of_shares ? norm_of_all_shares(norm, optimizer.process_set(), norm_type, refusal) : norm;
}

double clip_grad_norm_(MasterWeights& optimizer, double max_norm, double norm_type) {
  check_clipping(max_norm, norm_type);
  const at::NoGradGuard no_gradient;
  const auto all = gradients_of(optimizer.param_groups(), &optimizer.copies());
  return clip(all, &optimizer.copies(), norm_of(all, &optimizer.copies(), norm_type), max_norm);
}

void clip_grad_value_(DistributedOptimizer& optimizer, double clip_value) {
  check_bound(clip_value);
  optimizer.synchronize_once();
  const at::NoGradGuard no_gradient;
  clip_values(gradients_of(optimizer), optimizer.master_copies(), clip_value);
}

void clip_grad_value_(MasterWeights& optimizer, double clip_value) {
  check_bound(clip_value);
  const at::NoGradGuard no_gradient;
  clip_values(gradients_of(optimizer.param_groups(), &optimizer.copies()), &optimizer.copies(),
              clip_value);
}

}  // namespace hvd
