// For tests/system/scripts: reads a timeline and prints one line about it; exit code 1 and the
// reason if there is something wrong with it.
//   timeline_check FILE
#include <cstdio>
#include <exception>

#include "tests/support/timeline_reader.h"

int main(int argc, char** argv) try {
  const auto read = hvd::test::read_timeline(argc > 1 ? argv[1] : "");
  std::string ranks;
  for (const int pid : read.pids()) ranks += (ranks.empty() ? "" : " ") + std::to_string(pid);
  std::printf("valid: ranks %s; %zu events, %zu slices, %zu open\n", ranks.c_str(),
              read.events.size(), read.slices.size(), read.open);
  for (const char* name : {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "SHM_ALLREDUCE", "MPI_ALLREDUCE",
                           "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER", "WAIT_FOR_DATA",
                           "NEGOTIATE_BARRIER"})
    std::printf("%s %zu\n", name, read.named(name).size());
  for (const char* name : {"CYCLE_START", "queue length", "bytes in flight"})
    std::printf("%s %zu\n", name, read.count(name));
} catch (const std::exception& error) {
  std::printf("invalid: %s\n", error.what());
  return 1;
}
