#include "hvd/api/world_life.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/base/log.h"
#include "hvd/base/text.h"

namespace hvd {

using namespace std::chrono_literals;

namespace {

std::uint64_t next_world_number() {
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

bool end_world(std::shared_ptr<RunningWorld> world, const std::string& name,
               std::chrono::milliseconds patience) noexcept {
  try {
    const InsideLibrary inside;
    const bool clean = world->engine->shutdown(
        patience, {Status::Code::RankFailed, formatted("rank {} has left the world '{}'",
                                                       world->engine->topology().rank, name)});
    if (clean && world->close) world->close(clean);
    if (!clean && world->flush) world->flush();
    return clean;
  } catch (...) {
    log(LogLevel::Error, "at the end of the world '{}': {}", name,
        status_of_current_exception().text());
    return false;
  }
}

}  // namespace

WorldLife*& chosen_world() {
  static thread_local constinit WorldLife* chosen = nullptr;
  return chosen;
}

// --------------------------------------------------------------------------------------- WorldLife

WorldLife::WorldLife(RunningWorld world, std::string name)
    : name_(std::move(name)),
      number_(next_world_number()),
      running_(std::make_shared<RunningWorld>(std::move(world))) {
  const std::lock_guard lock(living().mutex);
  living().worlds.push_back(this);
}

WorldLife::~WorldLife() {
  if (!made_.still_here()) {  // a child that was forked has none of its threads and connections
    keep_for_ever(std::move(running_));
    return;
  }
  {
    const std::lock_guard lock(living().mutex);
    std::erase(living().worlds, this);
  }
  if (!is_inside_library() || running_ == nullptr) {
    leave();
    return;
  }
  // The last value has gone with an operation, in a thread that the world needs for its end.
  try {
    std::thread([world = running_, name = name_]() mutable {
      end_world(std::move(world), name, kPatience);
    }).detach();
    running_ = nullptr;
  } catch (const std::system_error&) {
    keep_for_ever(std::move(running_));
  }
}

std::shared_ptr<RunningWorld> WorldLife::running_if_any() const {
  const std::lock_guard lock(mutex_);
  return running_;
}

std::shared_ptr<RunningWorld> WorldLife::running() const {
  auto world = running_if_any();
  if (!world) throw NotInitialized(formatted("this process has left the world '{}'", name_));
  return world;
}

std::shared_ptr<RunningWorld> WorldLife::not_over() const {
  {
    const std::lock_guard lock(mutex_);
    if (auto ending = ending_.lock()) return ending;
  }
  return running();
}

bool WorldLife::end(std::chrono::milliseconds patience) noexcept {
  std::shared_ptr<RunningWorld> ending;
  {
    const std::lock_guard lock(mutex_);
    ending = std::exchange(running_, nullptr);
    if (ending) ending_ = ending;
  }
  return ending && end_world(std::move(ending), name_, patience);
}

std::shared_ptr<WorldLife> WorldLife::find(std::uint64_t number) {
  const std::lock_guard lock(living().mutex);
  for (WorldLife* const world : living().worlds)
    if (world->number() == number) return world->weak_from_this().lock();
  return nullptr;
}

void WorldLife::leave_all() noexcept {
  // who has the last value of another is leaving that one
  std::vector<std::shared_ptr<WorldLife>> all;
  {
    const std::lock_guard lock(living().mutex);
    for (WorldLife* world : living().worlds)
      if (auto held = world->weak_from_this().lock()) all.push_back(std::move(held));
  }
  // what is pending goes with it, perhaps with the last value
  for (const auto& world : all) static_cast<void>(world->end(0ms));
}

}  // namespace hvd
