// Tests that run under mpirun and need no LibTorch.
#include <mpi.h>

#include <cstdio>
#include <string>

#include "ops/mpi/library.h"
#include "tests/doctest_main.h"

int main(int argc, char** argv) {
  int provided = 0;
  int rank = 0;
  int size = 1;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  if (const std::string problem = hvd::open_mpi(); !problem.empty()) {
    std::fprintf(stderr, "%s\n", problem.c_str());
    return 1;
  }
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int failed = hvd::test::run(argc, argv, rank, size);
  MPI_Finalize();
  return failed;
}
