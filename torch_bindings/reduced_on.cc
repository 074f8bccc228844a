#include "torch_bindings/reduced_on.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

namespace hvd::detail {

namespace {

struct Register {
  std::mutex mutex;
  std::multimap<const void*, ProcessSet> sets;  ///< by parameter
};

/// Lives as long as any wrapper: one may end after main().
Register& all() {
  static auto* const made = new Register;
  return *made;
}

}  // namespace

void ReducedOn::add(const at::Tensor& parameter) {
  const std::lock_guard lock(all().mutex);
  all().sets.emplace(parameter.unsafeGetTensorImpl(), process_set_);
  parameters_.push_back(parameter.unsafeGetTensorImpl());
}

ReducedOn::~ReducedOn() {
  const std::lock_guard lock(all().mutex);
  for (const void* parameter : parameters_) {
    const auto [begin, end] = all().sets.equal_range(parameter);
    const auto own = std::find_if(begin, end, [this](const auto& entry) { return entry.second == process_set_; });
    if (own != end) all().sets.erase(own);
  }
}

std::vector<ProcessSet> ReducedOn::sets_of(const std::vector<at::Tensor>& parameters) {
  std::vector<ProcessSet> found;
  const std::lock_guard lock(all().mutex);
  for (const auto& parameter : parameters) {
    const auto [begin, end] = all().sets.equal_range(parameter.unsafeGetTensorImpl());
    for (auto entry = begin; entry != end; ++entry)
      if (std::find(found.begin(), found.end(), entry->second) == found.end()) found.push_back(entry->second);
  }
  return found;
}

}  // namespace hvd::detail
