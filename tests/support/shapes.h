#pragma once
/// The worlds that tests of the engine go through: ranks, and the domains (pretended hosts) that
/// they are on.

#include <utility>
#include <vector>

namespace hvd::test {

inline const std::vector<std::pair<int, int>> kShapes{{1, 1}, {2, 1}, {3, 1}, {4, 1}, {7, 1},
                                                      {2, 2}, {3, 3}, {4, 2}, {7, 3}};

}  // namespace hvd::test
