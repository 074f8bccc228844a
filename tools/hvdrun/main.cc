// This is hvdrun -np RANKS [options] PROGRAM [arguments]; --help lists the options. Exit codes: that of the rank that failed first, 2 for
// wrong options, 1 if the ranks cannot be started.
#include <fmt/format.h>
#include <hvd/hvd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "ops/mpi/library.h"
#include "tools/hvdrun/helper.h"
#include "tools/hvdrun/options.h"
#include "tools/hvdrun/plan.h"
#include "tools/hvdrun/ranks.h"

namespace hvdrun {
namespace {

void print_build() {
  const auto line = [](bool is_there, const std::string& what) { fmt::print("  [{}] {}\n", is_there ? 'X' : ' ', what); };
  fmt::print("hvd {}\n\nBuilt with:\n", HVD_VERSION);
  line(HVD_HAS_TORCH != 0, "LibTorch");
  const std::string problem = hvd::open_mpi();
  line(problem.empty(), problem.empty() ? hvd::mpi_library() : problem);
  line(HVD_HAS_UCX != 0, "UCX");
  line(hvd::cuda_built(), "CUDA");
  line(hvd::nccl_built(), "NCCL");
  fmt::print("\nRanks of one host start without MPI; ranks of several hosts by mpirun, or by ssh without MPI.\n");
}

void print_plan(const Plan& plan) {
  const auto print = [&](std::vector<std::string> words, const std::vector<std::pair<std::string, std::string>>& more) {
    for (const auto& [name, value] : plan.program.variables) words.push_back(fmt::format("{}={}", name, value));
    for (const auto& [name, value] : more) words.push_back(fmt::format("{}={}", name, value));
    words.insert(words.end(), plan.launcher.begin(), plan.launcher.end());
    words.insert(words.end(), plan.program.command.begin(), plan.program.command.end());
    fmt::print("{}\n", quoted(words));
  };
  if (!plan.launcher.empty()) {
    print({}, {});
  } else if (plan.hosts.empty()) {
    for (int rank = 0; rank < plan.ranks; ++rank) print({}, variables_of_rank(rank, plan.ranks, rank, plan.ranks));
  }
  for (const auto& host : plan.hosts) {
    std::vector<std::string> way{"exec"};
    if (!host.is_this_host) {
      way = plan.ssh;
      way.push_back(host.name);
    }
    for (int local = 0; local < host.count; ++local) print(way, variables_of_rank(host.first + local, plan.ranks, local, host.count));
  }
}

/// Becomes mpirun. Returns only if that cannot be.
int become_launcher(const Plan& plan) {
  for (const auto& name : plan.program.unset) ::unsetenv(name.c_str());
  for (const auto& [name, value] : plan.program.variables) ::setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> words;
  for (const auto* part : {&plan.launcher, &plan.program.command})
    for (const auto& word : *part) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  ::execvp(words.front(), words.data());
  fmt::print(stderr, "hvdrun: {}: {}\n", words.front(), std::strerror(errno));
  return 1;
}

int run(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--host-helper") return run_helper();  // hvdrun's own, on other hosts
  const Options options = parse_command_line(argc, argv);
  if (!options.help.empty()) {
    std::fputs(options.help.c_str(), stdout);
    return 0;
  }
  if (options.check_build) {
    print_build();
    return 0;
  }
  const Plan plan = make_plan(options);
  if (options.dry_run) {
    print_plan(plan);
    return 0;
  }
  if (!plan.launcher.empty()) return become_launcher(plan);
  return run_ranks(plan, {.prefixes = options.prefixes,
                          .folder = options.output_folder,
                          .verbose = options.verbose,
                          .time_to_end = std::chrono::seconds(options.time_to_end)});
}

}  // namespace
}  // namespace hvdrun

int main(int argc, char** argv) {
  try {
    return hvdrun::run(argc, argv);
  } catch (const hvdrun::WrongOptions& error) {
    std::fprintf(stderr, "hvdrun: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hvdrun: %s\n", error.what());
    return 1;
  }
}
