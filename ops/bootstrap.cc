#include "ops/bootstrap.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>
#include <thread>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "hvd/negotiation/board.h"
#include "hvd/negotiation/signature.h"
#include "ops/shm/shared_memory.h"

namespace hvd {

namespace {

using namespace std::chrono_literals;

bool we_started_mpi = false;
constexpr int kTagOfGifts = 1;

/// Asks again and again without keeping a core busy.
void wait_quietly(const std::function<bool()>& happened) {
  for (int round = 0; !happened(); ++round)
    if (round > 100) std::this_thread::sleep_for(50us);
}
void wait_quietly(MPI_Request& request, const MpiComm& comm, std::string_view call) {
  wait_quietly([&] {
    int done = 0;
    comm.check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), call);
    return done != 0;
  });
}

std::uint32_t round_slots(std::uint32_t capacity) { return std::max<std::uint32_t>(capacity, 16); }

/// One mapping of the board and one of each rank's arena.
struct Mappings {
  std::vector<std::unique_ptr<Mapping>> all;
};

DomainMemory assemble(std::unique_ptr<Mapping> board, std::vector<std::unique_ptr<Mapping>> arenas, std::vector<pid_t> processes) {
  auto owner = std::make_shared<Mappings>();
  DomainMemory memory;
  memory.processes = std::move(processes);
  memory.board = board->bytes();
  owner->all.push_back(std::move(board));
  for (auto& arena : arenas) {
    memory.arenas.push_back(arena->bytes());
    owner->all.push_back(std::move(arena));
  }
  memory.owner = std::move(owner);
  return memory;
}

DomainMemory private_memory(const Config& config) {
  const std::uint32_t slots = round_slots(config.cache_capacity);
  const std::size_t bytes = Board::bytes_needed(1, slots);
  auto board = std::make_unique<Mapping>(make_shared_file("hvd-board", bytes), bytes);
  std::vector<std::unique_ptr<Mapping>> arenas;
  arenas.push_back(std::make_unique<Mapping>(make_shared_file("hvd-arena", config.arena_bytes), config.arena_bytes));
  Board::format(board->bytes(), 1, slots);
  return assemble(std::move(board), std::move(arenas), {::getpid()});
}

}  // namespace

Bootstrap::Bootstrap() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  const LauncherHints hints = launcher_hints();
  if (initialized == 0 && !hints.rank) return;  // nobody launched this process: a world of one needs no MPI
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) throw BackendError("hvd::init(): MPI has been finalized, and cannot be started again");
  int level = MPI_THREAD_SINGLE;
  if (initialized == 0) {
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread", hints.rank.value_or(0));
    we_started_mpi = true;
  } else {
    MPI_Query_thread(&level);
  }
  threads_supported_ = level == MPI_THREAD_MULTIPLE;
  comm_ = MpiComm::duplicate(MPI_COMM_WORLD);
  if (hints.size && *hints.size != size())
    throw BackendError(
        formatted("the launcher started {} ranks, but MPI sees {}: this program was built for another MPI than that of its "
                  "launcher; start it with the mpirun that belongs to the MPI it was built with",
                  *hints.size, size()));
}

std::vector<Bytes> Bootstrap::allgather(const Bytes& mine) const {
  if (!has_mpi()) return {mine};
  const auto ranks = static_cast<std::size_t>(size());
  const int length = static_cast<int>(mine.size());
  std::vector<int> lengths(ranks);
  comm_.check(MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, comm_.get()), "MPI_Allgather");
  std::vector<int> starts(ranks);
  int total = 0;
  for (std::size_t i = 0; i < ranks; ++i) {
    starts[i] = total;
    total += lengths[i];
  }
  Bytes all(static_cast<std::size_t>(total));
  comm_.check(MPI_Allgatherv(mine.data(), length, MPI_BYTE, all.data(), lengths.data(), starts.data(), MPI_BYTE, comm_.get()),
              "MPI_Allgatherv");
  std::vector<Bytes> result;
  for (std::size_t i = 0; i < ranks; ++i) result.emplace_back(all.begin() + starts[i], all.begin() + starts[i] + lengths[i]);
  return result;
}

void Bootstrap::require_equal(const std::vector<std::pair<std::string, std::string>>& settings) const {
  Writer writer;
  for (const auto& [name, value] : settings) writer.put_string(value);
  const auto all = allgather(writer.take());
  std::vector<int> ranks(all.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<Reader> readers(all.begin(), all.end());
  std::string differences;
  for (const auto& [name, value] : settings) {
    std::vector<std::string> said;
    for (auto& reader : readers) said.push_back(reader.get_string());
    if (std::all_of(said.begin(), said.end(), [&](const auto& text) { return text == said.front(); })) continue;
    differences += formatted("{}{} ({})", differences.empty() ? "" : ", ", name, grouped_by_rank(ranks, said));
  }
  if (!differences.empty()) throw Mismatch(formatted("hvd::init(): the configuration must be equal on all ranks: {}", differences));
}

void Bootstrap::agree_on_success(const std::string& problem, const std::string& what) const {
  const auto all = allgather(Writer().put_string(problem).take());
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (const std::string said = Reader(all[rank]).get_string(); !said.empty())
      throw BackendError(formatted("hvd::init(): {} failed on rank {}: {}", what, rank, said));
}

Topology Bootstrap::find_hosts() const {
  if (!has_mpi()) return Topology::single_domain(0, 1);
  MPI_Comm raw = MPI_COMM_NULL;
  comm_.check(MPI_Comm_split_type(comm_.get(), MPI_COMM_TYPE_SHARED, rank(), MPI_INFO_NULL, &raw), "MPI_Comm_split_type");
  const MpiComm host(raw);
  int first = rank();
  comm_.check(MPI_Bcast(&first, 1, MPI_INT, 0, host.get()), "MPI_Bcast");
  const auto all = allgather(Writer().put(first).take());

  Topology topology;
  topology.rank = rank();
  topology.size = size();
  std::map<int, int> numbers;  // first rank of a host -> number of the host
  std::vector<int> firsts;
  for (const auto& bytes : all) firsts.push_back(Reader(bytes).get<int>());
  for (const int host_first : firsts) numbers.emplace(host_first, 0);
  int next = 0;
  for (auto& [host_first, number] : numbers) number = next++;
  topology.domain_of_rank.clear();
  topology.domain_ranks.clear();
  std::vector<int> sizes(numbers.size(), 0);
  for (int other = 0; other < size(); ++other) {
    const int number = numbers.at(firsts[static_cast<std::size_t>(other)]);
    topology.domain_of_rank.push_back(number);
    ++sizes[static_cast<std::size_t>(number)];
    if (firsts[static_cast<std::size_t>(other)] == first) topology.domain_ranks.push_back(other);
  }
  topology.host_of_rank = topology.domain_of_rank;
  topology.domains = topology.cross_size = next;
  topology.domain = topology.cross_rank = numbers.at(first);
  const auto place = std::find(topology.domain_ranks.begin(), topology.domain_ranks.end(), rank());
  topology.domain_index = topology.local_rank = static_cast<int>(place - topology.domain_ranks.begin());
  topology.local_size = static_cast<int>(topology.domain_ranks.size());
  topology.homogeneous = std::all_of(sizes.begin(), sizes.end(), [&](int n) { return n == sizes.front(); });
  return topology;
}

std::string Bootstrap::try_to_share(const Config& config, const Topology& topology, const MpiComm& host, DomainMemory& memory) const {
  // Every step is taken by all ranks of the host whatever happens on one, so that none waits for a call that another skips.
  std::string problem;
  const auto attempt = [&](const auto& step) {
    try {
      if (problem.empty()) step();
    } catch (const Error& error) {
      problem = error.what();
    }
  };
  const auto ranks = static_cast<std::size_t>(topology.local_size);
  const std::uint32_t slots = round_slots(config.cache_capacity);
  const std::size_t board_bytes = Board::bytes_needed(topology.local_size, slots);
  FileDescriptor board_file;
  FileDescriptor arena_file;
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
  std::vector<Ticket> all(ranks * 2);
  host.check(MPI_Allgather(tickets, sizeof tickets, MPI_BYTE, all.data(), sizeof tickets, MPI_BYTE, host.get()), "MPI_Allgather");
  attempt([&] {
    auto board = map_ticket(all[0]);
    std::vector<std::unique_ptr<Mapping>> arenas;
    std::vector<pid_t> processes;
    for (std::size_t r = 0; r < ranks; ++r) {
      arenas.push_back(map_ticket(all[2 * r + 1]));
      processes.push_back(all[2 * r + 1].process);
    }
    memory = assemble(std::move(board), std::move(arenas), std::move(processes));
  });
  host.check(MPI_Barrier(host.get()), "MPI_Barrier");  // the files stay open until all have mapped them
  return problem;
}

std::string Bootstrap::share_memory(const Config& config, Topology& topology, DomainMemory& memory) const {
  std::string problem;
  if (config.shared_memory == SharedMemory::Off) {
    problem = "HVD_SHARED_MEMORY=off";
  } else if (!has_mpi()) {
    memory = private_memory(config);
    return {};
  } else {
    MPI_Comm raw = MPI_COMM_NULL;
    comm_.check(MPI_Comm_split(comm_.get(), topology.cross_rank, rank(), &raw), "MPI_Comm_split");
    problem = try_to_share(config, topology, MpiComm(raw), memory);
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

  // Number the domains anew: a host that shares is one, a rank of another is one by itself. A domain's number follows its first rank.
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

void Bootstrap::send_to_others(const std::vector<int>& ranks, const Bytes& mine, int mpi_tag, const std::function<bool()>& give_up) const {
  auto sent = std::make_unique<Bytes>(mine);
  std::vector<MPI_Request> requests(ranks.size() - 1, MPI_REQUEST_NULL);
  try {
    for (std::size_t i = 0; i < requests.size(); ++i)
      comm_.check(MPI_Isend(sent->data(), static_cast<int>(sent->size()), MPI_BYTE, ranks[i + 1], mpi_tag, comm_.get(), &requests[i]),
                  "MPI_Isend");
    wait_quietly([&] {
      int done = 0;
      comm_.check(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE), "MPI_Testall");
      if (done == 0 && give_up()) throw BackendError(formatted("rank {} has to give something, which not all others take", rank()));
      return done != 0;
    });
  } catch (...) {
    (void)sent.release();  // MPI may still read it: a send cannot be taken back
    throw;
  }
}

Bytes Bootstrap::give_from_first(const std::vector<int>& ranks, const Bytes& mine, int tag, const std::function<bool()>& give_up) const {
  if (!has_mpi() || ranks.size() < 2) return mine;
  const int mpi_tag = kTagOfGifts + tag % (comm_.largest_tag() - 1);
  if (rank() == ranks.front()) {
    send_to_others(ranks, mine, mpi_tag, give_up);
    return mine;
  }
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  wait_quietly([&] {
    int there = 0;
    comm_.check(MPI_Improbe(ranks.front(), mpi_tag, comm_.get(), &there, &message, &status), "MPI_Improbe");
    if (there == 0 && give_up())
      throw BackendError(formatted("rank {} waited in vain for what rank {} has to give", rank(), ranks.front()));
    return there != 0;
  });
  int bytes = 0;
  comm_.check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
  Bytes received(static_cast<std::size_t>(bytes));
  comm_.check(MPI_Mrecv(received.data(), bytes, MPI_BYTE, &message, MPI_STATUS_IGNORE), "MPI_Mrecv");
  return received;
}

void Bootstrap::barrier() const {
  if (!has_mpi()) return;
  MPI_Request request = MPI_REQUEST_NULL;
  comm_.check(MPI_Ibarrier(comm_.get(), &request), "MPI_Ibarrier");
  wait_quietly(request, comm_, "MPI_Test");
}

void finalize_mpi() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (we_started_mpi && finalized == 0) MPI_Finalize();
}

}  // namespace hvd
