// Instances whose ranks are processes: the library as users start it.

#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include "hvd/hvd.h"
#include "tests/contract/instances.h"
#include "tests/support/worlds/file_store.h"

namespace hvd::contract {

namespace {

/// Reports travel as text: a case and what is wrong with it, line by line.
std::string text_of(const Report& report) {
  std::string text;
  for (const auto& [one, failures] : report.failed)
    for (const auto& failure : failures) text += one + '\n' + failure + '\n';
  return text;
}

Report report_of(const std::string& text) {
  Report report;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t first = text.find('\n', at);
    const std::size_t second = text.find('\n', first + 1);
    report.failed[text.substr(at, first - at)].push_back(
        text.substr(first + 1, second - first - 1));
    at = second + 1;
  }
  return report;
}

/// To rank 0. hvd::init() has started MPI, and finalizes it when the process ends. Where ranks met
/// without MPI each speaks for itself.
void collect(Report& report, int rank, int size) {
  int started = 0;
  MPI_Initialized(&started);
  if (started == 0 && rank != 0) std::fputs(text_of(report).c_str(), stderr);
  if (started == 0 || size == 1) return;
  constexpr int kTag = 1;
  if (rank != 0) {
    const std::string text = text_of(report);
    MPI_Send(text.data(), static_cast<int>(text.size()), MPI_CHAR, 0, kTag, MPI_COMM_WORLD);
    return;
  }
  for (int other = 1; other < size; ++other) {
    MPI_Status status;
    int count = 0;
    MPI_Probe(other, kTag, MPI_COMM_WORLD, &status);
    MPI_Get_count(&status, MPI_CHAR, &count);
    std::string text(static_cast<std::size_t>(count), ' ');
    MPI_Recv(text.data(), count, MPI_CHAR, other, kTag, MPI_COMM_WORLD, &status);
    report.merge_rank(report_of(text));
  }
}

/// Collective. Returns a world of all ranks, the last one first, whose members meet in a folder of
/// the global rank 0's.
World make_reversed(const Config& config, const std::string& name) {
  std::array<char, 64> folder{"/tmp/hvd-contract-XXXXXX"};
  if (rank() == 0 && ::mkdtemp(folder.data()) == nullptr)
    throw BackendError("no folder for the store");
  broadcast({folder.data(), DataType::UInt8, {static_cast<std::int64_t>(folder.size())}}, {});
  const auto store = std::make_shared<test::FileStore>(folder.data());
  World world(test::rendezvous_of(store, size() - 1 - rank(), size(), name), config);
  barrier();
  if (rank() == 0) std::filesystem::remove_all(folder.data());
  return world;
}

}  // namespace

Report run_processes(const Choice& choice, bool gpu, bool& is_first) {
  Report report;
  std::map<std::string, Block> notebook;
  int own_rank = 0;     // in the world of the suite
  int global_rank = 0;  // in that of MPI
  int ranks = 1;
  for (const bool fuses : {true, false}) {
    Config config = Config::from_environment();
    config.fusion_threshold_bytes = fuses ? kThreshold : 0;
    if (const auto hints = launcher_hints(); hints.size) ranks = *hints.size;
    config.process_sets = {ranks_of(SetKind::Early, ranks)};
    init(config);
    global_rank = rank();
    std::optional<World> world;
    if (choice.in_world) world = make_reversed(config, fuses ? "fuses" : "fuses not");
    const WorldScope scope(world.value_or(World()));
    own_rank = rank();
    ranks = size();
    const bool one_domain = engine()->topology().domains == 1;
    const bool over_ucx = backend_description().find("UCX") != std::string::npos;
    const bool in_rank_order = backend_description().find("CUDA IPC") != std::string::npos ||
                               backend_description().find("staged through") != std::string::npos;
    const std::string way = !gpu            ? (one_domain ? "shm, "
                                               : over_ucx ? "ucx, "
                                                          : "mpi, ")
                            : in_rank_order ? "shared GPU or staged, "
                                            : "nccl, ";
    const Setting setting{
        .name = way + std::to_string(ranks) + " processes" + (world ? " in a world" : "") +
                (fuses ? "" : ", threshold 0"),
        .size = ranks,
        .device = gpu ? Device{DeviceKind::Cuda, std::max(0, engine()->device())} : Device{},
        .any_order = gpu && !in_rank_order,
        .front_door = true,
        .arena = !gpu && (ranks == 1 || engine()->topology().domains < ranks),
        .fuses = fuses,
        .domain_of_rank = engine()->topology().domain_of_rank};
    const auto endpoint = make_front_door();
    Watch watch(setting.name, own_rank, 1);
    report.add(run_rank(*endpoint, setting, own_rank, notebook, choice, watch));
  }
  is_first = global_rank == 0;
  collect(report, global_rank, ranks);
  return report;
}

}  // namespace hvd::contract
