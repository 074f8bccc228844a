#include "ops/backends.h"

#include "hvd/hvd.h"
#include "ops/mpi_backend.h"
#include "ops/nccl/nccl_backend.h"
#include "ops/shm_backend.h"

namespace hvd {

std::vector<std::unique_ptr<Backend>> make_backends(const EngineParts& parts, const std::shared_ptr<Bootstrap>& bootstrap,
                                                    const DomainMemory& memory, const std::shared_ptr<Arena>& arena) {
  const Topology& topology = parts.topology;
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(std::make_unique<ShmBackend>(memory, arena, *parts.board, topology, parts.stats));
  if (topology.domains > 1)
    backends.push_back(
        std::make_unique<MpiBackend>(MpiComm::duplicate(bootstrap->comm().get()), topology, memory, arena, *parts.board, parts.stats));
  if (const auto* table = nccl::real_nccl_table()) {
    auto exchange = [bootstrap](const ProcessSetInfo& set, Bytes mine) { return bootstrap->give_from_first(set.ranks, mine, set.id); };
    nccl::NcclOptions options;
    options.fusion_threshold_bytes = parts.config.fusion_threshold_bytes;
    options.patience.interrupted = [board = parts.board.get()] { return board->failed(); };  // the engine owns both, the board longer
    backends.push_back(std::make_unique<nccl::NcclBackend>(*table, topology.local_rank, std::move(exchange), options));
  }
  return backends;
}

std::string device_description() { return nccl::nccl_version(); }

bool nccl_built() { return nccl::nccl_built(); }
bool cuda_built() { return nccl::nccl_built(); }

}  // namespace hvd
