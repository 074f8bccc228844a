#pragma once
/// A world of MPI ranks, whole engines over P2pTransport and P2pBackend, with domains as the test
/// wants them: the ranks of one machine are dealt to pretended hosts, and those of one share
/// memory. Made and closed by all ranks together.

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "hvd/engine/engine.h"
#include "ops/mpi/point_to_point.h"
#include "ops/p2p/backend.h"
#include "ops/p2p/transport.h"
#include "ops/shm/memory/shared_memory.h"
#include "ops/shm/shm_backend.h"
#include "ops/ucx/wire.h"

namespace hvd::test {

inline int mpi_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

inline int mpi_size() {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// Collective. Returns what makes wires between all ranks: over MPI, or, with HVD_WIRE=ucx, over a
/// UCX worker of its own.
inline MakePointToPoint open_wire() {
  if (Config::from_environment().wire != Wire::Ucx)
    return [] { return std::make_unique<MpiPointToPoint>(MpiComm::duplicate(MPI_COMM_WORLD)); };
  return open_ucx(mpi_rank(), mpi_size(), [](const Bytes& mine) {
    const int length = static_cast<int>(mine.size());
    std::vector<int> lengths(static_cast<std::size_t>(mpi_size()));
    MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, MPI_COMM_WORLD);
    std::vector<int> starts;
    std::exclusive_scan(lengths.begin(), lengths.end(), std::back_inserter(starts), 0);
    Bytes all(static_cast<std::size_t>(starts.back() + lengths.back()));
    MPI_Allgatherv(mine.data(), length, MPI_BYTE, all.data(), lengths.data(), starts.data(),
                   MPI_BYTE, MPI_COMM_WORLD);
    std::vector<Bytes> by_rank;
    for (std::size_t i = 0; i < starts.size(); ++i)
      by_rank.emplace_back(all.begin() + starts[i], all.begin() + starts[i] + lengths[i]);
    return by_rank;
  });
}

/// Which domain a rank is in.
using Dealing = std::function<int(int rank)>;

struct MpiWorldOptions {
  Dealing domain_of = [](int rank) { return rank; };
  Config config;
  bool shm = true;  ///< sets within a domain are ShmBackend's
  Dealing host_of;  ///< where it is not the domain
};

class MpiWorld {
 public:
  explicit MpiWorld(MpiWorldOptions options) {
    const int rank = mpi_rank();
    const int size = mpi_size();
    if (options.config.cache_capacity == Config().cache_capacity)
      options.config.cache_capacity = 4096;
    EngineParts parts;
    Topology& topology = parts.topology;
    topology.rank = rank;
    topology.size = size;
    topology.domain_of_rank.clear();
    for (int r = 0; r < size; ++r) topology.domain_of_rank.push_back(options.domain_of(r));
    if (options.host_of)
      for (int r = 0; r < size; ++r) topology.host_of_rank.push_back(options.host_of(r));
    topology.domain = options.domain_of(rank);
    topology.domains =
        1 + *std::max_element(topology.domain_of_rank.begin(), topology.domain_of_rank.end());
    topology.domain_ranks.clear();
    std::vector<int> leaders(static_cast<std::size_t>(topology.domains), -1);
    for (int r = 0; r < size; ++r) {
      const int domain = options.domain_of(r);
      if (leaders[static_cast<std::size_t>(domain)] < 0)
        leaders[static_cast<std::size_t>(domain)] = r;
      if (domain != topology.domain) continue;
      if (r == rank) topology.domain_index = static_cast<int>(topology.domain_ranks.size());
      topology.domain_ranks.push_back(r);
    }
    topology.local_rank = topology.domain_index;
    topology.local_size = static_cast<int>(topology.domain_ranks.size());
    topology.cross_rank = topology.domain;
    topology.cross_size = topology.domains;

    const DomainMemory memory = share_memory(topology, options.config.cache_capacity);
    arena_ = make_arena(memory, topology.domain_index);
    parts.memory = memory.owner;
    parts.config = options.config;
    parts.process_sets = make_sets(options.config, rank, size);
    parts.board = std::make_unique<Board>(memory.board, topology.domain_index);
    board_ = parts.board.get();
    if (options.shm)
      parts.backends.push_back(
          std::make_unique<ShmBackend>(memory, arena_, *parts.board, topology, parts.stats));
    const MakePointToPoint make_wire = open_wire();
    parts.backends.push_back(std::make_unique<P2pBackend>(make_wire(), topology, memory, arena_,
                                                          *parts.board, parts.stats));
    auto transport = std::make_unique<P2pTransport>(make_wire(), leaders, topology.domain_of_rank,
                                                    topology.domain);
    transport_ = transport.get();
    if (topology.domains > 1 && topology.domain_index == 0) {
      parts.transport = std::move(transport);
    } else {
      idle_transport_ = std::move(transport);
    }
    topology_ = topology;
    engine_ = std::make_unique<Engine>(std::move(parts));
  }

  ~MpiWorld() {
    engine_->shutdown();
    transport_->drain(std::chrono::seconds(10));
    MPI_Barrier(MPI_COMM_WORLD);
  }
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  Engine& engine() { return *engine_; }
  Arena& arena() { return *arena_; }
  Board& board() { return *board_; }
  [[nodiscard]] const Topology& topology() const { return topology_; }

 private:
  static std::vector<ProcessSetInfo> make_sets(const Config& config, int rank, int size) {
    std::vector<int> everyone(static_cast<std::size_t>(size));
    std::iota(everyone.begin(), everyone.end(), 0);
    std::vector<ProcessSetInfo> sets{{0, everyone, rank}};
    for (const auto& ranks : config.process_sets) {
      const auto place = std::find(ranks.begin(), ranks.end(), rank);
      sets.push_back({static_cast<int>(sets.size()), ranks,
                      place == ranks.end() ? -1 : static_cast<int>(place - ranks.begin())});
    }
    return sets;
  }

  /// The domain's first rank makes one block for all.
  static DomainMemory share_memory(const Topology& topology, std::uint32_t slots) {
    constexpr std::size_t kArenaBytes = std::size_t{1} << 30;
    constexpr std::size_t kPage = 4096;
    const auto ranks = topology.domain_ranks.size();
    const std::size_t board =
        (Board::bytes_needed(static_cast<int>(ranks), slots) + kPage - 1) / kPage * kPage;
    const std::size_t total = board + ranks * kArenaBytes;
    MPI_Comm domain = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, topology.domain, topology.rank, &domain);
    FileDescriptor file;
    Ticket ticket;
    std::shared_ptr<Mapping> mapping;
    if (topology.domain_index == 0) {
      file = make_shared_file("hvd-test", total);
      ticket = ticket_of(file, total);
      mapping = map_ticket(ticket);
      Board::format(mapping->bytes().first(board), static_cast<int>(ranks), slots);
    }
    MPI_Bcast(&ticket, sizeof ticket, MPI_BYTE, 0, domain);
    if (!mapping) mapping = map_ticket(ticket);
    MPI_Barrier(domain);
    MPI_Comm_free(&domain);
    DomainMemory memory;
    memory.board = mapping->bytes().first(board);
    for (std::size_t index = 0; index < ranks; ++index)
      memory.arenas.push_back(mapping->bytes().subspan(board + index * kArenaBytes, kArenaBytes));
    memory.owner = mapping;
    std::vector<pid_t> processes(static_cast<std::size_t>(mpi_size()));
    const pid_t self = ::getpid();
    MPI_Allgather(&self, sizeof self, MPI_BYTE, processes.data(), sizeof self, MPI_BYTE,
                  MPI_COMM_WORLD);
    for (const int rank : topology.domain_ranks)
      memory.processes.push_back(processes[static_cast<std::size_t>(rank)]);
    return memory;
  }

  Topology topology_;
  std::shared_ptr<Arena> arena_;
  Board* board_ = nullptr;
  std::unique_ptr<P2pTransport> idle_transport_;
  P2pTransport* transport_ = nullptr;
  std::unique_ptr<Engine> engine_;
};

}  // namespace hvd::test
