#include "ops/gpu/api/memory_pressure.h"

#include <mutex>
#include <utility>

namespace hvd::gpu {

namespace {

struct Relief {
  std::mutex mutex;
  std::function<void()> call;
};

/// Never destroyed: allocations may fail while the process ends.
Relief& relief() {
  static auto* const instance = new Relief;
  return *instance;
}

}  // namespace

void set_memory_relief(std::function<void()> call) {
  const std::lock_guard lock(relief().mutex);
  relief().call = std::move(call);
}

bool relieve_memory() noexcept {
  try {
    std::function<void()> call;
    {
      const std::lock_guard lock(relief().mutex);
      call = relief().call;
    }
    if (!call) return false;
    call();
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace hvd::gpu
