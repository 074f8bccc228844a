#include "torch_bindings/modules/ambient_state.h"

#include <ATen/autocast_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/torch.h>

#include <mutex>

namespace hvd::detail {

namespace {

at::Tensor generator_state(at::Generator& generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(at::Generator& generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

/// Those that there are; of GPUs those that this process uses.
std::vector<at::Generator> default_generators() {
  std::vector<at::Generator> all{at::globalContext().defaultGenerator(at::kCPU)};
  if (!at::globalContext().hasCUDA()) return all;
  const auto& cuda = at::detail::getCUDAHooks();
  for (c10::DeviceIndex i = 0; i < static_cast<c10::DeviceIndex>(cuda.deviceCount()); ++i)
    if (cuda.hasPrimaryContext(i)) all.push_back(at::globalContext().defaultGenerator(at::Device(at::kCUDA, i)));
  return all;
}

}  // namespace

AmbientState::AmbientState() : cached_(at::autocast::is_autocast_cache_enabled()) {
  for (auto& generator : default_generators()) generators_.emplace_back(generator, generator_state(generator));
  for (const auto device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES)
    if (at::autocast::is_autocast_enabled(device)) autocast_.push_back({device, at::autocast::get_autocast_dtype(device)});
}

void AmbientState::keep_what_was_used() {
  std::erase_if(generators_, [](auto& item) { return at::equal(item.second, generator_state(item.first)); });
}

AmbientState::Scope::Scope(const AmbientState& state) : cached_(at::autocast::is_autocast_cache_enabled()) {
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
    at::Generator mine = generator;
    before_.emplace_back(mine, generator_state(mine));
    set_generator_state(mine, then);
  }
}

AmbientState::Scope::~Scope() {
  for (auto& [generator, state] : before_) set_generator_state(generator, state);
  at::autocast::set_autocast_cache_enabled(cached_);
  while (!autocast_.empty()) autocast_.pop_back();  // the last one first
}

}  // namespace hvd::detail
