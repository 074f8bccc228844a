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

}  // namespace hvd::gpu
