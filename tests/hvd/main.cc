// Tests that need one process: ranks are threads. Neither MPI nor a GPU is used.
#include "tests/doctest_main.h"

int main(int argc, char** argv) { return hvd::test::run(argc, argv); }
