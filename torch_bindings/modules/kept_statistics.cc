#include "torch_bindings/modules/kept_statistics.h"

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace hvd::detail {

namespace {

/// Of one thread, while it computes parts again.
struct StatisticsBefore {
  int scopes = 0;
  at::CallbackHandle callback = 0;
  std::unordered_map<const void*, std::pair<at::Tensor, at::Tensor>> before;  ///< each with its values
  std::vector<at::Tensor> made;                                               ///< counters that are the function's own
};
thread_local StatisticsBefore statistics_before;

bool is_counter(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().dim() == 0 && value.toTensor().scalar_type() == at::kLong;
}

void remember(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return;
  const at::Tensor& tensor = value.toTensor();
  const void* const key = tensor.unsafeGetTensorImpl();
  if (statistics_before.before.contains(key)) return;
  const at::NoGradGuard no_gradient;
  statistics_before.before.emplace(key, std::pair(tensor, at::Tensor()));  // before the clone, which comes by here too
  statistics_before.before.at(key).second = tensor.detach().clone();
}

std::unique_ptr<at::ObserverContext> before_operation(const at::RecordFunction& operation) {
  const std::string_view name = operation.name();
  const auto inputs = operation.inputs();
  if ((name == "aten::batch_norm" || name == "aten::instance_norm") && inputs.size() > 4) {
    remember(inputs[3]);
    remember(inputs[4]);
  } else if (name == "aten::add_" && !inputs.empty() && is_counter(inputs[0])) {
    const at::Tensor& counter = inputs[0].toTensor();
    for (const auto& own : statistics_before.made)
      if (own.is_alias_of(counter)) return nullptr;
    remember(inputs[0]);
  }
  return nullptr;
}

void after_operation(const at::RecordFunction& operation, at::ObserverContext* /*unused*/) {
  const std::string_view name = operation.name();
  if (name.ends_with('_')) return;
  for (const auto& output : operation.outputs())
    if (is_counter(output)) statistics_before.made.push_back(output.toTensor());
}

}  // namespace

KeptStatistics::KeptStatistics() {
  if (statistics_before.scopes++ > 0) return;
  statistics_before.callback = at::addThreadLocalCallback(at::RecordFunctionCallback(before_operation, after_operation)
                                                              .needsInputs(true)
                                                              .needsOutputs(true)
                                                              .scopes({at::RecordScope::FUNCTION}));
}

KeptStatistics::~KeptStatistics() {
  if (--statistics_before.scopes > 0) return;
  at::removeCallback(statistics_before.callback);
  const at::NoGradGuard no_gradient;
  statistics_before.made.clear();
  for (auto& [key, both] : std::exchange(statistics_before.before, {}))
    both.first.variable_data().copy_(both.second);  // which is no change for autograd: there was none
}

bool KeptStatistics::are_kept() { return statistics_before.scopes > 0; }

}  // namespace hvd::detail
