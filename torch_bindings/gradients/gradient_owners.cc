#include "torch_bindings/gradients/gradient_owners.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "hvd/base/text.h"

namespace hvd::detail {

namespace {

struct Table {
  std::mutex mutex;
  std::multimap<const void*, std::pair<const GradientOwner*, ProcessSet>> owners;  ///< by parameter
};

/// Outlives every wrapper: one may end after main().
Table& table() {
  static auto* const made = new Table;
  return *made;
}

/// Calls `visit(owner, process_set)` for all owners of the parameter. The table is locked.
template <class Visit>
void for_each_owner(const at::Tensor& parameter, const Visit& visit) {
  const auto [begin, end] = table().owners.equal_range(parameter.unsafeGetTensorImpl());
  for (auto entry = begin; entry != end; ++entry) visit(*entry->second.first, entry->second.second);
}

const char* title(const std::string& kind) {
  return kind == "ddp" ? "DistributedDataParallel" : "DistributedOptimizer";
}

}  // namespace

void GradientOwner::add(const at::Tensor& parameter) {
  const std::lock_guard lock(table().mutex);
  parameters_.push_back(parameter);
  table().owners.emplace(parameter.unsafeGetTensorImpl(), std::pair(this, process_set_));
}

void GradientOwner::end() noexcept {
  const std::lock_guard lock(table().mutex);
  for (const auto& parameter : parameters_) {
    const auto [begin, end] = table().owners.equal_range(parameter.unsafeGetTensorImpl());
    const auto own =
        std::find_if(begin, end, [this](const auto& entry) { return entry.second.first == this; });
    if (own != end) table().owners.erase(own);
  }
  parameters_.clear();
}

std::vector<ProcessSet> GradientOwners::sets_of(const std::vector<at::Tensor>& parameters) {
  std::vector<ProcessSet> found;
  const std::lock_guard lock(table().mutex);
  for (const auto& parameter : parameters)
    for_each_owner(parameter, [&](const GradientOwner& /*owner*/, const ProcessSet& set) {
      if (std::find(found.begin(), found.end(), set) == found.end()) found.push_back(set);
    });
  return found;
}

bool GradientOwners::has_other(const std::string& kind, const at::Tensor& parameter) {
  bool found = false;
  const std::lock_guard lock(table().mutex);
  for_each_owner(parameter, [&](const GradientOwner& owner, const ProcessSet& /*set*/) {
    found = found || owner.kind() != kind;
  });
  return found;
}

std::size_t GradientOwners::count(const at::Tensor& parameter) {
  const std::lock_guard lock(table().mutex);
  return table().owners.count(parameter.unsafeGetTensorImpl());
}

void GradientOwners::refuse_others(
    const std::string& kind, const std::vector<std::pair<std::string, at::Tensor>>& parameters,
    std::size_t first) {
  const std::lock_guard lock(table().mutex);
  for (std::size_t i = first; i < parameters.size(); ++i)
    for_each_owner(
        parameters[i].second,
        [&, &name = parameters[i].first](const GradientOwner& owner, const ProcessSet& /*set*/) {
          if (owner.kind() != kind)
            throw InvalidArgument(
                formatted("{}: the gradient of parameter '{}' is reduced by a {} already, and "
                          "would be reduced twice; end that one first, or use the optimizer alone, "
                          "which can shard and compress, too",
                          title(kind), name, title(owner.kind())));
        });
}

}  // namespace hvd::detail
