#pragma once
/// departure() words what who needs a rank that has left the world in order is told.
// Tested in tests/ops/worlds_test.cc, tests/hvd/engine/leavers_test.cc

#include <string>
#include <string_view>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

/// Returns "`who` left the world 'name'`rest`"; of the global world, which has no name, what
/// `of_global` says in the middle.
[[nodiscard]] inline Status departure(const std::string& world, std::string_view who,
                                      std::string_view of_global, std::string_view rest) {
  if (world.empty()) return {Status::Code::Shutdown, formatted("{} {}{}", who, of_global, rest)};
  return {Status::Code::RankFailed, formatted("{} left the world '{}'{}", who, world, rest)};
}

}  // namespace hvd
