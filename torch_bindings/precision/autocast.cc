#include "torch_bindings/precision/autocast.h"

#include <ATen/autocast_mode.h>
#include <algorithm>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

c10::DeviceType checked(c10::DeviceType device_type, c10::ScalarType type, bool enabled) {
  const auto& devices = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;
  if (std::find(devices.begin(), devices.end(), device_type) == devices.end())
    throw InvalidArgument(
        formatted("autocast: there is none for {}", c10::DeviceTypeName(device_type, true)));
  if (enabled && type != at::kBFloat16 && type != at::kHalf)
    throw InvalidArgument(
        formatted("autocast: to {}; it must be bf16 or fp16", c10::toString(type)));
  return device_type;
}

}  // namespace

AutocastGuard::AutocastGuard(c10::DeviceType device_type, c10::ScalarType type, bool enabled)
    : device_type_(checked(device_type, type, enabled)),
      was_enabled_(at::autocast::is_autocast_enabled(device_type)),
      type_before_(at::autocast::get_autocast_dtype(device_type)) {
  // The copies are known by their originals alone: those in another type must not be found.
  if (type != type_before_) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_type_, enabled);
  at::autocast::set_autocast_dtype(device_type_, type);
  at::autocast::increment_nesting();
}

AutocastGuard::~AutocastGuard() {
  const bool other_type = at::autocast::get_autocast_dtype(device_type_) != type_before_;
  if (at::autocast::decrement_nesting() == 0 || other_type) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_type_, was_enabled_);
  at::autocast::set_autocast_dtype(device_type_, type_before_);
}

}  // namespace hvd
