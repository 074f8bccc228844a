#pragma once
/// A World is the one that a process is in: `ops/` makes it, `hvd/hvd.h` works on it. It is the only global state of the library. Any
/// thread may ask for it; `init()` and `shutdown()` alone change it.

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "hvd/engine/engine.h"

namespace hvd {

struct World {
  std::shared_ptr<Engine> engine;
  std::string description;
  bool mpi_threads = false;
  /// Memory shared by the ranks of the host, see `hvd::allocate_shared`.
  std::function<std::shared_ptr<void>(std::size_t)> allocate_shared;
  /// Host memory: `count` elements at `from` in type `from_type` become the same in `to_type` at `to`, rounded once.
  std::function<void(void* to, DataType to_type, const void* from, DataType from_type, std::size_t count)> convert;
  /// After the engine's shutdown; `clean`: all ranks have left in order.
  std::function<void(bool clean)> close;
};

/// Throws NotInitialized.
std::shared_ptr<World> current_world();
/// Makes `world` the current one; there must be none.
void install_world(World world);
/// Returns whether there is one.
bool has_world();
/// Waits at most `patience` for the other ranks to leave too. Does nothing where there is no world. For the end of the process.
void leave_world(std::chrono::milliseconds patience) noexcept;

/// Called after every `init()`, in this thread: for front ends that set themselves up then. At static initialisation only.
void on_init(std::function<void()> hook);

}  // namespace hvd
