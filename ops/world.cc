/// `hvd::World`: makes a world beside the global one.
// Tested in tests/ops/worlds_test.cc

#include "hvd/world.h"

#include <cstdlib>
#include <memory>

#include "hvd/api/world.h"
#include "hvd/api/world_life.h"
#include "hvd/base/log.h"
#include "hvd/base/process.h"
#include "hvd/engine/core/caller_threads.h"
#include "ops/bootstrap.h"
#include "ops/make_world.h"
#include "ops/rendezvous/callback_meeting.h"

namespace hvd {

namespace {

/// A process that ends leaves its worlds, and waits for nobody.
void watch_exit() {
  static MadeHere process;
  static const auto watched = ::on_exit(
      [](int /*status*/, void* made) {
        if (!is_forked_from_rank() && !is_inside_library() &&
            static_cast<MadeHere*>(made)->still_here())
          WorldLife::leave_all();
      },
      &process);
  static_cast<void>(watched);
}

RunningWorld make(const Rendezvous& rendezvous, Config config) {
  const std::string problem = put_right(config);
  // the process's: where there is a global world, that one's
  if (!has_world()) set_log(config.log_level, -1);
  const auto bootstrap = std::make_shared<Bootstrap>(
      std::make_unique<CallbackMeeting>(rendezvous, config.start_timeout));
  become_rank_of_some_world(rendezvous.rank);
  try {
    if (!problem.empty()) throw InvalidArgument(problem);
    return make_world(config, bootstrap, rendezvous.name, {});
  } catch (...) {
    const Status status = status_of_current_exception();
    bootstrap->fail(status);
    status.raise();
    throw;
  }
}

}  // namespace

World::World(const Rendezvous& rendezvous, const Config& config) {
  const LibraryCall call;
  life_ = std::make_shared<WorldLife>(make(rendezvous, config), rendezvous.name);
  life_->running()->engine->enter_init_thread();
  watch_exit();
}

Config World::default_config() {
  Config config = Config::from_environment();
  config.timeline.clear();
  config.process_sets.clear();
  config.thread_affinity.clear();  // by the ranks of the global world
  if (config.wire == Wire::Mpi) config.wire = Wire::Auto;
  return config;
}

}  // namespace hvd
