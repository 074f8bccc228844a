/// Cores to pin to, and how many there are.
#include <doctest/doctest.h>
#include <sched.h>

#include <thread>

#include "hvd/base/cores.h"
#include "hvd/base/threads.h"
#include "hvd/topology.h"

namespace hvd::test {

TEST_CASE("cores to pin to: one for each rank of the host, of those there are") {
  CHECK(affinity_problem({}, 3, 4).empty());
  CHECK(affinity_problem({0}, 0, 2).find(
            "'0' is not allowed; it must be a core for each of the 2 ranks") != std::string::npos);
  CHECK(affinity_problem({0, 1023}, 1, 2)
            .find("'0,1023' is not allowed; it must be of the cores that the process may use: ") !=
        std::string::npos);
}

TEST_CASE("cores: a host has those of the cpuset, a thread those that it is bound to") {
  const unsigned usable = detail::usable_cores();
  CHECK(usable >= detail::bound_cores());
  CHECK(Topology().cores == usable);
  std::thread([=] {
    cpu_set_t cores;
    REQUIRE(::sched_getaffinity(0, sizeof cores, &cores) == 0);
    int first = 0;
    while (!CPU_ISSET(static_cast<unsigned>(first), &cores)) ++first;
    pin_this_thread({first}, 0);
    CHECK(detail::bound_cores() == 1);
    CHECK(Topology().cores == usable);
  }).join();
}

}  // namespace hvd::test
