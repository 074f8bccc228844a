#include "torch_bindings/parameters/unique_parameters.h"

#include <set>
#include <unordered_map>

#include "hvd/base/text.h"

namespace hvd::detail {

std::vector<std::pair<std::string, at::Tensor>> unique_parameters(const std::vector<std::pair<std::string, at::Tensor>>& named) {
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

}  // namespace hvd::detail
