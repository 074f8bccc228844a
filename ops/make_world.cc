#include "ops/make_world.h"

#include <sys/mman.h>

#include <algorithm>
#include <future>
#include <limits>
#include <numeric>
#include <set>
#include <system_error>
#include <utility>

#include "hvd/api/result_pool.h"
#include "hvd/base/process.h"
#include "hvd/base/text.h"
#include "hvd/base/threads.h"
#include "hvd/hvd.h"
#include "ops/kernels/reduce.h"
#include "ops/mpi/meeting.h"
#include "ops/p2p/transport.h"
#include "ops/shm/shm_backend.h"

namespace hvd {

namespace {

using namespace std::chrono_literals;

std::vector<ProcessSetInfo> make_process_sets(const Config& config, int rank, int size) {
  std::vector<int> everyone(static_cast<std::size_t>(size));
  std::iota(everyone.begin(), everyone.end(), 0);
  std::vector<ProcessSetInfo> sets{{0, std::move(everyone), rank}};
  for (const auto& listed : config.process_sets) {
    const std::set<int> ordered(listed.begin(), listed.end());
    std::vector<int> ranks(ordered.begin(), ordered.end());
    if (ranks.empty() || ranks.size() != listed.size() || ranks.front() < 0 || ranks.back() >= size)
      throw InvalidArgument(
          formatted("Config::process_sets: [{}] must be distinct ranks from 0 to {}",
                    rank_list(listed), size - 1));
    const auto place = std::find(ranks.begin(), ranks.end(), rank);
    const int own = place == ranks.end() ? -1 : static_cast<int>(place - ranks.begin());
    sets.push_back({static_cast<int>(sets.size()), std::move(ranks), own});
  }
  return sets;
}

std::vector<int> leaders_of(const Topology& topology) {
  std::vector<int> leaders(static_cast<std::size_t>(topology.domains), -1);
  for (int rank = topology.size - 1; rank >= 0; --rank)
    leaders[static_cast<std::size_t>(topology.domain_of_rank[static_cast<std::size_t>(rank)])] =
        rank;
  return leaders;
}

/// Throws InvalidArgument on every rank if one has a problem, with the first one's text.
void refuse_together(const Bootstrap& ranks, const std::string& problem) {
  const auto all = ranks.allgather(Writer().put_string(problem).take());
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (const std::string said = Reader(all[rank]).get_string(); !said.empty())
      throw InvalidArgument(formatted("{} (rank {})", said, rank));
}

std::string describe(const Topology& topology, const Bootstrap& bootstrap, const std::string& wire,
                     const std::string& why_not_shared, const std::string& copies,
                     const std::string& devices) {
  const auto plural = [](int n, const char* noun) {
    return formatted("{} {}{}", n, noun, n == 1 ? "" : "s");
  };
  std::string path = topology.size == 1      ? "alone"
                     : topology.domains == 1 ? "shared memory"
                     : topology.domains == topology.cross_size
                         ? formatted("shared memory within hosts, {} between them", wire)
                         : wire;
  if (!copies.empty()) path += formatted(" ({})", copies);
  if (!why_not_shared.empty()) path += formatted(" (no shared memory: {})", why_not_shared);
  return formatted("{} on {}; host tensors: {}, {} kernels; GPU tensors: {}; MPI: {}",
                   plural(topology.size, "rank"), plural(topology.cross_size, "host"), path,
                   kernels::name_of(kernels::best_isa()), devices,
                   bootstrap.mpi() == nullptr             ? "not used"
                   : bootstrap.mpi()->threads_supported() ? "with threads"
                                                          : "without threads");
}

/// The coordination thread's wait before it drives anything, until all ranks have theirs.
struct Beginning {
  std::promise<void> born;
  std::promise<bool> may_begin;
};

/// Collective. A wire may start threads of its own.
ChosenWire open_wire(const Config& config, const Bootstrap& ranks, const Topology& topology,
                     const std::string& why_not_shared) {
  const SignalsKeptOff to_its_threads;
  return choose_wire(config, ranks, topology, why_not_shared);
}

/// Collective. The engine runs once all ranks have one; throws on all if one cannot.
std::shared_ptr<Engine> make_engine(EngineParts parts, const Bootstrap& ranks) {
  const auto beginning = std::make_shared<Beginning>();
  parts.may_begin = [beginning] {
    beginning->born.set_value();
    return beginning->may_begin.get_future().get();
  };
  // A forked child has none of its threads and connections: there it must not be taken apart.
  const auto take_apart = [made = MadeHere()](const Engine* engine) {
    if (made.still_here()) delete engine;
  };
  std::shared_ptr<Engine> engine;
  try {
    engine = {new Engine(std::move(parts)), take_apart};
  } catch (const std::system_error& error) {
    throw BackendError(formatted(
        "the coordination thread cannot be started: {}; 'ulimit -u' limits the threads of a user",
        error.what()));
  }
  try {
    beginning->born.get_future().wait();
    ranks.agree();
  } catch (...) {
    beginning->may_begin.set_value(false);
    throw;
  }
  beginning->may_begin.set_value(true);
  return engine;
}

/// The memory that the ranks of this host share, for those who work in it.
void offer_shared_memory(RunningWorld& world, const DomainMemory& memory,
                         const std::shared_ptr<Arena>& arena, const Topology& topology) {
  if (topology.domain_ranks.size() == 1 && topology.size > 1) return;
  world.allocate_shared = [arena,
                           owner = memory.owner](std::size_t bytes) -> std::shared_ptr<void> {
    std::byte* const block = arena->try_allocate(bytes);
    if (block == nullptr) return nullptr;
    return {block, [arena, owner, made = MadeHere()](void* taken) {
              const InsideLibrary inside;
              if (made.still_here()) arena->free(taken);
            }};
  };
  // Between hosts a network may have been told of the pages, by any rank that sends from them: a
  // page that is another one would go unseen.
  if (topology.domains == 1)
    world.trim_shared = [arena, made = MadeHere()] {
      if (made.still_here()) arena->trim();
    };
  world.shared_place = [arena](const void* block) { return arena->offset(block); };
  world.shared_at = [memory, topology](int rank, std::uint64_t place) -> std::shared_ptr<void> {
    const int index = topology.index_here(rank);
    if (index < 0) return nullptr;
    return {memory.owner, memory.arenas[static_cast<std::size_t>(index)].data() + place};
  };
}

/// Makes the transport from this rank to the domains' leaders; null in a single domain. Collective.
std::unique_ptr<P2pTransport> make_transport(const ChosenWire& wire, const Topology& topology) {
  if (topology.domains == 1) return nullptr;
  return std::make_unique<P2pTransport>(wire.make(), leaders_of(topology), topology.domain_of_rank,
                                        topology.domain);
}

/// Makes the transport between all ranks, for send and recv; null in one domain. Collective.
std::unique_ptr<Transport> make_peers(const ChosenWire& wire, const Topology& topology) {
  if (topology.domains == 1) return nullptr;
  std::vector<int> ranks(static_cast<std::size_t>(topology.size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_unique<P2pTransport>(wire.make(), ranks, ranks, topology.rank);
}

/// The source of a ResultPool's blocks where ranks share memory: this rank's arena, where the next
/// operation on a result needs no copy of it. `owner` keeps the mapping.
class ArenaResults final : public ResultMemory {
 public:
  ArenaResults(std::shared_ptr<Arena> arena, std::shared_ptr<void> owner)
      : arena_(std::move(arena)), owner_(std::move(owner)) {}
  std::byte* allocate(std::size_t bytes) override { return arena_->try_allocate(bytes); }
  void give_back(std::byte* block, std::size_t bytes) noexcept override {
    // a hole in the shared file; an arena in ordinary memory, as tests have it, keeps its pages
    ::madvise(block, bytes, MADV_REMOVE);
    arena_->free(block);
  }
  [[nodiscard]] bool is_seen_by_children() const override { return true; }

 private:
  std::shared_ptr<Arena> arena_;
  std::shared_ptr<void> owner_;
};

/// The source where they share none: memory of this process alone.
class PrivateResults final : public ResultMemory {
 public:
  std::byte* allocate(std::size_t bytes) override {
    void* const block =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return block == MAP_FAILED ? nullptr : static_cast<std::byte*>(block);
  }
  void give_back(std::byte* block, std::size_t bytes) noexcept override { ::munmap(block, bytes); }
};

/// Null where results are not to be recycled. Those in the arena leave most of it to gradients.
std::shared_ptr<ResultPool> make_results(const Config& config, const Topology& topology,
                                         const std::shared_ptr<Arena>& arena,
                                         const DomainMemory& memory) {
  if (config.result_pool_bytes == 0) return nullptr;
  if (topology.domain_ranks.size() == 1)
    return std::make_shared<ResultPool>(
        std::make_shared<PrivateResults>(),
        ResultPool::Limits{config.result_pool_bytes, std::numeric_limits<std::size_t>::max()});
  return std::make_shared<ResultPool>(
      std::make_shared<ArenaResults>(arena, memory.owner),
      ResultPool::Limits{config.result_pool_bytes, config.arena_bytes / 4});
}

/// Collective.
void start_timeline(const EngineParts& parts, const Bootstrap& ranks) {
  const Config& config = parts.config;
  try {
    parts.timeline->start(config.timeline, {.mark_cycles = config.timeline_mark_cycles},
                          config.timeline_max_bytes, parts.topology,
                          [&ranks](const Bytes& mine) { return ranks.allgather(mine); });
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(
        formatted("HVD_TIMELINE: '{}' is not allowed; it must be a file that can be written: {}",
                  config.timeline, error.what()));
  }
}

}  // namespace

RunningWorld make_world(const Config& config, const std::shared_ptr<Bootstrap>& bootstrap,
                        const std::string& name, const WhenEnded& ended) {
  const Bootstrap& ranks = *bootstrap;
  ranks.require_equal(shared_part(config));
  EngineParts parts;
  parts.config = config;
  parts.world = name;
  parts.topology = ranks.find_hosts();
  refuse_together(ranks, affinity_problem(config.thread_affinity, parts.topology.local_rank,
                                          parts.topology.local_size));
  if (!config.timeline.empty()) start_timeline(parts, ranks);
  parts.process_sets = make_process_sets(config, ranks.rank(), ranks.size());
  DomainMemory memory;
  const std::string why_not_shared = ranks.share_memory(config, parts.topology, memory);
  const Topology topology = parts.topology;
  const std::string why_not_direct = ranks.find_direct_copies(config, topology, memory);
  const std::string copies = !why_not_direct.empty() ? "no direct copies: " + why_not_direct
                             : memory.slow_copies    ? "copies relayed"
                                                     : "";
  parts.memory = memory.owner;
  parts.board = std::make_unique<Board>(memory.board, topology.domain_index);
  const auto arena = make_arena(memory, topology.domain_index);
  const ChosenWire wire = open_wire(config, ranks, topology, why_not_shared);
  auto made = make_transport(wire, topology);
  P2pTransport* const transport = topology.domain_index == 0 ? made.get() : nullptr;
  (topology.domain_index == 0 ? parts.transport : parts.alarm) = std::move(made);
  parts.peers = make_peers(wire, topology);
  Backends backends = make_backends(parts, bootstrap, wire.make, memory, arena);
  parts.backends = std::move(backends.all);
  parts.device = backends.device < 0 ? EngineParts::kNoGpu : backends.device;

  RunningWorld world;
  world.description =
      describe(topology, ranks, wire.name, why_not_shared, copies, backends.devices);
  world.mpi_threads = ranks.mpi() != nullptr && ranks.mpi()->threads_supported();
  world.may_end_later = ranks.mpi() == nullptr || world.mpi_threads;
  world.has_peers = !ranks.is_alone();
  offer_shared_memory(world, memory, arena, topology);
  world.results = make_results(config, topology, arena, memory);
  world.convert = [](void* to, DataType to_type, const void* from, DataType from_type,
                     std::size_t count) { kernels::convert(to, to_type, from, from_type, count); };
  world.engine = make_engine(std::move(parts), ranks);
  world.close = [bootstrap, ended, transport, is_over = wire.is_over,
                 is_global = name.empty()](bool clean) {
    if (!clean && is_global) return;
    if (clean && is_over) *is_over = true;
    // of another one that is how the others hear why it has failed
    if (transport != nullptr) transport->drain(clean ? 5s : 1s);
    if (clean && ended) ended(*bootstrap);
  };
  world.flush = [transport] {
    if (transport != nullptr) transport->drain(1s);
  };
  return world;
}

}  // namespace hvd
