#include "hvd/api/world_life.h"

#include <algorithm>
#include <atomic>
#include <list>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/base/log.h"
#include "hvd/base/text.h"
#include "hvd/base/threads.h"

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
  std::list<std::shared_ptr<RunningWorld>> lasting;  // left, which others still need
};
Living& living() {
  static auto* const all = new Living;
  return *all;
}

void let_go(std::list<std::shared_ptr<RunningWorld>>::iterator lasting) {
  std::shared_ptr<RunningWorld> last;
  {
    const std::lock_guard lock(living().mutex);
    last = std::exchange(*lasting, nullptr);
  }
  last = nullptr;  // without the lock: the last value of another world may go with it
  const std::lock_guard lock(living().mutex);
  living().lasting.erase(lasting);
}

/// Has another thread end the world once all have left. Returns false if there can be none.
bool let_last(const std::shared_ptr<RunningWorld>& world) {
  std::unique_lock lock(living().mutex);
  const auto lasting = living().lasting.insert(living().lasting.end(), world);
  lock.unlock();
  try {
    const SignalsKeptOff of_it;
    std::thread([lasting] {
      const InsideLibrary inside;
      end_in_order(**lasting);
      let_go(lasting);
    }).detach();
    return true;
  } catch (const std::system_error&) {
    let_go(lasting);
    return false;
  }
}

/// Ends worlds that last for others. Returns whether there are any.
bool abandon_lasting() {
  std::vector<std::shared_ptr<RunningWorld>> worlds;  // they go without the lock, likewise
  {
    const std::lock_guard lock(living().mutex);
    worlds.assign(living().lasting.begin(), living().lasting.end());
  }
  for (const auto& world : worlds)
    if (world) world->engine->abort();
  return !worlds.empty();
}

bool end_world(const std::shared_ptr<RunningWorld>& world,
               std::chrono::milliseconds patience) noexcept {
  const InsideLibrary inside;
  try {
    if (!world->engine->leave(patience)) {
      if (let_last(world)) return false;
      world->engine->abort();
    }
  } catch (...) {
    const Status failure = status_of_current_exception();
    log(LogLevel::Error, "at the end of a world: {}", failure.text());
    world->engine->abort(failure);  // nobody is to be waited for
  }
  return end_in_order(*world);
}

}  // namespace

bool end_in_order(const RunningWorld& world) noexcept {
  const InsideLibrary inside;
  try {
    const bool clean = world.engine->shutdown();
    if (world.close) world.close(clean);
    return clean;
  } catch (...) {
    log(LogLevel::Error, "at the end of the world: {}", status_of_current_exception().text());
    return false;
  }
}

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
    std::thread([world = running_] { end_world(world, kPatience); }).detach();
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
  if (!ending) return false;
  const bool clean = end_world(ending, patience);
  const std::lock_guard lock(mutex_);
  ending_.reset();  // what lasts is the others'
  return clean;
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
  while (abandon_lasting()) std::this_thread::sleep_for(1ms);
}

}  // namespace hvd
