#pragma once
/// make_world() puts a world together. Its steps are collective and in the same order on all ranks;
/// each that can fail on one rank alone is followed by an agreement, so that it fails on all. Two
/// of them have a file each:
///   backends.cc  the one list of what can execute batches, in the order in which they are asked;
///                CONTRIBUTING.md, "A new backend", says how one is added
///   wires.cc     the choice of what carries the messages between ranks of different domains: MPI
///                or UCX (HVD_WIRE)
// Tested in tests/system/scripts/starts/process_starts.sh,
// tests/torch_bindings/collectives/world_test.cc

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hvd/api/running_world.h"
#include "hvd/config.h"
#include "hvd/engine/engine.h"
#include "hvd/topology.h"
#include "ops/bootstrap.h"
#include "ops/p2p/point_to_point.h"
#include "ops/shm/memory/arena.h"

namespace hvd {

/// Backends are those of this process.
struct Backends {
  std::vector<std::unique_ptr<Backend>> all;
  /// CUDA's index of this rank's GPU; -1 without one.
  int device = -1;
  /// "NCCL 2.28.9, CUDA 13.0, one rank per GPU", "..., 4 ranks share a GPU, through CUDA IPC", or
  /// why there is none.
  std::string devices;
};

/// Collective: communicators are made, and the ranks say which GPUs they have. `parts` has its
/// topology, board and stats already. `make_wire` where there are several domains.
Backends make_backends(const EngineParts& parts, const std::shared_ptr<Bootstrap>& bootstrap,
                       const MakePointToPoint& make_wire, const DomainMemory& memory,
                       const std::shared_ptr<Arena>& arena);

struct ChosenWire {
  std::string name;       ///< "MPI", "UCX"; empty where a world of one domain needs none
  MakePointToPoint make;  ///< collective
  /// Says that the world has ended in order. Null where nobody asks for it.
  std::shared_ptr<std::atomic<bool>> is_over = {};
};

/// Collective. `bootstrap` lives as long as what is returned; `why_not_shared`: as
/// Bootstrap::share_memory has said. Throws BackendError, which says what to do, where the wire
/// that is wanted, or needed, cannot be had.
ChosenWire choose_wire(const Config& config, const Bootstrap& bootstrap, const Topology& topology,
                       const std::string& why_not_shared);

/// Called when a world has ended in order on all ranks, with what its ranks met by.
using WhenEnded = std::function<void(const Bootstrap& bootstrap)>;

/// Collective, inside of a call of this rank's. `name`: empty for the global world. Throws what
/// Bootstrap throws, and BackendError for what the system refuses.
RunningWorld make_world(const Config& config, const std::shared_ptr<Bootstrap>& bootstrap,
                        const std::string& name, const WhenEnded& ended);

}  // namespace hvd
