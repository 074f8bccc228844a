#include "ops/gpu/api/within.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "hvd/base/signals.h"

namespace hvd::gpu {

namespace {

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
