// For tests/system/scripts/starts/process_starts.sh: programs that have started MPI themselves, and
// ranks on which init() fails.
//   process_starts single | serialized | multiple   MPI with that thread level; a sum, shutdown(),
//                                                   again, MPI_Finalize
//   process_starts finalize                         MPI_Finalize without shutdown(), by rank 0 a
//                                                   while after the others; init() then throws
//   process_starts mixed                            the same, but the last rank calls shutdown()
//                                                   before
//   process_starts no_threads | no_memory           the last rank can start no thread, or map no
//                                                   memory, in init(); afterwards all can
//   process_starts dies                             the last rank ends instead of calling init()
//                                                   for the second time
// Prints "rank N: TYPE: TEXT" for an error of the library, and "rank N: all is well" at the end.
#include <hvd/hvd.h>
#include <mpi.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "hvd/base/text.h"
#include "tests/support/speak.h"

namespace {

using namespace std::chrono_literals;
using hvd::test::say;

int rank = 0;
int size = 1;

void use() {
  hvd::init();
  std::vector<float> values(1000, static_cast<float>(rank + 1));
  const hvd::Buffer buffer{values.data(), hvd::DataType::Float32, {1000}, {}};
  hvd::allreduce(buffer, buffer, {.op = hvd::ReduceOp::Sum});
  if (values.back() != static_cast<float>(size * (size + 1)) / 2)
    throw std::runtime_error("a wrong sum");
}

/// Returns whether it threw.
bool fails(const std::function<void()>& work) {
  try {
    work();
    return false;
  } catch (const hvd::Error& error) {
    say(hvd::formatted("rank {}: {}: {}", rank, hvd::test::type_of(error), error.what()));
    return true;
  }
}

/// Stacks of a size that no process has room for, until it ends.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    pthread_getattr_default_np(&huge);
    pthread_attr_setstacksize(&huge, std::size_t{1} << 50);
    pthread_setattr_default_np(&huge);
  }
  ~NoThreads() { pthread_setattr_default_np(&before_); }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_{};
};

/// No more addresses than the process has now and a GiB, until it ends.
class NoMemory {
 public:
  NoMemory() {
    ::getrlimit(RLIMIT_AS, &before_);
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit less = before_;
    less.rlim_cur =
        pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) + (std::size_t{1} << 30);
    ::setrlimit(RLIMIT_AS, &less);
  }
  ~NoMemory() { ::setrlimit(RLIMIT_AS, &before_); }
  NoMemory(const NoMemory&) = delete;
  NoMemory& operator=(const NoMemory&) = delete;

 private:
  rlimit before_{};
};

template <class Lack>
void lacks(bool is_last) {
  for (int again = 0; again < 2; ++again) {
    if (is_last) {
      const Lack lack;
      fails(use);
    } else {
      fails(use);
    }
  }
  if (hvd::is_initialized()) say("it is initialized");
}

void run(const std::string& what) {
  const bool is_last = rank == size - 1;
  if (what == "no_threads") lacks<NoThreads>(is_last);
  if (what == "no_memory") lacks<NoMemory>(is_last);
  if (fails(use)) return;
  if (what == "finalize" || what == "mixed") {
    if (rank == 0) std::this_thread::sleep_for(500ms);
    if (what == "mixed" && is_last) hvd::shutdown();
    MPI_Finalize();
    if (hvd::is_initialized()) say("it is initialized");
    fails(use);
    return say(hvd::formatted("rank {}: all is well", rank));
  }
  hvd::shutdown();
  if (what == "dies") {
    if (is_last) ::_exit(0);
    fails(use);  // and once more: what the death has left of MPI cannot be used
    fails(use);
    say(hvd::formatted("rank {}: all is well", rank));
    std::this_thread::sleep_for(500ms);
    ::_exit(0);
  }
  use();
  hvd::shutdown();
  say(hvd::formatted("rank {}: all is well", rank));
}

}  // namespace

int main(int /*argc*/, char** argv) {
  const std::string what = argv[1];
  const int wanted = what == "single"       ? MPI_THREAD_SINGLE
                     : what == "serialized" ? MPI_THREAD_SERIALIZED
                                            : MPI_THREAD_MULTIPLE;
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, wanted, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  run(what);
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized == 0) MPI_Finalize();
  return 0;
}
