#pragma once
/// A Plan is what hvdrun will start: ranks of this host, by itself, or mpirun.

#include <string>
#include <utility>
#include <vector>

#include "examples/hvdrun/options.h"

namespace hvdrun {

struct Plan {
  int ranks = 1;
  /// Starts the ranks, where they are more than this host's; empty where hvdrun starts them.
  std::vector<std::string> launcher;
  std::vector<std::pair<std::string, std::string>> variables;  ///< for all ranks
  std::vector<std::string> unset;                              ///< variables that the ranks must not see
  std::vector<std::string> command;
};

/// Throws WrongOptions.
Plan make_plan(const Options& options);
/// Returns the words as a shell takes them.
std::string quoted(const std::vector<std::string>& words);
/// Returns rank's own variables.
std::vector<std::pair<std::string, std::string>> variables_of_rank(const Plan& plan, int rank);

}  // namespace hvdrun
