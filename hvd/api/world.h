#pragma once
/// The global world, and the one that a thread's calls mean. The global one is the only global
/// state of the library; any thread may ask for it, `init()` and `shutdown()` alone change it. In a
/// process that was forked from a rank there is none (hvd/base/process.h).

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "hvd/api/running_world.h"
#include "hvd/base/visible.h"
#include "hvd/options.h"

namespace hvd {

/// Returns the world that this thread's calls mean. Throws NotInitialized, also in a process that
/// was forked from a rank.
std::shared_ptr<RunningWorld> current_world();
/// Throws what that throws, and does nothing else: before arguments are looked at, of which it is
/// to be said first that nothing runs.
HVD_BETWEEN_LIBRARIES void require_running();
/// Returns the same; null where there is none, or no more, or this process was forked from a rank.
std::shared_ptr<RunningWorld> current_world_if_any();
/// Returns the world of that set: the one that this thread's calls mean where it may be any. Throws
/// NotInitialized, also where this process has left that world.
std::shared_ptr<RunningWorld> world_of(const ProcessSet& set);
/// Returns the number of the world that this thread's calls mean.
HVD_BETWEEN_LIBRARIES std::uint64_t current_world_number();
/// Throws InvalidArgument where this thread's calls mean another world than that of an object which
/// was made in `world`.
HVD_BETWEEN_LIBRARIES void require_current(const World& world, std::string_view what);
/// Throws InvalidArgument where the set is one of another world.
HVD_BETWEEN_LIBRARIES void require_set_of_current_world(const ProcessSet& set);
inline void require_current_world(const ProcessSet& set) {
  if (set.id() != 0) require_set_of_current_world(set);
}
/// SmallCalls::try_run of the current world's engine. Throws NotInitialized.
HVD_BETWEEN_LIBRARIES bool try_fast_path(const SmallCall& call);
/// Returns that world's pool of results' memory; null where it has none, or there is no world.
HVD_BETWEEN_LIBRARIES std::shared_ptr<ResultPool> result_pool();
/// Makes `world` the global one; there must be none.
void install_world(RunningWorld world);
/// Ends the world of that engine at once, on all ranks.
void abort_engine(Engine& running, const std::string& reason);
/// Returns whether there is a global one.
bool has_world();
/// Returns when no thread is ending one, and none lasts that this rank has left: the ranks would
/// meet for two things at once.
void await_end_of_world();
/// Ends the global world in order, as `shutdown()` does: waits until all other ranks leave too, or
/// one has died or the world has failed. Does nothing where there is no world. Where another thread
/// is ending it, waits for that. For the end of the process, or of MPI.
void leave_world() noexcept;
/// Leaves the global world as it is, for the end of a process with another status than 0: the ranks
/// of this host see it die; those of other hosts are told where this rank speaks for its own. Waits
/// for nobody.
void desert_world(int exit_status) noexcept;

/// Called after every `init()` from now on, in its thread: front ends set themselves up then.
HVD_BETWEEN_LIBRARIES void on_init(std::function<void()> hook);

}  // namespace hvd
