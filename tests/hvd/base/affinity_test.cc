/// Cores to pin to.
#include <doctest/doctest.h>

#include "hvd/base/threads.h"

namespace hvd::test {

TEST_CASE("cores to pin to: one for each rank of the host, of those there are") {
  CHECK(affinity_problem({}, 3, 4).empty());
  CHECK(affinity_problem({0}, 0, 2).find(
            "'0' is not allowed; it must be a core for each of the 2 ranks") != std::string::npos);
  CHECK(affinity_problem({0, 1023}, 1, 2)
            .find("'0,1023' is not allowed; it must be of the cores that the process may use: ") !=
        std::string::npos);
}

}  // namespace hvd::test
