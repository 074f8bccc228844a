#include "torch_bindings/parameters/repeated_parameters.h"

#include <torch/torch.h>

#include <set>
#include <unordered_map>

#include "hvd/base/text.h"

namespace hvd::detail {

std::vector<std::pair<std::string, at::Tensor>> unique_parameters(
    const std::vector<std::pair<std::string, at::Tensor>>& named) {
  std::unordered_map<const void*, std::set<std::string>> names;
  for (const auto& [name, tensor] : named)
    if (tensor.defined()) names[tensor.unsafeGetTensorImpl()].insert(name);
  std::vector<std::pair<std::string, at::Tensor>> unique;
  for (const auto& [name, tensor] : named) {
    if (!tensor.defined()) {
      unique.emplace_back(name, tensor);
      continue;
    }
    const auto all = names.extract(tensor.unsafeGetTensorImpl());
    if (!all.empty()) unique.emplace_back(joined(all.mapped(), " = "), tensor);
  }
  return unique;
}

RepeatedParameters::RepeatedParameters(torch::optim::Optimizer& optimizer, Places places)
    : optimizer_(optimizer) {
  std::vector<std::vector<at::Tensor>> once;
  std::set<const void*> seen;
  bool repeated = false;
  for (const auto& group : optimizer.param_groups()) {
    auto& parameters = once.emplace_back();
    for (const auto& parameter : group.params()) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) {
        parameters.push_back(parameter);
        continue;
      }
      repeated = true;
      if (places == Places::LeftOut) continue;
      instead_.push_back(at::empty({0}));
      parameters.push_back(instead_.back());
    }
  }
  if (!repeated) return;
  for (std::size_t g = 0; g < once.size(); ++g)
    groups_.push_back(std::exchange(optimizer.param_groups()[g].params(), std::move(once[g])));
}

RepeatedParameters::~RepeatedParameters() {
  for (std::size_t g = 0; g < groups_.size(); ++g)
    optimizer_.param_groups()[g].params() = std::move(groups_[g]);
  for (const auto& tensor : instead_) optimizer_.state().erase(tensor.unsafeGetTensorImpl());
}

void load_state(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive) {
  const RepeatedParameters each_once(optimizer, RepeatedParameters::Places::Kept);
  optimizer.load(archive);
}

}  // namespace hvd::detail
