#include "torch_bindings/platform/threads.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <thread>

#include "hvd/api/world.h"
#include "hvd/config.h"
#include "hvd/hvd.h"

namespace hvd::detail {

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

}  // namespace hvd::detail
