#include "torch_bindings/parameters/wrappers.h"

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd::detail {

using torch::optim::Optimizer;

namespace {

struct Table {
  std::mutex mutex;
  std::vector<std::pair<const Optimizer*, Optimizer*>>
      around;  ///< what is wrapped, and what is around it
};
/// Outlives every wrapper: one may end after main().
Table& table() {
  static auto* const made = new Table;
  return *made;
}

}  // namespace

void Wrappers::add(const Optimizer& wrapped, Optimizer& wrapper) {
  const std::lock_guard lock(table().mutex);
  table().around.emplace_back(&wrapped, &wrapper);
}

void Wrappers::remove(const Optimizer& wrapper) noexcept {
  const std::lock_guard lock(table().mutex);
  std::erase_if(table().around, [&](const auto& entry) { return entry.second == &wrapper; });
}

void Wrappers::move(const Optimizer& from, Optimizer& to) noexcept {
  const std::lock_guard lock(table().mutex);
  for (auto& [wrapped, wrapper] : table().around)
    if (wrapper == &from) wrapper = &to;
}

Optimizer* Wrappers::around(const Optimizer& wrapped, std::size_t number) {
  const std::lock_guard lock(table().mutex);
  for (const auto& [inner, wrapper] : table().around)
    if (inner == &wrapped && number-- == 0) return wrapper;
  return nullptr;
}

Optimizer& Wrappers::outermost(Optimizer& optimizer, const char* call) {
  std::vector<Optimizer*> found;
  for (std::size_t i = 0;; ++i) {
    Optimizer* const wrapper = around(optimizer, i);
    if (wrapper == nullptr) break;
    Optimizer* const outer = &outermost(*wrapper, call);
    if (std::find(found.begin(), found.end(), outer) == found.end()) found.push_back(outer);
  }
  if (found.size() > 1)
    throw InvalidArgument(
        formatted("{} is given an optimizer that {} DistributedOptimizers are around; give it the "
                  "one that is meant",
                  call, found.size()));
  return found.empty() ? optimizer : *found.front();
}

}  // namespace hvd::detail
