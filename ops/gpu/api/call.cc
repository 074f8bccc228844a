#include "ops/gpu/api/call.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/base/threads.h"
#include "hvd/errors.h"

namespace hvd::gpu {

namespace {

/// Names enough to find the place, few enough to read.
std::string list(std::span<const std::string_view> tensors) {
  constexpr std::size_t kNames = 3;
  std::string names;
  for (std::size_t i = 0; i < tensors.size() && i < kNames; ++i)
    names += formatted("{}'{}'", i == 0 ? "" : ", ", tensors[i]);
  if (tensors.size() > kNames) names += formatted(" and {} more", tensors.size() - kNames);
  return names;
}

struct Ending {
  std::function<void()> work;
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;

  void run() {
    work();
    const std::lock_guard lock(mutex);
    over = true;
    changed.notify_all();
  }
};

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

void fail(const CallContext& site, std::string_view call, std::string_view words) {
  const std::string names = list(site.tensors);
  throw BackendError(formatted("{} failed on rank {} (cuda:{}){}{}: {}", call, site.rank,
                               site.device, names.empty() ? "" : " for ", names, words));
}

void check(const CallContext& site, CudaCode code, std::string_view call) {
  if (code == CudaCode::Success) return;
  fail(site, call,
       formatted("{} (CUDA error {})", site.table->cuda_error(code), static_cast<int>(code)));
}

void check(const CallContext& site, NcclCode code, std::string_view call, NcclComm* comm) {
  if (code == NcclCode::Success) return;
  fail(site, call,
       formatted("{} (NCCL error {}); NCCL_DEBUG=WARN makes NCCL say more",
                 site.table->nccl_error(code, comm), static_cast<int>(code)));
}

void check_sharing(const CallContext& site, CudaCode code, std::string_view call) {
  if (code == CudaCode::Success) return;
  fail(site, call,
       formatted("{} (CUDA error {}); processes may be kept from sharing a GPU's memory here "
                 "(containers, MIG, WSL2): with HVD_GPU_BACKEND=staged tensors go through the host",
                 site.table->cuda_error(code), static_cast<int>(code)));
}

std::string to_mib(std::size_t bytes) {
  return formatted("{:.1f} MiB", static_cast<double>(bytes) / (1024 * 1024));
}

bool within(std::chrono::milliseconds limit, std::function<void()> work) noexcept {
  const auto ending = std::make_shared<Ending>();
  ending->work = std::move(work);
  try {
    const SignalsKeptOff of_it;
    std::thread([ending] { ending->run(); }).detach();
  } catch (const std::system_error&) {  // not covered: the system has no thread to give
    ending->run();                      // not covered: likewise
  }
  std::unique_lock lock(ending->mutex);
  return ending->changed.wait_for(lock, limit, [&] { return ending->over; });
}

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
