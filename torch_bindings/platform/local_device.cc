#include "torch_bindings/platform/local_device.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "hvd/api/world.h"
#include "hvd/base/cores.h"
#include "hvd/config.h"
#include "hvd/engine/engine.h"
#include "hvd/hvd.h"
#include "torch_bindings/platform/device.h"

namespace hvd {

at::Device local_device() {
  const int device = engine()->device();
  if (device < 0 || !at::hasCUDA()) return at::kCPU;
  return {at::kCUDA, static_cast<c10::DeviceIndex>(device)};
}

namespace detail {

bool make_device_current_at_init() {
  static const bool once = [] {
    on_init([] {
      const bool others = size() > 1;  // one process alone may have chosen its GPU
      if (local_device().is_cuda()) set_up_device(engine()->device(), others);
    });
    return true;
  }();
  return once;
}

bool share_cores_at_init() {
  static const bool once = [] {
    on_init([] {
      if (thread_count_is_fixed()) return;
      const auto ranks = static_cast<unsigned>(local_size());
      const unsigned share = std::max(1U, engine()->topology().cores / ranks);
      at::set_num_threads(static_cast<int>(std::min(share, detail::bound_cores())));
    });
    return true;
  }();
  return once;
}

}  // namespace detail
}  // namespace hvd
