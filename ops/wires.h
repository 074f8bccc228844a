#pragma once
/// choose_wire() chooses what carries the messages between ranks of different domains: MPI or UCX (HVD_WIRE). It is for the caller of
/// `init()`.
// Tested in tests/system/scripts/without_mpi.sh, tests/system/scripts/start_wrong.sh

#include <string>

#include "hvd/config.h"
#include "hvd/topology.h"
#include "ops/bootstrap.h"
#include "ops/p2p/point_to_point.h"

namespace hvd {

struct ChosenWire {
  std::string name;       ///< "MPI", "UCX"; empty where a world of one domain needs none
  MakePointToPoint make;  ///< collective
};

/// Collective. `bootstrap` lives as long as what is returned; `why_not_shared`: as Bootstrap::share_memory has said. Throws BackendError,
/// which says what to do, where the wire that is wanted, or needed, cannot be had.
ChosenWire choose_wire(const Config& config, const Bootstrap& bootstrap, const Topology& topology, const std::string& why_not_shared);

}  // namespace hvd
