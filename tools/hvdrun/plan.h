#pragma once
/// A Plan is what hvdrun will start: the ranks of this host, by itself, or mpirun.

#include <string>
#include <utility>
#include <vector>

#include "tools/hvdrun/options.h"

namespace hvdrun {

struct Plan {
  int ranks = 1;
  std::vector<std::string>
      launcher;  ///< mpirun and its arguments, where it starts the ranks; else empty
  std::vector<std::string> command;
  std::vector<std::pair<std::string, std::string>> variables;  ///< for all ranks
  std::vector<std::string> unset;  ///< variables that the ranks must not see
};

/// Throws WrongOptions.
Plan make_plan(const Options& options);
/// Returns the variables that number a rank among `size` on this host.
std::vector<std::pair<std::string, std::string>> variables_of_rank(int rank, int size);

}  // namespace hvdrun
