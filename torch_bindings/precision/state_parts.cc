#include "torch_bindings/precision/state_parts.h"

#include <torch/torch.h>

#include <typeinfo>

#include "hvd/errors.h"

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
    return {{&rmsprop->square_avg(), &rmsprop->momentum_buffer(), &rmsprop->grad_avg()},
            &rmsprop->step()};
  if (auto* adagrad = dynamic_cast<AdagradParamState*>(&state))
    return {{&adagrad->sum()}, &adagrad->step()};
  return {};
}

namespace {

template <class State>
struct InShares : State {
  using State::serialize;
  void serialize(torch::serialize::OutputArchive& /*archive*/) const override {
    throw InvalidArgument(
        "torch::save: each rank has its share of this optimizer's state alone; save the "
        "DistributedOptimizer around it, on all ranks, or call its unshard() before, also before "
        "it ends");
  }
};
template <class State>
using Fresh = State;

template <template <class> class Made>
std::unique_ptr<OptimizerParamState> made_for(const Optimizer& optimizer) {
  using namespace torch::optim;
  if (dynamic_cast<const SGD*>(&optimizer) != nullptr)
    return std::make_unique<Made<SGDParamState>>();
  if (dynamic_cast<const Adam*>(&optimizer) != nullptr)
    return std::make_unique<Made<AdamParamState>>();
  if (dynamic_cast<const AdamW*>(&optimizer) != nullptr)
    return std::make_unique<Made<AdamWParamState>>();
  if (dynamic_cast<const RMSprop*>(&optimizer) != nullptr)
    return std::make_unique<Made<RMSpropParamState>>();
  if (dynamic_cast<const Adagrad*>(&optimizer) != nullptr)
    return std::make_unique<Made<AdagradParamState>>();
  return nullptr;
}

}  // namespace

std::unique_ptr<OptimizerParamState> fresh_state(const Optimizer& optimizer) {
  return made_for<Fresh>(optimizer);
}

std::unique_ptr<OptimizerParamState> state_in_shares(const Optimizer& optimizer) {
  return made_for<InShares>(optimizer);
}

bool steps_by_element(const Optimizer& optimizer) {
  using namespace torch::optim;
  const auto& type = typeid(optimizer);
  return type == typeid(SGD) || type == typeid(Adam) || type == typeid(AdamW) ||
         type == typeid(RMSprop) || type == typeid(Adagrad);
}

bool is_of_libtorch(const Optimizer& optimizer) {
  return steps_by_element(optimizer) || typeid(optimizer) == typeid(torch::optim::LBFGS);
}

bool is_all_parts(const OptimizerParamState& state) {
  using namespace torch::optim;
  const auto& type = typeid(state);
  return type == typeid(SGDParamState) || type == typeid(AdamParamState) ||
         type == typeid(AdamWParamState) || type == typeid(RMSpropParamState) ||
         type == typeid(AdagradParamState);
}

bool is_left_over(OptimizerParamState& state) {
  const StateParts parts = parts_of(state);
  return !parts.tensors.empty() && !parts.tensors.front()->defined();
}

std::optional<double> rate_of(const torch::optim::OptimizerOptions& options) {
  try {
    return options.get_lr();
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

}  // namespace hvd::detail
