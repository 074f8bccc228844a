#include "torch_bindings/platform/local_device.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <thread>

#include "hvd/api/world.h"
#include "hvd/config.h"
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
      const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
      at::set_num_threads(std::max(1, cores / local_size()));
    });
    return true;
  }();
  return once;
}

}  // namespace detail
}  // namespace hvd
