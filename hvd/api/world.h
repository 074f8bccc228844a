#pragma once
/// A World is the one that a process is in: `ops/` makes it, `hvd/hvd.h` works on it. It is the only global state of the library. Any
/// thread may ask for it; `init()` and `shutdown()` alone change it.
/// In a process that was forked from a rank there is none (hvd/base/process.h).

#include <functional>
#include <memory>
#include <string>

#include "hvd/api/result_pool.h"
#include "hvd/base/visible.h"
#include "hvd/engine/engine.h"

namespace hvd {

struct World {
  std::shared_ptr<Engine> engine;
  std::string description;
  bool mpi_threads = false;
  bool has_peers = false;  ///< a process that is forked later is never a rank, also when this world has ended
  /// Memory shared by the ranks of the host, see `hvd::allocate_shared`.
  std::function<std::shared_ptr<void>(std::size_t)> allocate_shared;
  /// Gives the pages of what is free of it back to the system; may be null.
  std::function<void()> trim_shared;
  /// Returns the place of such memory of this rank, for the other ranks of the host. Null as `allocate_shared`.
  std::function<std::uint64_t(const void*)> shared_place;
  /// The memory of that rank at that place; null for a rank that this one shares no memory with.
  std::function<std::shared_ptr<void>(int rank, std::uint64_t place)> shared_at;
  /// The memory of large results on the host; null where each has ordinary memory.
  std::shared_ptr<ResultPool> results;
  /// Host memory: `count` elements at `from` in type `from_type` become the same in `to_type` at `to`, rounded once.
  std::function<void(void* to, DataType to_type, const void* from, DataType from_type, std::size_t count)> convert;
  /// After the engine's shutdown; `clean`: all ranks have left in order.
  std::function<void(bool clean)> close;
  /// Gives what was said last to other hosts a moment to be sent.
  std::function<void()> flush;
};

/// Throws NotInitialized, also in a process that was forked from a rank.
std::shared_ptr<World> current_world();
/// Engine::try_fast_path of the current world's engine. Throws NotInitialized.
HVD_BETWEEN_LIBRARIES bool try_fast_path(const SmallCall& call);
/// Returns the current world's pool of results' memory; null where it has none, or there is no world.
HVD_BETWEEN_LIBRARIES std::shared_ptr<ResultPool> result_pool();
/// Makes `world` the current one; there must be none.
void install_world(World world);
/// Returns whether there is one.
bool has_world();
/// Returns when no thread is ending one: the ranks would meet for two things at once.
void await_end_of_world();
/// Ends the world in order, as `shutdown()` does: waits until all other ranks leave too, or one has died or the world has failed. Does
/// nothing where there is no world. Where another thread is ending it, waits for that. For the end of the process, or of MPI.
void leave_world() noexcept;
/// Leaves the world as it is, for the end of a process with another status than 0: the ranks of this host see it die; those of other hosts
/// are told where this rank speaks for its own. Waits for nobody.
void desert_world(int exit_status) noexcept;

/// Called after every `init()` from now on, in its thread: for front ends that set themselves up then.
HVD_BETWEEN_LIBRARIES void on_init(std::function<void()> hook);

}  // namespace hvd
