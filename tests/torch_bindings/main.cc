// Tests of the LibTorch front end; they run under mpirun, in one world that lasts for the whole
// program.
#include <cstdio>
#include <exception>

#include "hvd/torch.h"
#include "tests/doctest_main.h"

int main(int argc, char** argv) {
  int failed = 1;
  try {
    hvd::init();
    failed = hvd::test::run(argc, argv, hvd::rank(), hvd::size());
    hvd::shutdown();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "torch_tests: %s\n", error.what());
    return 1;
  }
  return failed;
}
