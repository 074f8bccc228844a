// This is hvd_bench: mpirun -np 4 hvd_bench [options]; --help lists them. Exit codes: 0 done, 1
// failed or a wrong result, 2 wrong options.
#include <fmt/format.h>
#include <hvd/hvd.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>

#include "tools/hvd_bench/models.h"
#include "tools/hvd_bench/modes.h"
#include "tools/hvd_bench/options.h"
#include "tools/hvd_bench/race.h"
#include "tools/hvd_bench/report.h"
#include "tools/hvd_bench/rivals.h"
#include "tools/hvd_bench/workload.h"

namespace bench {
namespace {

constexpr std::uint64_t kSmallBytes = 64 << 10;

void require_backend(const Options& options) {
  if (options.backend == Backend::Shm && !ranks_share_memory())
    throw WrongOptions(fmt::format("--backend shm: the ranks share no memory here ({})",
                                   hvd::backend_description()));
}

/// Refuses what MPI cannot count, in whose calls an int says how many elements a rank has. Sums and
/// broadcasts of one tensor are made by several calls.
void require_mpi_counts(const Options& options) {
  const bool has_shares = options.sweep || is_shared_out(options.collective);
  if (!options.versus_mpi || (options.burst == 0 && !has_shares)) return;
  const auto ranks = static_cast<std::uint64_t>(has_shares ? hvd::size() : 1);
  constexpr std::uint64_t kMost = std::numeric_limits<int>::max();
  if (options.max_bytes / hvd::element_bytes(options.dtype) / ranks > kMost)
    throw WrongOptions(
        fmt::format("--versus mpi: MPI counts no more than {} elements of a rank; "
                    "--max-bytes is too large",
                    kMost));
}

/// Tries out what not every build has. All ranks find the same.
void require_wires(const Options& options) {
  for (const auto wire : options.wires) {
    if (wire == hvd::Compression::none()) continue;
    double nothing = 0;
    const hvd::Buffer buffer{&nothing, options.dtype, {1}, {}};
    try {
      hvd::allreduce(buffer, buffer, {.name = "hvd_bench.wire", .compression = wire});
    } catch (const hvd::InvalidArgument& refused) {
      throw WrongOptions(
          fmt::format("--wire {}: not in this build ({})", name_of(wire), refused.what()));
    }
  }
}

std::vector<std::unique_ptr<Subject>> make_subjects(const Options& options,
                                                    const std::vector<std::size_t>& counts) {
  std::vector<std::unique_ptr<Subject>> subjects;
  for (const bool in_arena : options.in_arena)
    for (const bool in_place : options.in_place)
      for (const auto wire : options.wires)
        for (const bool persistent : {false, true})
          if (!persistent || options.persistent)
            subjects.push_back(
                std::make_unique<Subject>(options, counts, in_arena, in_place, wire, persistent));
  return subjects;
}

/// All rows of one workload.
std::vector<Row> measure(const Options& options, const std::vector<std::size_t>& counts) {
  const auto subjects = make_subjects(options, counts);
  std::vector<Runner> runners;
  for (const auto& subject : subjects)
    runners.push_back({subject->memory(), [&subject] { subject->run(); }});
  std::optional<Rival> rival;
  if (has_rivals(options)) rival.emplace(options, counts);
  if (options.versus_mpi) runners.push_back({"MPI", [&] { rival->run_mpi(); }});
  if (options.versus_packed) runners.push_back({"packed", [&] { rival->run_packed(); }});
  if (options.versus_memcpy) runners.push_back({"memcpy", [&] { rival->run_memcpy(); }});
  std::optional<Line> line;
  if (options.versus_line) {
    line.emplace(options, std::accumulate(counts.begin(), counts.end(), std::size_t{0}) *
                              hvd::element_bytes(options.dtype));
    runners.push_back({"line", [&] { line->run(); }});
  }

  std::vector<std::size_t> wrong(subjects.size(), 0);
  std::vector<double> batches;
  const auto look = [&] {
    for (std::size_t i = 0; options.check && i < subjects.size(); ++i)
      wrong[i] += subjects[i]->count_wrong();
  };
  look();
  for (const auto& subject : subjects) {
    subject->zero();
    hvd::barrier();
    const auto before = hvd::stats().batches_run;
    if (!options.model.empty()) subject->run();
    batches.push_back(static_cast<double>(hvd::stats().batches_run - before));
  }
  Row row;
  row.tensors = counts.size();
  row.elements = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  row.bytes = row.elements * hvd::element_bytes(options.dtype);
  const int repeats = options.repeats > 0 ? options.repeats : row.bytes < kSmallBytes ? 200 : 1;
  const auto timings = race(runners, {options.warmup, options.rounds, repeats});
  look();

  std::size_t next = subjects.size();
  if (options.versus_mpi) row.mpi = timings[next++];
  if (options.versus_packed) row.packed = timings[next++];
  if (options.versus_memcpy) row.memcpy = timings[next++];
  if (options.versus_line) row.line = timings[next++];
  std::vector<Row> rows;
  for (std::size_t i = 0; i < subjects.size(); ++i) {
    row.memory = subjects[i]->memory();
    row.place = subjects[i]->place();
    row.wire = subjects[i]->wire();
    row.time = timings[i];
    if (options.check) row.wrong = total(wrong[i]);
    if (!options.model.empty()) row.batches = batches[i];
    rows.push_back(row);
  }
  return rows;
}

std::vector<std::vector<std::size_t>> workloads(const Options& options) {
  if (!options.model.empty()) return {gradients_of(options.model)};
  std::vector<std::vector<std::size_t>> list;
  const std::size_t ranks =
      static_cast<std::size_t>(is_shared_out(options.collective) ? hvd::size() : 1);
  for (const std::uint64_t bytes : sizes_of(options)) {
    const std::size_t count =
        std::max<std::size_t>(1, bytes / hvd::element_bytes(options.dtype) / ranks) * ranks;
    if (list.empty() || list.back().front() != count) list.push_back({count});
  }
  return list;
}

double processor_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// Sleeps. Returns each rank's processor time, all its threads, in percent of a core. Collective.
std::vector<double> measure_idle(double seconds) {
  hvd::barrier();
  // the others' way out of the barrier does not count
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const auto start = std::chrono::steady_clock::now();
  const double before = processor_seconds();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  const double used = processor_seconds() - before;
  const double slept =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  double percent = 100 * used / slept;
  const auto all =
      hvd::allgather({&percent, hvd::DataType::Float64, {1}, {}}, {.name = "hvd_bench.idle"});
  std::vector<double> result(static_cast<std::size_t>(hvd::size()));
  std::memcpy(result.data(), all.data.data(), all.data.size());
  return result;
}

/// Returns the exit code. A WrongOptions or std::runtime_error that leaves it was found by all
/// ranks alike.
int run(const Options& options) {
  require_backend(options);
  require_mpi_counts(options);
  require_wires(options);
  if (options.sweep) return run_sweep(options) == 0 ? 0 : 1;
  if (options.burst > 0) return run_burst(options) == 0 ? 0 : 1;
  Report report(options);
  std::size_t wrong = 0;
  if (options.idle_seconds > 0) {
    report.add_idle(options.idle_seconds, measure_idle(options.idle_seconds));
  } else {
    for (const auto& counts : workloads(options)) {
      for (const auto& row : measure(options, counts)) {
        report.add(row);
        wrong += row.wrong.value_or(0);
      }
    }
  }
  report.end();
  return wrong == 0 ? 0 : 1;
}

int complain(const std::string& words, int code) {
  std::fprintf(stderr, "hvd_bench: %s\n", words.c_str());
  std::fflush(stderr);
  return code;
}

/// All ranks have found the same mistake; rank 0 says so. The others give it time: the first to
/// leave makes mpirun end the rest.
int complain_once(int rank, const std::string& words, int code) {
  if (rank == 0) return complain(words, code);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  return code;
}

int main(int argc, char** argv) {
  CommandLine line;
  const int launched_as = hvd::launcher_hints().rank.value_or(0);
  try {
    line = parse_command_line(argc, argv);
  } catch (const WrongOptions& wrong) {
    return complain_once(launched_as, wrong.what(), 2);
  }
  if (!line.help.empty()) {
    if (launched_as == 0) std::fputs(line.help.c_str(), stdout);
    return 0;
  }
  if (line.options.routes) {
    if (launched_as == 0) std::fputs(routes_text(line.options).c_str(), stdout);
    return 0;
  }
  try {
    std::optional<RawMpi> mpi;
    if (line.options.versus_mpi || line.options.versus_packed || line.options.versus_line)
      mpi.emplace();
    hvd::Config config = hvd::Config::from_environment();
    if (line.options.backend == Backend::Mpi) config.shared_memory = hvd::SharedMemory::Off;
    hvd::init(config);
    const int rank = hvd::rank();
    int code = 0;
    try {
      code = run(line.options);
    } catch (const WrongOptions& wrong) {
      code = complain_once(rank, wrong.what(), 2);
    } catch (const hvd::Error&) {
      throw;
    } catch (const std::runtime_error& error) {
      code = complain_once(rank, error.what(), 1);
    }
    hvd::shutdown();
    if (mpi) mpi->all_is_done();
    return code;
  } catch (const std::exception& error) {
    return complain(fmt::format("rank {}: {}", launched_as, error.what()), 1);
  }
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) { return bench::main(argc, argv); }
