#include "torch_bindings/precision/master_optimizer.h"

#include "torch_bindings/parameters/wrappers.h"

namespace hvd::detail {

MasterOptimizer* MasterOptimizer::around(torch::optim::Optimizer& optimizer) {
  if (auto* const itself = dynamic_cast<MasterOptimizer*>(&optimizer)) return itself;
  return Wrappers::around<MasterOptimizer>(optimizer);
}

}  // namespace hvd::detail
