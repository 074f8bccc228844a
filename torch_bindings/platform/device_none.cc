// Tested in tests/torch_bindings/collectives/operation_test.cc
#include "torch_bindings/platform/device.h"

namespace hvd::detail {

std::shared_ptr<StreamPoint> stream_point(const at::Tensor& /*tensor*/,
                                          const std::string& /*what*/) {
  return nullptr;
}
void wait_on_current_stream(const at::Tensor& /*tensor*/,
                            const std::vector<HandleState::Completion>& /*completions*/,
                            const std::string& /*what*/) {}
void set_up_device(int /*device*/, bool /*current*/) {}

}  // namespace hvd::detail
