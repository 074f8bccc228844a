#include "torch_bindings/master_optimizer.h"

#include <torch/torch.h>

#include <map>
#include <mutex>

namespace hvd::detail {

using torch::optim::Optimizer;

namespace {

struct AllMasterOptimizers {
  std::mutex mutex;
  std::map<const Optimizer*, MasterOptimizer*> around;
};
/// Outlives every one: one may end after main().
AllMasterOptimizers& all_master_optimizers() {
  static auto* const made = new AllMasterOptimizers;
  return *made;
}

}  // namespace

MasterOptimizer* MasterOptimizer::around(Optimizer& optimizer) {
  if (auto* const itself = dynamic_cast<MasterOptimizer*>(&optimizer)) return itself;
  auto& all = all_master_optimizers();
  const std::lock_guard lock(all.mutex);
  const auto found = all.around.find(&optimizer);
  return found == all.around.end() ? nullptr : found->second;
}

void MasterOptimizer::begin_around(Optimizer& optimizer) {
  const std::lock_guard lock(all_master_optimizers().mutex);
  all_master_optimizers().around[&optimizer] = this;
}

void MasterOptimizer::end_around(Optimizer& optimizer) {
  const std::lock_guard lock(all_master_optimizers().mutex);
  all_master_optimizers().around.erase(&optimizer);
}

}  // namespace hvd::detail
