#include "torch_bindings/modules/recomputation.h"

#include <ATen/autocast_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/record_function.h>
#include <torch/torch.h>

#include <string_view>
#include <unordered_map>

#include "torch_bindings/platform/generators.h"

namespace hvd::detail {

namespace {

/// Returns the generators that there are; of GPUs those that this process uses.
std::vector<at::Generator> default_generators() {
  std::vector<at::Generator> all{at::globalContext().defaultGenerator(at::kCPU)};
  if (!at::globalContext().hasCUDA()) return all;
  const auto& cuda = at::detail::getCUDAHooks();
  for (c10::DeviceIndex i = 0; i < static_cast<c10::DeviceIndex>(cuda.deviceCount()); ++i)
    if (cuda.hasPrimaryContext(i))
      all.push_back(at::globalContext().defaultGenerator(at::Device(at::kCUDA, i)));
  return all;
}

}  // namespace

AmbientState::AmbientState() : cached_(at::autocast::is_autocast_cache_enabled()) {
  for (const auto& generator : default_generators())
    generators_.emplace_back(generator, generator_state(generator));
  for (const auto device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES)
    if (at::autocast::is_autocast_enabled(device))
      autocast_.push_back({device, at::autocast::get_autocast_dtype(device)});
}

void AmbientState::keep_what_was_used() {
  std::erase_if(generators_, [](const auto& item) {
    return at::equal(item.second, generator_state(item.first));
  });
}

AmbientState::Scope::Scope(const AmbientState& state)
    : world_(state.world_, WorldScope::kAlsoGlobal),
      cached_(at::autocast::is_autocast_cache_enabled()) {
  for (const auto device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    const Autocast* then = nullptr;
    for (const auto& autocast : state.autocast_)
      if (autocast.device == device) then = &autocast;
    if (then == nullptr && !at::autocast::is_autocast_enabled(device)) continue;
    const auto type = then != nullptr ? then->type : at::autocast::get_autocast_dtype(device);
    autocast_.push_back(std::make_unique<AutocastGuard>(device, type, then != nullptr));
  }
  at::autocast::set_autocast_cache_enabled(state.cached_);
  for (const auto& [generator, then] : state.generators_) {
    before_.emplace_back(generator, generator_state(generator));
    set_generator_state(generator, then);
  }
}

AmbientState::Scope::~Scope() {
  for (const auto& [generator, state] : before_) set_generator_state(generator, state);
  at::autocast::set_autocast_cache_enabled(cached_);
  while (!autocast_.empty()) autocast_.pop_back();  // the last one first
}

namespace {

/// The running statistics of one thread, while it computes parts again.
struct StatisticsBefore {
  int scopes = 0;
  at::CallbackHandle callback = 0;
  std::unordered_map<const void*, std::pair<at::Tensor, at::Tensor>>
      before;                    ///< each with its values
  std::vector<at::Tensor> made;  ///< numbers that are the function's own
};
thread_local StatisticsBefore statistics_before;

/// Module::to() makes counters floating-point numbers.
bool is_number(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().dim() == 0 &&
         (value.toTensor().scalar_type() == at::kLong || value.toTensor().is_floating_point());
}
/// Returns whether that counts in `value`. Floating-point numbers may also be sums of something.
bool counts(const c10::IValue& value, const c10::IValue& added) {
  return is_number(value) &&
         (!value.toTensor().is_floating_point() || (added.isInt() && added.toInt() == 1));
}

void remember(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return;
  const at::Tensor& tensor = value.toTensor();
  const void* const key = tensor.unsafeGetTensorImpl();
  if (statistics_before.before.contains(key)) return;
  const at::NoGradGuard no_gradient;
  // before the clone, which comes by here too
  statistics_before.before.emplace(key, std::pair(tensor, at::Tensor()));
  statistics_before.before.at(key).second = tensor.detach().clone();
}

std::unique_ptr<at::ObserverContext> before_operation(const at::RecordFunction& operation) {
  const std::string_view name = operation.name();
  const auto inputs = operation.inputs();
  if ((name == "aten::batch_norm" || name == "aten::instance_norm") && inputs.size() > 4) {
    remember(inputs[3]);
    remember(inputs[4]);
  } else if (name == "aten::add_" && inputs.size() > 1 && counts(inputs[0], inputs[1])) {
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
    if (is_number(output)) statistics_before.made.push_back(output.toTensor());
}

}  // namespace

KeptStatistics::KeptStatistics() {
  if (statistics_before.scopes++ > 0) return;
  statistics_before.callback =
      at::addThreadLocalCallback(at::RecordFunctionCallback(before_operation, after_operation)
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
    // which is no change for autograd: there was none
    both.first.variable_data().copy_(both.second);
}

bool KeptStatistics::are_kept() { return statistics_before.scopes > 0; }

}  // namespace hvd::detail
