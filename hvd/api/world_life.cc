#include "hvd/api/world_life.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "hvd/base/log.h"
#include "hvd/base/text.h"

namespace hvd {

using namespace std::chrono_literals;

namespace {

std::uint64_t next_number() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1) + 1;
}

/// The worlds of this process, for its end. Never destroyed: threads may still come.
struct Living {
  std::mutex mutex;
  std::vector<WorldLife*> worlds;
};
Living& living() {
  static auto* const all = new Living;
  return *all;
}

}  // namespace

WorldLife*& chosen_world() {
  static thread_local constinit WorldLife* chosen = nullptr;
  return chosen;
}

// ------------------------------------------------------------------------------------------------------------------ WorldLife

WorldLife::WorldLife(RunningWorld world, std::string name)
    : name_(std::move(name)), number_(next_number()), running_(std::make_shared<RunningWorld>(std::move(world))) {
  const std::lock_guard lock(living().mutex);
  living().worlds.push_back(this);
}

WorldLife::~WorldLife() {
  if (!made_.still_here()) {  // a child that was forked has none of its threads and connections
    static_cast<void>(new std::shared_ptr<RunningWorld>(std::move(running_)));
    return;
  }
  static_cast<void>(leave());
  const std::lock_guard lock(living().mutex);
  std::erase(living().worlds, this);
}

std::shared_ptr<RunningWorld> WorldLife::running() const {
  const std::lock_guard lock(mutex_);
  if (!running_) throw NotInitialized(formatted("this process has left the world '{}'", name_));
  return running_;
}

bool WorldLife::is_left() const {
  const std::lock_guard lock(mutex_);
  return running_ == nullptr;
}

bool WorldLife::end(std::chrono::milliseconds patience) noexcept {
  std::shared_ptr<RunningWorld> ending;
  try {
    const InsideLibrary inside;
    {
      const std::lock_guard lock(mutex_);
      ending = std::exchange(running_, nullptr);
    }
    if (!ending) return false;
    const bool clean = ending->engine->leave(
        patience, {Status::Code::RankFailed, formatted("rank {} has left the world '{}'", ending->engine->topology().rank, name_)});
    if (clean && ending->close) ending->close(clean);
    if (!clean && ending->flush) ending->flush();
    return clean;
  } catch (...) {
    log(LogLevel::Error, "at the end of the world '{}': {}", name_, status_of_current_exception().text());
    return false;
  }
}

void WorldLife::leave_all() noexcept {
  const std::lock_guard lock(living().mutex);
  for (WorldLife* world : living().worlds) static_cast<void>(world->end(0ms));
}

}  // namespace hvd
