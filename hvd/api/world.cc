#include "hvd/api/world.h"

#include <mutex>
#include <utility>
#include <vector>

#include "hvd/base/log.h"
#include "hvd/hvd.h"

namespace hvd {

namespace {

struct Global {
  std::mutex mutex;
  std::shared_ptr<World> world;
  std::vector<std::function<void()>> hooks;
};

/// Never destroyed: a process that ends without shutdown() ends as it is, and its death tells the others.
Global& global() {
  static auto* const instance = new Global;
  return *instance;
}

}  // namespace

std::shared_ptr<World> current_world() {
  const std::lock_guard lock(global().mutex);
  if (!global().world) throw NotInitialized("hvd::init() has not been called, or hvd::shutdown() has");
  return global().world;
}

void install_world(World world) {
  std::vector<std::function<void()>> hooks;
  {
    const std::lock_guard lock(global().mutex);
    if (global().world) throw InvalidArgument("hvd is running already");
    global().world = std::make_shared<World>(std::move(world));
    hooks = global().hooks;
  }
  for (const auto& hook : hooks) hook();
}

bool has_world() {
  const std::lock_guard lock(global().mutex);
  return global().world != nullptr;
}

void on_init(std::function<void()> hook) {
  const std::lock_guard lock(global().mutex);
  global().hooks.push_back(std::move(hook));
}

void shutdown() {
  std::shared_ptr<World> world;
  {
    const std::lock_guard lock(global().mutex);
    world = global().world;
  }
  if (!world) return;
  const bool clean = world->engine->shutdown();
  {
    const std::lock_guard lock(global().mutex);
    if (global().world == world) global().world.reset();
  }
  if (world->close) world->close(clean);
}

void leave_world(std::chrono::milliseconds patience) noexcept {
  std::shared_ptr<World> world;
  {
    const std::lock_guard lock(global().mutex);
    world = std::exchange(global().world, nullptr);
  }
  if (!world) return;
  try {
    const bool clean = world->engine->shutdown(patience);
    if (clean && world->close) world->close(true);
  } catch (...) {
    log(LogLevel::Error, "at the end of the process: {}", status_of_current_exception().text());
  }
}

std::shared_ptr<Engine> engine() { return current_world()->engine; }

}  // namespace hvd
