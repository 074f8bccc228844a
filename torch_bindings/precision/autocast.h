#pragma once
/// AutocastGuard is automatic mixed precision for a scope: the products in it are computed in 16
/// bits, what needs more in fp32, as LibTorch's lists for the device say. The forward pass belongs
/// into the scope, backward does not. It belongs to the thread that made it.
// Tested in tests/torch_bindings/optimizer/grad_scaler_test.cc

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#pragma GCC visibility push(default)
namespace hvd {

/// An AutocastGuard switches autocast on, or off, as long as it lives. Guards may be nested, also
/// to switch autocast off for a part. The end of a guard brings back exactly what was before it;
/// the end of the outermost one drops the 16-bit copies of parameters that LibTorch keeps
/// meanwhile.
class [[nodiscard]] AutocastGuard {
 public:
  /// Begins the scope, for tensors of this kind of device. `type` is bf16 or fp16. Throws
  /// InvalidArgument for other types if `enabled`, and for devices that have no autocast.
  AutocastGuard(c10::DeviceType device_type, c10::ScalarType type, bool enabled = true);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  const c10::DeviceType device_type_;
  const bool was_enabled_;
  const c10::ScalarType type_before_;
};

}  // namespace hvd
#pragma GCC visibility pop
