// A rank that calls shutdown() while the others go on, over wires.
#include <doctest/doctest.h>

#include <functional>

#include "tests/support/leaving.h"
#include "tests/support/mpi_cases.h"

namespace hvd::test {
namespace {

void with_leavers(const std::function<void(MpiWorld& world, int leaver, int rounds)>& body) {
  constexpr int kCycles = 16;
  for (int cycle = 0; cycle < kCycles && mpi_size() > 1; ++cycle) {
    CAPTURE(cycle);
    MpiWorld world({.domain_of = layouts()[cycle % 3 == 2 ? 1 : 0].domain_of, .config = {}});
    body(world, cycle % mpi_size(), cycle % 20);
  }
}

}  // namespace

TEST_CASE(
    "leaving: over a wire, what is decided and not yet read where the rank leaves does not hold up "
    "the others") {
  with_leavers([](MpiWorld& world, int leaver, int rounds) {
    LastSubmission program(mpi_size(), leaver, rounds);
    program.run(mpi_rank(), world.engine());
    world.engine().shutdown();
    if (mpi_rank() == leaver) program.check();
  });
}

TEST_CASE("leaving: over a wire, a thread goes on submitting while another one shuts down") {
  with_leavers([](MpiWorld& world, int leaver, int rounds) {
    SubmitsDuringShutdown(leaver, rounds).run(mpi_rank(), world.engine());
  });
}

}  // namespace hvd::test
