// Ranks that wait for one another, over wires.
#include <doctest/doctest.h>

#include "tests/support/deadlocks.h"
#include "tests/support/mpi_cases.h"

namespace hvd::test {

TEST_CASE(
    "deadlocks: over a wire, a rank that has left out a step is told of on all ranks, and the "
    "world goes on") {
  if (mpi_size() == 1) return;  // nobody to wait for
  for (const auto& layout : layouts()) {
    CAPTURE(layout.name);
    MpiWorld world({.domain_of = layout.domain_of, .config = {}});
    LeftOut(mpi_size()).run(mpi_rank(), world.engine());
    world.engine().shutdown();
  }
}

}  // namespace hvd::test
