#pragma once
/// Runs a random program on a thread world and compares what every rank gets with what the oracle
/// expects.

#include <string>
#include <vector>

#include "tests/support/programs/random_program.h"

namespace hvd::test {

/// What was not as expected, a line each. A hang ends the test program, with the seed in its last
/// words.
std::vector<std::string> run_program(const Program& program);

}  // namespace hvd::test
