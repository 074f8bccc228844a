// This is hvdrun -np RANKS [options] PROGRAM [arguments]; --help lists the options. Exit codes:
// that of the rank that failed first, 2 for wrong options, 1 if the ranks cannot be started.
#include <fcntl.h>
#include <fmt/format.h>
#include <hvd/hvd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "ops/mpi/library.h"
#include "tools/hvdrun/job.h"
#include "tools/hvdrun/options.h"

namespace hvdrun {
namespace {

void print_build() {
  const auto line = [](bool is_there, const std::string& what) {
    fmt::print("  [{}] {}\n", is_there ? 'X' : ' ', what);
  };
  fmt::print("hvd {}\n\nBuilt with:\n", HVD_VERSION);
  line(HVD_HAS_TORCH != 0, "LibTorch");
  const std::string problem = hvd::open_mpi();
  line(problem.empty(), problem.empty() ? hvd::mpi_library() : problem);
  line(HVD_HAS_UCX != 0, "UCX");
  line(hvd::cuda_built(), "CUDA");
  line(hvd::nccl_built(), "NCCL");
  fmt::print("\nRanks of one host start without MPI; ranks of several hosts by mpirun.\n");
}

/// Returns a word as a shell takes it.
std::string quoted(const std::string& word) {
  const bool is_plain =
      !word.empty() &&
      word.find_first_not_of(
          "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:=,+@%") ==
          std::string::npos;
  if (is_plain) return word;
  std::string all = "'";
  for (const char letter : word)
    all += letter == '\'' ? std::string("'\\''") : std::string(1, letter);
  return all + '\'';
}

void print_plan(const Plan& plan) {
  const auto print = [&](const std::vector<std::pair<std::string, std::string>>& numbers) {
    std::vector<std::string> words;
    for (const auto* const variables : {&plan.variables, &numbers})
      for (const auto& [name, value] : *variables)
        words.push_back(name + '=' + quoted(value));  // a shell takes '...=' for a program
    for (const auto* const part : {&plan.launcher, &plan.command})
      std::transform(part->begin(), part->end(), std::back_inserter(words), quoted);
    fmt::print("{}\n", fmt::join(words, " "));
  };
  if (!plan.launcher.empty()) return print({});
  for (int rank = 0; rank < plan.ranks; ++rank) print(variables_of_rank(rank, plan.ranks));
}

/// Becomes mpirun. Returns only if that cannot be.
int become_launcher(const Plan& plan) {
  for (const auto& name : plan.unset) ::unsetenv(name.c_str());
  for (const auto& [name, value] : plan.variables) ::setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> words;
  for (const auto* part : {&plan.launcher, &plan.command})
    for (const auto& word : *part) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  ::execvp(words.front(), words.data());
  fmt::print(stderr, "hvdrun: {}: {}\n", words.front(), std::strerror(errno));
  return 1;
}

/// What the caller has closed is open: else a pipe of a rank would be taken for it.
void open_standard_streams() {
  int descriptor = 0;
  do {
    descriptor = ::open("/dev/null", O_RDWR);
  } while (descriptor >= 0 && descriptor <= STDERR_FILENO);
  if (descriptor > STDERR_FILENO) ::close(descriptor);
}

int run(int argc, char** argv) {
  open_standard_streams();
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
  return run_ranks(plan, options);
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
