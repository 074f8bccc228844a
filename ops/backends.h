#pragma once
/// make_backends() is the one list of what can execute batches, in the order in which they are asked. CONTRIBUTING.md, "A new backend",
/// says how one is added.
// Tested in tests/contract/instance_processes.cc

#include <memory>
#include <string>
#include <vector>

#include "hvd/engine/engine.h"
#include "ops/bootstrap.h"
#include "ops/p2p/point_to_point.h"
#include "ops/shm/memory/arena.h"

namespace hvd {

/// Backends are those of this process.
struct Backends {
  std::vector<std::unique_ptr<Backend>> all;
  /// CUDA's index of this rank's GPU; -1 without one.
  int device = -1;
  /// "NCCL 2.28.9, CUDA 13.0, one rank per GPU", "..., 4 ranks share a GPU, through CUDA IPC", or why there is none.
  std::string devices;
};

/// Collective: communicators are made, and the ranks say which GPUs they have. `parts` has its topology, board and stats already.
/// `make_wire` where there are several domains.
Backends make_backends(const EngineParts& parts, const std::shared_ptr<Bootstrap>& bootstrap, const MakePointToPoint& make_wire,
                       const DomainMemory& memory, const std::shared_ptr<Arena>& arena);

}  // namespace hvd
