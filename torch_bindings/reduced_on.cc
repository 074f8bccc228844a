#include "torch_bindings/reduced_on.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

namespace hvd::detail {

namespace {

struct Wrapper {
  ProcessSet set;
  std::string kind;
  bool operator==(const Wrapper& other) const { return set == other.set && kind == other.kind; }
};

struct Register {
  std::mutex mutex;
  std::multimap<const void*, Wrapper> wrappers;  ///< by parameter
};

/// Lives as long as any wrapper: one may end after main().
Register& all() {
  static auto* const made = new Register;
  return *made;
}

}  // namespace

void ReducedOn::add(const at::Tensor& parameter) {
  const std::lock_guard lock(all().mutex);
  all().wrappers.emplace(parameter.unsafeGetTensorImpl(), Wrapper{process_set_, kind_});
  parameters_.push_back(parameter.unsafeGetTensorImpl());
}

ReducedOn::~ReducedOn() {
  const std::lock_guard lock(all().mutex);
  for (const void* parameter : parameters_) {
    const auto [begin, end] = all().wrappers.equal_range(parameter);
    const auto own = std::find_if(begin, end, [this](const auto& entry) { return entry.second == Wrapper{process_set_, kind_}; });
    if (own != end) all().wrappers.erase(own);
  }
}

std::vector<ProcessSet> ReducedOn::sets_of(const std::vector<at::Tensor>& parameters) {
  std::vector<ProcessSet> found;
  const std::lock_guard lock(all().mutex);
  for (const auto& parameter : parameters) {
    const auto [begin, end] = all().wrappers.equal_range(parameter.unsafeGetTensorImpl());
    for (auto entry = begin; entry != end; ++entry)
      if (std::find(found.begin(), found.end(), entry->second.set) == found.end()) found.push_back(entry->second.set);
  }
  return found;
}

bool ReducedOn::is_by_other_than(const std::string& kind, const at::Tensor& parameter) {
  const std::lock_guard lock(all().mutex);
  const auto [begin, end] = all().wrappers.equal_range(parameter.unsafeGetTensorImpl());
  return std::any_of(begin, end, [&](const auto& entry) { return entry.second.kind != kind; });
}

}  // namespace hvd::detail
