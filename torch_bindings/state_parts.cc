#include "torch_bindings/state_parts.h"

#include <torch/torch.h>

namespace hvd::detail {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;

StateParts parts_of(OptimizerParamState& state) {
  using namespace torch::optim;
  if (auto* sgd = dynamic_cast<SGDParamState*>(&state)) return {{&sgd->momentum_buffer()}, nullptr};
  if (auto* adam = dynamic_cast<AdamParamState*>(&state))
    return {{&adam->exp_avg(), &adam->exp_avg_sq(), &adam->max_exp_avg_sq()}, &adam->step()};
  if (auto* adamw = dynamic_cast<AdamWParamState*>(&state))
    return {{&adamw->exp_avg(), &adamw->exp_avg_sq(), &adamw->max_exp_avg_sq()}, &adamw->step()};
  if (auto* rmsprop = dynamic_cast<RMSpropParamState*>(&state))
    return {{&rmsprop->square_avg(), &rmsprop->momentum_buffer(), &rmsprop->grad_avg()}, &rmsprop->step()};
  if (auto* adagrad = dynamic_cast<AdagradParamState*>(&state)) return {{&adagrad->sum()}, &adagrad->step()};
  return {};
}

std::unique_ptr<OptimizerParamState> fresh_state(const Optimizer& optimizer) {
  using namespace torch::optim;
  if (dynamic_cast<const SGD*>(&optimizer) != nullptr) return std::make_unique<SGDParamState>();
  if (dynamic_cast<const Adam*>(&optimizer) != nullptr) return std::make_unique<AdamParamState>();
  if (dynamic_cast<const AdamW*>(&optimizer) != nullptr) return std::make_unique<AdamWParamState>();
  if (dynamic_cast<const RMSprop*>(&optimizer) != nullptr) return std::make_unique<RMSpropParamState>();
  if (dynamic_cast<const Adagrad*>(&optimizer) != nullptr) return std::make_unique<AdagradParamState>();
  return nullptr;
}

bool is_left_over(OptimizerParamState& state) {
  const StateParts parts = parts_of(state);
  return !parts.tensors.empty() && !parts.tensors.front()->defined();
}

}  // namespace hvd::detail
