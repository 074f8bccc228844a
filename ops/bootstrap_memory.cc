// The board and the arenas of the ranks of a host, and who shares memory with whom.
// Tested in tests/contract/instance_processes.cc
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include "hvd/negotiation/board/board.h"
#include "ops/bootstrap.h"
#include "ops/shm/memory/peer_memory.h"
#include "ops/shm/memory/shared_memory.h"

namespace hvd {

namespace {

/// Returns the number of tensors that are known at once. What is said of Horovod's cache, which it
/// works without, makes no program fail.
std::uint32_t slots_of(const Config& config) {
  constexpr std::uint32_t kLeast = 65536;
  return std::max(config.cache_capacity, kLeast);
}

DomainMemory assemble(std::unique_ptr<Mapping> board, std::vector<std::unique_ptr<Mapping>> arenas,
                      std::vector<pid_t> processes) {
  auto owner = std::make_shared<std::vector<std::unique_ptr<Mapping>>>();
  DomainMemory memory;
  memory.processes = std::move(processes);
  memory.board = board->bytes();
  owner->push_back(std::move(board));
  for (auto& arena : arenas) {
    memory.arenas.push_back(arena->bytes());
    owner->push_back(std::move(arena));
  }
  memory.owner = std::move(owner);
  return memory;
}

DomainMemory private_memory(const Config& config) {
  const std::uint32_t slots = slots_of(config);
  const std::size_t bytes = Board::bytes_needed(1, slots);
  auto board = std::make_unique<Mapping>(make_shared_file("hvd-board", bytes), bytes);
  std::vector<std::unique_ptr<Mapping>> arenas;
  arenas.push_back(std::make_unique<Mapping>(make_shared_file("hvd-arena", config.arena_bytes),
                                             config.arena_bytes));
  Board::format(board->bytes(), 1, slots);
  return assemble(std::move(board), std::move(arenas), {::getpid()});
}

/// Returns why this host's ranks cannot share memory, as far as this one knows. What it has made
/// for others to map, `board_file` and `arena_file`, must be open until all have.
std::string try_to_share(const Bootstrap& bootstrap, const Config& config, const Topology& topology,
                         DomainMemory& memory, FileDescriptor& board_file,
                         FileDescriptor& arena_file) {
  // Every step is taken by all ranks of the host whatever happens on one, so that none waits for a
  // call that another skips.
  std::string problem;
  const auto attempt = [&](const auto& step) {
    try {
      if (problem.empty()) step();
    } catch (const std::exception& error) {
      problem = error.what();
    }
  };
  const std::uint32_t slots = slots_of(config);
  const std::size_t board_bytes = Board::bytes_needed(topology.local_size, slots);
  Ticket tickets[2];  // the board's, from the first rank, and this rank's arena's
  attempt([&] {
    if (topology.local_rank == 0) {
      board_file = make_shared_file("hvd-board", board_bytes);
      const auto board = map_file(board_file, board_bytes);
      Board::format(board->bytes(), topology.local_size, slots);
      tickets[0] = ticket_of(board_file, board_bytes);
    }
    arena_file = make_shared_file("hvd-arena", config.arena_bytes);
    tickets[1] = ticket_of(arena_file, config.arena_bytes);
  });
  const auto said = bootstrap.allgather(Writer().put(tickets[0]).put(tickets[1]).take());
  attempt([&] {
    std::unique_ptr<Mapping> board;
    std::vector<std::unique_ptr<Mapping>> arenas;
    std::vector<pid_t> processes;
    for (const int rank : topology.domain_ranks) {
      Reader reader(said[static_cast<std::size_t>(rank)]);
      const auto of_board = reader.get<Ticket>(), of_arena = reader.get<Ticket>();
      if (!board) board = map_ticket(of_board);
      arenas.push_back(map_ticket(of_arena));
      processes.push_back(of_arena.process);
    }
    memory = assemble(std::move(board), std::move(arenas), std::move(processes));
  });
  return problem;
}

}  // namespace

std::string Bootstrap::share_memory(const Config& config, Topology& topology,
                                    DomainMemory& memory) const {
  std::string problem;
  FileDescriptor board_file, arena_file;
  if (config.shared_memory == SharedMemory::Off) {
    problem = "HVD_SHARED_MEMORY=off";
  } else if (is_alone()) {
    memory = private_memory(config);
    return {};
  } else {
    problem = try_to_share(*this, config, topology, memory, board_file, arena_file);
  }
  const auto all = allgather(Writer().put_string(problem).take());
  std::vector<bool> refuses(static_cast<std::size_t>(topology.cross_size), false);
  std::string why;
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::string said = Reader(all[r]).get_string();
    if (said.empty()) continue;
    refuses[static_cast<std::size_t>(topology.domain_of_rank[r])] = true;
    if (why.empty()) why = said;
  }
  if (why.empty()) return {};

  // Number the domains anew: a host that shares is one, a rank of another is one by itself. A
  // domain's number follows its first rank.
  const std::vector<int> hosts = topology.domain_of_rank;
  const bool alone = refuses[static_cast<std::size_t>(topology.cross_rank)];
  std::map<int, int> number_of_host;
  int next = 0;
  for (int r = 0; r < topology.size; ++r) {
    const int host = hosts[static_cast<std::size_t>(r)];
    const bool fresh = refuses[static_cast<std::size_t>(host)] || !number_of_host.contains(host);
    if (fresh) number_of_host[host] = next++;
    topology.domain_of_rank[static_cast<std::size_t>(r)] = number_of_host[host];
  }
  topology.domains = next;
  topology.domain = topology.domain_of_rank[static_cast<std::size_t>(topology.rank)];
  if (alone) {
    topology.domain_ranks = {topology.rank};
    topology.domain_index = 0;
    memory = private_memory(config);
  }
  return why;
}

std::string Bootstrap::find_direct_copies(const Config& config, const Topology& topology,
                                          DomainMemory& memory) const {
  const bool wanted = config.direct_copies != DirectCopies::Off;
  memory.direct_copies = wanted;
  memory.slow_copies = config.direct_copies == DirectCopies::Relayed;
  if (is_alone()) return {};
  const auto word = std::make_unique<std::uint64_t>(static_cast<std::uint64_t>(::getpid()) << 32 ^
                                                    static_cast<std::uint64_t>(rank()));
  const auto places =
      allgather(Writer().put(reinterpret_cast<std::uint64_t>(word.get())).put(*word).take());
  std::string mine = wanted ? "" : "HVD_DIRECT_COPIES=off";
  for (std::size_t i = 0; i < topology.domain_ranks.size() && mine.empty(); ++i) {
    Reader place(places[static_cast<std::size_t>(topology.domain_ranks[i])]);
    const auto address = place.get<std::uint64_t>();
    const auto expected = place.get<std::uint64_t>();
    if (topology.domain_ranks[i] != rank())
      mine = why_unreadable(memory.processes.at(i), reinterpret_cast<const std::uint64_t*>(address),
                            expected);
  }
  const auto all = allgather(Writer().put_string(mine).take());
  for (const int other : topology.domain_ranks) {
    const std::string said = Reader(all[static_cast<std::size_t>(other)]).get_string();
    if (said.empty()) continue;
    memory.direct_copies = false;
    return topology.domain_ranks.size() > 1 ? said : std::string();
  }
  if (config.direct_copies == DirectCopies::Auto && topology.domain_ranks.size() > 1)
    memory.slow_copies = is_slow_to_read();
  return {};
}

}  // namespace hvd
