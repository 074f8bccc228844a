/// `hvd::init()`: makes the global world, and ends it with the process.
// Tested in tests/system/scripts/starts/process_starts.sh,
// tests/torch_bindings/collectives/world_test.cc

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "hvd/api/world.h"
#include "hvd/api/world_life.h"
#include "hvd/base/log.h"
#include "hvd/base/process.h"
#include "hvd/base/text.h"
#include "hvd/engine/core/caller_threads.h"
#include "hvd/engine/engine.h"
#include "hvd/hvd.h"
#include "hvd/launch/launch.h"
#include "ops/bootstrap.h"
#include "ops/make_world.h"
#include "ops/mpi/meeting.h"

namespace hvd {

namespace {

/// The last world ended in order on all ranks.
bool ended_in_order = false;
/// The last `init()` has failed, and all ranks live and know it.
bool was_refused = false;
/// For ranks that are still to hear that the world has failed, and then end with status 0 too.
constexpr std::chrono::seconds kPatienceAfterFailure{10};

/// The ranks that have met, null before. Lives as long as the process: a communicator must not be
/// freed when nobody else does.
std::shared_ptr<Bootstrap>& met_ranks() {
  static auto* const bootstrap = new std::shared_ptr<Bootstrap>;
  return *bootstrap;
}

bool may_end_here(const void* process) {
  if (is_forked_from_rank() || *static_cast<const pid_t*>(process) != ::getpid()) return false;
  // else a signal handler has interrupted it: locks are taken, and the others see this rank die
  return !is_inside_library();
}

/// A process that returns from main() without shutdown() does here what shutdown() does, and so
/// waits until the others end too: rank 0 may have a checkpoint to write. One that ends with
/// another status than 0 waits for nobody, as one that ends by an exception does not come here. MPI
/// is finalized only where all have ended in order, or come here with status 0 in time: it waits
/// for all, and a rank that failed must not look as if it had not. A program that can do without a
/// world, or has caught the error by which it failed, has not failed: MPI, which `init()` has
/// started, must not say that it has.
void at_exit(int status, void* process) {
  if (!may_end_here(process)) return;
  // first: who waits for this process in one of them comes to no end of the global one
  WorldLife::leave_all();
  const bool well = (status & 0xff) == 0;
  if (well) {
    leave_world();
  } else {
    desert_world(status & 0xff);
  }
  if (ended_in_order || (well && was_refused)) {
    finalize_mpi();
  } else if (const auto& ranks = met_ranks(); well && ranks && ranks->mpi() != nullptr) {
    ranks->mpi()->finalize_if_all_end(kPatienceAfterFailure);
  }
}

/// After the first `init()` that has made a world, and after the first that has not: what the
/// program registers in between ends first.
void watch_exit(bool has_world) {
  static pid_t process = ::getpid();
  static bool is_watched[2] = {};
  if (!std::exchange(is_watched[has_world ? 1 : 0], true)) ::on_exit(at_exit, &process);
}

/// Returns the ranks, who meet unless they have before. A world that has failed may have lost a
/// rank: then those that meet in a store meet anew, as the environment says now, with who has come
/// in its place or with fewer. All that are left find out together.
std::shared_ptr<Bootstrap> find_ranks(const Config& config) {
  std::shared_ptr<Bootstrap>& bootstrap = met_ranks();
  if (bootstrap && bootstrap->is_in_store() && !ended_in_order && !was_refused) {
    try {
      bootstrap->begin();
      bootstrap->agree();
    } catch (const Error& error) {
      log(LogLevel::Info, "the ranks meet anew: {}", error.what());
      bootstrap.reset();
    }
  }
  if (!bootstrap) bootstrap = std::make_shared<Bootstrap>(config.start_timeout);
  return bootstrap;
}

}  // namespace

void init() {
  await_end_of_world();  // which is still there while another thread ends it
  if (!has_world()) init(Config::from_environment());
}

void init(const Config& given) {
  const LibraryCall call;
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  await_end_of_world();
  if (has_world()) return;
  // it has been done before main(): that this names it brings its file into a program that is
  // linked statically
  print_whole_lines();
  Config config = given;
  const std::string problem = put_right(config);
  set_log(config.log_level, launcher_hints().rank.value_or(-1));

  const std::shared_ptr<Bootstrap> bootstrap = find_ranks(config);
  Bootstrap& ranks = *bootstrap;
  set_log(config.log_level, ranks.rank());
  ranks.begin();
  if (!ranks.is_alone()) become_rank(ranks.rank());
  RunningWorld world;
  const auto refuse = [&ranks](const Status& status) {
    ranks.fail(status);
    was_refused = ranks.is_whole();
    watch_exit(false);
  };
  try {
    if (!problem.empty()) throw InvalidArgument(problem);
    world = make_world(config, bootstrap, "", [](const Bootstrap& met) {
      met.barrier();  // MPI may be finalised then
      ended_in_order = true;
    });
  } catch (const Error&) {
    refuse(status_of_current_exception());
    throw;
  } catch (...) {
    const Status status = status_of_current_exception();
    refuse(status);
    status.raise();
  }
  ended_in_order = was_refused = false;
  const Topology topology = world.engine->topology();
  const std::string description = world.description;
  install_world(std::move(world));
  watch_exit(true);
  if (ranks.mpi() != nullptr)
    ranks.mpi()->before_finalize([] {
      if (!is_inside_library()) leave_world();
    });
  if (ranks.rank() != 0) return;
  log_plain(formatted("hvd: {}\n", description));
  for (const auto& remark : remarks(config)) log(LogLevel::Warning, "{}", remark);
  if (topology.domains > 1 && config.wire != Wire::Ucx && ranks.mpi() != nullptr &&
      ranks.mpi()->is_serialized())
    log(LogLevel::Warning,
        "MPI was started with MPI_THREAD_SERIALIZED: the program must not call MPI itself between "
        "hvd::init() and hvd::shutdown(), because hvd does so in threads of its own; "
        "MPI_THREAD_MULTIPLE lets both");
}

}  // namespace hvd
