#include "ops/gpu/api/device_memory.h"

#include <mutex>
#include <utility>

#include "hvd/base/text.h"

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

MemoryUse::MemoryUse(const CallContext& site, const Remark& remark)
    : site_(site), remark_(remark), before_(remark ? free_now() : std::nullopt) {}

std::optional<std::size_t> MemoryUse::free_now() const {
  std::size_t free_bytes = 0, total_bytes = 0;
  if (site_.table->mem_info(&free_bytes, &total_bytes) != CudaCode::Success) return std::nullopt;
  return free_bytes;
}

std::string MemoryUse::describe(std::string_view what, std::size_t asked_bytes) const {
  const auto now = before_ ? free_now() : std::nullopt;
  if (!now || *now > *before_) return {};
  return formatted("{} {} of cuda:{}'s memory ({} were asked for)", what, to_mib(*before_ - *now),
                   site_.device, to_mib(asked_bytes));
}

void MemoryUse::say(std::string_view what, std::size_t asked_bytes) const {
  if (const std::string text = describe(what, asked_bytes); !text.empty()) remark_(text);
}

}  // namespace hvd::gpu
