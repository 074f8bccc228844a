// Tests that run under mpirun and need no LibTorch.
#include <mpi.h>

#include "tests/doctest_main.h"

int main(int argc, char** argv) {
  int provided = 0;
  int rank = 0;
  int size = 1;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int failed = hvd::test::run(argc, argv, rank, size);
  MPI_Finalize();
  return failed;
}
