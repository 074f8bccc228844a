#pragma once
/// RunningWorld is what a world has while it runs: `ops/` makes it, `hvd/hvd.h` works on it. Any
/// thread may use it; it does not change.
// Tested in tests/hvd/api/world_test.cc, tests/ops/worlds_test.cc

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "hvd/api/result_pool.h"
#include "hvd/engine/engine.h"

namespace hvd {

struct RunningWorld {
  std::shared_ptr<Engine> engine;
  std::string description;
  bool mpi_threads = false;
  bool may_end_later = false;  ///< its end may be another thread's than that which has called
                               ///< shutdown(): no MPI, or one that allows it
  bool has_peers = false;      ///< processes forked later are never ranks, even once this has ended
  /// Memory shared by the ranks of the host, see `hvd::allocate_shared`.
  std::function<std::shared_ptr<void>(std::size_t)> allocate_shared;
  /// Gives the pages of what is free of it back to the system; may be null.
  std::function<void()> trim_shared;
  /// Returns the place of such memory of this rank, for the other ranks of the host. Null as
  /// `allocate_shared`.
  std::function<std::uint64_t(const void*)> shared_place;
  /// The memory of that rank at that place; null for a rank that this one shares no memory with.
  std::function<std::shared_ptr<void>(int rank, std::uint64_t place)> shared_at;
  /// The memory of large results on the host; null where each has ordinary memory.
  std::shared_ptr<ResultPool> results;
  /// Host memory: `count` elements at `from` in type `from_type` become the same in `to_type` at
  /// `to`, rounded once.
  std::function<void(void* to, DataType to_type, const void* from, DataType from_type,
                     std::size_t count)>
      convert;
  /// After the engine's shutdown; `clean`: all ranks have left in order.
  std::function<void(bool clean)> close;
  /// Gives what was said last to other hosts a moment to be sent.
  std::function<void()> flush;
};

}  // namespace hvd
