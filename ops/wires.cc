// Tested in tests/system/scripts/starts/without_mpi.sh, tests/system/scripts/starts/start_wrong.sh
#include "ops/make_world.h"

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "ops/mpi/meeting.h"
#include "ops/mpi/point_to_point.h"
#include "ops/ucx/wire.h"

namespace hvd {

namespace {

/// Returns why there must be a wire, as the end of a sentence.
std::string need(const Topology& topology, const std::string& why_not_shared) {
  if (topology.cross_size > 1)
    return formatted("the {} ranks are on {} hosts", topology.size, topology.cross_size);
  return formatted("the {} ranks cannot share memory{}{}", topology.size,
                   why_not_shared.empty() ? "" : ": ", why_not_shared);
}

ChosenWire choose_mpi(const Bootstrap& bootstrap) {
  bootstrap.mpi()->require_threads(
      "hvd::init(): ranks of several hosts, and of one host with HVD_SHARED_MEMORY=off,");
  const auto is_over = std::make_shared<std::atomic<bool>>(false);
  return {"MPI",
          [&bootstrap, is_over] {
            // a rank that has failed says so here: MPI_Comm_dup would wait for it
            bootstrap.agree();
            return std::make_unique<MpiPointToPoint>(
                MpiComm::duplicate(bootstrap.mpi()->comm().get()), is_over);
          },
          is_over};
}

}  // namespace

ChosenWire choose_wire(const Config& config, const Bootstrap& bootstrap, const Topology& topology,
                       const std::string& why_not_shared) {
  if (topology.domains == 1) return {};
  const bool has_mpi = bootstrap.mpi() != nullptr;
  const bool wants_mpi = config.wire == Wire::Auto ? has_mpi : config.wire == Wire::Mpi;
  if (wants_mpi && has_mpi) return choose_mpi(bootstrap);
  if (wants_mpi)
    throw BackendError(
        formatted("hvd::init(): HVD_WIRE=mpi: the ranks met without MPI (RANK and WORLD_SIZE, or "
                  "HVD_INIT), and {}: start them by mpirun, "
                  "or leave HVD_WIRE unset",
                  need(topology, why_not_shared)));
  if (const std::string problem = why_no_ucx(); !problem.empty()) {
    if (has_mpi)
      throw BackendError(
          formatted("hvd::init(): HVD_WIRE=ucx: {}; install it, or leave HVD_WIRE unset", problem));
    throw BackendError(
        formatted("hvd::init(): the ranks met without MPI (RANK and WORLD_SIZE, or HVD_INIT), and "
                  "{}: between ranks that share no memory hvd then needs UCX, but {}; install it, "
                  "or start the ranks by mpirun",
                  need(topology, why_not_shared), problem));
  }
  return {"UCX", open_ucx(bootstrap.rank(), bootstrap.size(),
                          [&bootstrap](const Bytes& mine) { return bootstrap.allgather(mine); })};
}

}  // namespace hvd
