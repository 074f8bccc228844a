// Tested in tests/contract/instance_processes.cc
#include "ops/make_world.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "hvd/base/log.h"
#include "hvd/base/wire.h"
#include "hvd/config.h"
#include "hvd/hvd.h"
#include "ops/gpu/api/placement.h"
#include "ops/gpu/ipc/shared_gpu_backend.h"
#include "ops/gpu/nccl/communicator.h"
#include "ops/gpu/nccl/nccl_backend.h"
#include "ops/gpu/staged/staged_backend.h"
#include "ops/mpi/meeting.h"
#include "ops/p2p/backend.h"
#include "ops/shm/shm_backend.h"

namespace hvd {

namespace {

/// DomainControls are what the ranks of a domain have in common for their GPUs.
struct DomainControls {
  std::vector<gpu::SharedControl*> of_rank;  ///< by the rank's index in the domain
  std::uint32_t* abort_word = nullptr;       ///< of AbortMark, one for all
};

/// They lie in the ranks' arenas, for as long as the world; all ranks learn where. Collective.
DomainControls share_controls(const Topology& topology, const Bootstrap& bootstrap,
                              const DomainMemory& memory, Arena& arena) {
  constexpr std::size_t kWholePages = std::size_t{64} << 10;  // from here on the arena gives them
  static_assert(gpu::AbortMark::kSharedBytes <= kWholePages);
  auto* mine = new (arena.allocate(sizeof(gpu::SharedControl))) gpu::SharedControl{};
  Writer said;
  said.put(arena.offset(mine));
  if (topology.domain_index == 0)
    said.put(arena.offset(new (arena.allocate(kWholePages)) std::uint32_t{0}));
  const auto places = bootstrap.allgather(said.take());
  DomainControls controls;
  for (std::size_t i = 0; i < topology.domain_ranks.size(); ++i) {
    Reader reader(places[static_cast<std::size_t>(topology.domain_ranks[i])]);
    std::byte* const begin = memory.arenas[i].data();
    controls.of_rank.push_back(
        reinterpret_cast<gpu::SharedControl*>(begin + reader.get<std::uint64_t>()));
    if (i == 0)
      controls.abort_word = reinterpret_cast<std::uint32_t*>(begin + reader.get<std::uint64_t>());
  }
  return controls;
}

std::optional<Route> wanted_way(GpuBackend wanted) {
  switch (wanted) {
    case GpuBackend::Nccl: return Route::Nccl;
    case GpuBackend::Shared: return Route::SharedGpu;
    case GpuBackend::Staged: return Route::Staged;
    default: return std::nullopt;
  }
}

/// WorldGpus are what the ranks say of their GPUs.
struct WorldGpus {
  std::vector<std::string> id_of_rank;
  bool can_share = true, switches_sum = true, have_kernels = true,
       have_windows = true;  ///< all of them
};

/// Collective. The first rank whose GPU this build has no kernels for says so.
WorldGpus find_gpus(const gpu::GpuApi& table, int device, const Topology& topology,
                    const Bootstrap& bootstrap) {
  const auto word = [](bool answer) { return static_cast<std::uint8_t>(answer ? 1 : 0); };
  const std::string lacks = gpu::lack_of_kernels(table, device, gpu::gpu_architectures());
  Writer mine;
  const bool may_share = detail::variable_of_environment("NCCL_MULTI_RANK_GPU_ENABLE") == "1";
  mine.put_string(gpu::gpu_id(table, device, may_share)).put(word(gpu::can_share(table, device)));
  mine.put(word(gpu::has_multicast(table, device)))
      .put(word(lacks.empty()))
      .put(word(gpu::has_windows(table)));
  WorldGpus gpus;
  for (const auto& said : bootstrap.allgather(mine.take())) {
    Reader reader(said);
    const auto rank = static_cast<int>(gpus.id_of_rank.size());
    gpus.id_of_rank.push_back(reader.get_string());
    gpus.can_share = reader.get<std::uint8_t>() != 0 && gpus.can_share;
    gpus.switches_sum = reader.get<std::uint8_t>() != 0 && gpus.switches_sum;
    const bool has_kernels = reader.get<std::uint8_t>() != 0;
    if (!has_kernels && gpus.have_kernels && rank == topology.rank)
      log(LogLevel::Warning, "rank {}: {}", rank, lacks);
    gpus.have_kernels = has_kernels && gpus.have_kernels;
    gpus.have_windows = reader.get<std::uint8_t>() != 0 && gpus.have_windows;
  }
  return gpus;
}

/// Returns the probe of the ranks that have this rank's GPU, found by their places in the domain.
std::shared_ptr<gpu::SharingProbe> make_probe(const gpu::GpuApi& table, int device,
                                              const gpu::Placement& placement,
                                              const EngineParts& parts,
                                              const std::vector<gpu::SharedControl*>& controls) {
  const Topology& topology = parts.topology;
  Board* const board = parts.board.get();
  std::vector<gpu::SharedControl*> sharers;
  std::vector<int> others;
  const std::vector<int> ranks = placement.sharers_of(topology.rank);
  std::size_t self = 0;
  for (const int rank : ranks) {
    const int index = topology.index_here(rank);
    if (rank == topology.rank) self = sharers.size();
    if (rank != topology.rank) others.push_back(index);
    sharers.push_back(controls.at(static_cast<std::size_t>(index)));
  }
  const auto ring = [board, others] {
    for (const int index : others) board->bells().ring_worker(index);
    board->bells().ring_waiters();
  };
  const auto refused = [rank = topology.rank](const std::string& why) {
    log(LogLevel::Warning,
        "ranks cannot share a GPU here, as {} (rank {}): their tensors go through the host, which "
        "is slower",
        why, rank);
  };
  gpu::SharingPatience patience;
  if (!parts.config.stall_check_disable) patience.limit = parts.config.stall_check_time;
  patience.tell =
      [ranks, waited = parts.config.stall_check_time](const std::vector<std::size_t>& missing) {
        std::vector<int> late;
        for (const std::size_t index : missing) late.push_back(ranks.at(index));
        log(LogLevel::Warning,
            "for {} s it has been waited, before the first GPU tensor, for {} to answer whether "
            "GPUs can be shared: do they do anything?",
            waited.count(), rank_list(late));
      };
  return std::make_shared<gpu::SharingProbe>(
      table, device, std::move(sharers), self, ring, [board] { return board->failed(); }, refused,
      std::move(patience));
}

gpu::Registration registration_in(const Config& config) {
  if (config.nccl_registration == NcclRegistration::None) return gpu::Registration::None;
  return config.nccl_registration == NcclRegistration::Window ? gpu::Registration::Window
                                                              : gpu::Registration::Buffer;
}

/// Says once that windows are asked for and cannot be had.
void warn_of_windows(const EngineParts& parts, const WorldGpus& gpus) {
  if (parts.config.nccl_registration != NcclRegistration::Window || gpus.have_windows ||
      parts.topology.rank != 0)
    return;
  log(LogLevel::Warning,
      "HVD_NCCL_REGISTRATION=window needs NCCL 2.29.7 or later on all ranks: before, NCCL's "
      "kernels over windows do not end after a failure; buffers are registered instead");
}

gpu::NcclOptions nccl_options(const EngineParts& parts, const WorldGpus& gpus) {
  gpu::NcclOptions options;
  options.fusion_threshold_bytes = parts.config.fusion_threshold_bytes;
  // the engine owns the board and the backends, the board longer
  options.patience.interrupted = gpu::world_has_failed(*parts.board);
  options.registration = gpu::registration_of(registration_in(parts.config), gpus.have_windows);
  warn_of_windows(parts, gpus);
  options.sums_only = gpus.switches_sum;
  options.streams = parts.config.num_nccl_streams;
  if (log_enabled(LogLevel::Info))
    options.remark = [](const std::string& text) { log_line(LogLevel::Info, text); };
  return options;
}

/// The engine owns the board and the backends, the board longer.
gpu::WorldFailure failure_of(Board& board) {
  return {[&board] { return board.failed() ? board.failure() : Status(); },
          [&board](const Status& why) { board.set_failure(why); }};
}

/// Behind those for host tensors, which `made` has already.
void add_gpu_backends(Backends& made, const gpu::GpuApi& table, const EngineParts& parts,
                      const std::shared_ptr<Bootstrap>& bootstrap, const DomainMemory& memory,
                      const std::shared_ptr<Arena>& arena) {
  const Topology& topology = parts.topology;
  const int device = made.device = gpu::device_of(table, topology.local_rank);
  if (topology.size > 1)
    if (const std::string remark = gpu::make_current(table, device, topology.rank); !remark.empty())
      log(LogLevel::Warning, "{}", remark);
  const WorldGpus gpus = find_gpus(table, device, topology, *bootstrap);
  std::vector<int> hosts;
  for (int rank = 0; rank < topology.size; ++rank) hosts.push_back(topology.host_of(rank));
  const auto placement = std::make_shared<gpu::Placement>(
      hosts, topology.domain_of_rank, gpus.id_of_rank, gpu::nccl_built(),
      gpus.have_kernels ? wanted_way(parts.config.gpu_backend) : Route::Staged, gpus.can_share);
  made.devices += ", " + placement->describe();
  const auto takes = [placement](Route way) {
    return [=](const ProcessSetInfo& set) {
      return placement->route_of_set(set.id, set.ranks) == way;
    };
  };
  auto controls = share_controls(topology, *bootstrap, memory, *arena);
  gpu::NcclOptions options = nccl_options(parts, gpus);
  options.abort_word = controls.abort_word;
  options.takes = takes(Route::Nccl);
  if (parts.config.hierarchical_allreduce) options.host_of_rank = hosts;
  // With MPI, NCCL's ids travel through it, whatever the wire. Ranks of one host work with what MPI
  // there is, as they always have.
  const bool sends_ids = topology.domains > 1 && bootstrap->mpi() != nullptr;
  const auto require_threads = [bootstrap, sends_ids] {
    if (sends_ids) bootstrap->mpi()->require_threads("GPU tensors that NCCL carries between hosts");
  };
  if (placement->route_of_set(parts.process_sets.front().id, parts.process_sets.front().ranks) ==
      Route::Nccl)
    require_threads();
  auto exchange = [bootstrap, require_threads, failed = options.patience.interrupted,
                   limit = options.patience.limit](const ProcessSetInfo& set, const Bytes& mine) {
    require_threads();  // a smaller set may have a GPU for each rank where the whole world has not
    const auto deadline = std::chrono::steady_clock::now() + limit;
    const auto give_up = [&] { return failed() || std::chrono::steady_clock::now() > deadline; };
    return bootstrap->give_from_first(set.ranks, mine, set.id, give_up);
  };
  std::vector<Backend*> host;
  for (const auto& backend : made.all) host.push_back(backend.get());
  made.all.push_back(
      std::make_unique<gpu::NcclBackend>(table, device, std::move(exchange), options));

  gpu::SharedGpuOptions shared;
  shared.probe = make_probe(table, device, *placement, parts, controls.of_rank);
  shared.takes = [placed = takes(Route::SharedGpu),
                  probe = shared.probe](const ProcessSetInfo& set) {
    // of others' sets nothing depends on it
    return placed(set) && (set.rank < 0 || probe->possible());
  };
  made.all.push_back(std::make_unique<gpu::SharedGpuBackend>(table, device, *parts.board, topology,
                                                             std::move(controls.of_rank), shared));
  made.all.push_back(std::make_unique<gpu::StagedBackend>(
      table, topology.rank, device, std::move(host), arena, topology.domain_index,
      failure_of(*parts.board), memory.owner));
}

}  // namespace

/// The list: the first that supports a batch runs it. A new backend stands here (CONTRIBUTING.md).
Backends make_backends(const EngineParts& parts, const std::shared_ptr<Bootstrap>& bootstrap,
                       const MakePointToPoint& make_wire, const DomainMemory& memory,
                       const std::shared_ptr<Arena>& arena) {
  const Topology& topology = parts.topology;
  Backends made{.devices = gpu::gpu_libraries()};
  made.all.push_back(
      std::make_unique<ShmBackend>(memory, arena, *parts.board, topology, parts.stats));
  if (topology.domains > 1) {
    made.all.push_back(std::make_unique<P2pBackend>(make_wire(), topology, memory, arena,
                                                    *parts.board, parts.stats));
  }
  if (const auto* table = gpu::linked_gpu_api())
    add_gpu_backends(made, *table, parts, bootstrap, memory, arena);
  return made;
}

bool nccl_built() { return gpu::nccl_built(); }
bool cuda_built() { return gpu::linked_gpu_api() != nullptr; }

}  // namespace hvd
