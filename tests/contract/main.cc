// The contract suite: contract_tests [--threads N[,N...] | --mpi [--gpu] [--world]] [--backend
// shm|nccl|nccl_window|shared|staged]
// [--filter text]
//                [--routes name[,name...]]
//   --threads  worlds of so many threads, of the backend shm (the default), or over host-memory
//              devices: NCCL, a shared GPU, staged
//   --gpu      with --mpi, of contract_gpu_tests: the tensors are a GPU's
//   --routes   ways (hvd/routes.h), by their names with commas between them, each of which some
//              case must take
//   --world    with --mpi: in a world of its own beside the global one, made through a store of
//              files
//   --mpi      this process is one of mpirun's, or alone; which backend runs is hvd::init()'s
//              choice (HVD_SHARED_MEMORY=off: MPI or UCX)
// The last line is "contract: R cases run, F failed, S skipped"; the exit code is 1 if any failed
// or none ran.

#include <cstdio>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "tests/contract/instances.h"
#include "tests/support/sanitized.h"

namespace {

using hvd::Route;
namespace gpu = hvd::gpu;
using namespace hvd::contract;

constexpr int kEvery = hvd::test::kThreadSanitizer ? 37 : hvd::test::kSanitized ? 12 : 1;

struct Arguments {
  std::vector<int> threads;
  bool mpi = false;
  bool gpu = false;
  std::optional<GpuInstance> backend;  ///< none: shared memory
  Choice choice;
  std::vector<std::string> routes;
};

/// None of an unknown word.
std::optional<std::optional<GpuInstance>> backend_of(const std::string& word) {
  if (word == "shm") return std::optional<GpuInstance>();
  if (word == "nccl") return GpuInstance{"nccl", Route::Nccl};
  if (word == "nccl_window")
    return GpuInstance{"nccl in windows", Route::Nccl, gpu::Registration::Window};
  if (word == "shared") return GpuInstance{"shared GPU", Route::SharedGpu};
  if (word == "staged") return GpuInstance{"staged", Route::Staged};
  return std::nullopt;
}

Arguments parse(const std::vector<std::string>& words) {
  Arguments arguments;
  arguments.choice.every = kEvery;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--world") {
      arguments.choice.in_world = true;
      continue;
    }
    if (words[i] == "--mpi" || words[i] == "--gpu") {
      (words[i] == "--mpi" ? arguments.mpi : arguments.gpu) = true;
      continue;
    }
    if (i + 1 == words.size())
      throw std::invalid_argument(words[i] + " is unknown, or needs a value");
    const std::string& value = words[i + 1];
    std::istringstream list(value);
    if (words[i] == "--threads") {
      for (std::string number; std::getline(list, number, ',');)
        arguments.threads.push_back(std::stoi(number));
    } else if (words[i] == "--routes") {
      for (std::string name; std::getline(list, name, ',');) arguments.routes.push_back(name);
    } else if (words[i] == "--backend" && backend_of(value)) {
      arguments.backend = *backend_of(value);
    } else if (words[i] == "--filter") {
      arguments.choice.filter = value;
    } else {
      throw std::invalid_argument(words[i] + " " + value + " is unknown");
    }
    ++i;
  }
  if (arguments.mpi == !arguments.threads.empty())
    throw std::invalid_argument("either --threads N[,N...] or --mpi");
  return arguments;
}

int run(const Arguments& arguments) {
  const Choice& choice = arguments.choice;
  if (choice.every > 1)
    std::printf("sanitizer build: every %dth case of the large products\n", choice.every);
  Report report;
  if (arguments.mpi) {
    bool is_first = true;
    report = run_processes(choice, arguments.gpu, is_first);
    if (!is_first) return report.failed.empty() ? 0 : 1;
  }
  for (const int ranks : arguments.threads)
    report.add(arguments.backend ? run_gpu_threads(*arguments.backend, ranks, choice)
                                 : run_shm_threads(ranks, choice));
  return conclude(report, arguments.routes);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse({argv + 1, argv + argc}));
  } catch (const std::invalid_argument& error) {
    std::fprintf(
        stderr,
        "contract_tests: %s\nusage: contract_tests [--threads N[,N...] | --mpi [--gpu] [--world]] "
        "[--backend shm|nccl|nccl_window|shared|staged] [--filter text] [--routes "
        "name[,name...]]\n",
        error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "contract_tests: %s\n", error.what());
    return 1;
  }
}
