/// Texts that messages are made of.
#include <doctest/doctest.h>

#include <vector>

#include "hvd/base/text.h"

namespace hvd::test {

TEST_CASE("rank lists are short") {
  CHECK(rank_list(std::vector{0, 1, 2, 5, 7, 8}) == "0-2, 5, 7-8");
  CHECK(rank_list(std::vector<int>{}).empty());
}

}  // namespace hvd::test
