// Worlds as values: what hvd/world.h says of those that exist. ops/world.cc makes them.
// Tested in tests/ops/worlds_test.cc
#include <chrono>
#include <utility>

#include "hvd/api/world.h"
#include "hvd/api/world_life.h"
#include "hvd/base/text.h"
#include "hvd/engine/core/caller_threads.h"
#include "hvd/hvd.h"
#include "hvd/world.h"

namespace hvd {

World World::current() {
  WorldLife* const chosen = chosen_world();
  return chosen != nullptr ? World(chosen->shared_from_this()) : World();
}

void require_current(const World& world, std::string_view what) {
  if (world == World::current()) return;
  throw InvalidArgument(
      formatted("{}: it was made in {}; call it there, inside of World::run or a WorldScope", what,
                world == World() ? "the global world" : formatted("the world '{}'", world.name())));
}

int World::rank() const {
  return run([] { return hvd::rank(); });
}
int World::size() const {
  return run([] { return hvd::size(); });
}
int World::local_rank() const {
  return run([] { return hvd::local_rank(); });
}
int World::local_size() const {
  return run([] { return hvd::local_size(); });
}
int World::cross_rank() const {
  return run([] { return hvd::cross_rank(); });
}
int World::cross_size() const {
  return run([] { return hvd::cross_size(); });
}
std::string World::name() const { return life_ ? life_->name() : std::string(); }
std::string World::description() const {
  return run([] { return backend_description(); });
}
Stats World::stats() const {
  return run([] { return hvd::stats(); });
}
bool World::is_running() const {
  const auto world = run([] { return current_world_if_any(); });
  return world && !world->engine->has_failed();
}

void World::leave() {
  if (!life_)
    throw InvalidArgument("World::leave() of the global world, which hvd::shutdown() ends");
  const LibraryCall call;
  life_->leave();
}
bool World::shutdown() {
  if (!life_)
    throw InvalidArgument("World::shutdown() of the global world, which hvd::shutdown() ends");
  const LibraryCall call;
  return life_->end(std::chrono::hours(24 * 365));
}

void World::abort(const std::string& reason) const {
  const LibraryCall call;
  const auto running = life_ ? life_->not_over() : run([] { return current_world(); });
  abort_engine(*running->engine, reason);
}

ProcessSet World::add_process_set(const std::vector<int>& ranks) const {
  return run([&] { return hvd::add_process_set(ranks); });
}
void World::remove_process_set(const ProcessSet& process_set) const {
  run([&] { hvd::remove_process_set(process_set); });
}
void World::barrier() const { barrier(ProcessSet()); }
void World::barrier(const ProcessSet& process_set) const {
  run([&] { hvd::barrier(process_set); });
}
std::vector<int> World::barrier_until(std::chrono::nanoseconds time) const {
  return run([&] { return hvd::barrier_until(time); });
}
int World::join() const { return join(ProcessSet()); }
int World::join(const ProcessSet& process_set) const {
  return run([&] { return hvd::join(process_set); });
}

void WorldScope::enter(std::shared_ptr<WorldLife> life) {
  before_ = std::exchange(chosen_world(), life.get());
  life_ = std::move(life);
  entered_ = true;
}
void WorldScope::leave() noexcept { chosen_world() = before_; }

}  // namespace hvd
