#pragma once
/// A Plan is what hvdrun will start: the ranks of this host, by itself, or mpirun. run_ranks()
/// starts the ranks of a plan and looks after them until all have ended. For the main thread of a
/// process that does nothing else.

#include <string>
#include <utility>
#include <vector>

#include "tools/hvdrun/options.h"

namespace hvdrun {

struct Plan {
  int ranks = 1;
  std::vector<std::string> launcher;  ///< mpirun and its arguments, if it starts them; else empty
  std::vector<std::string> command;
  std::vector<std::pair<std::string, std::string>> variables;  ///< for all ranks
  std::vector<std::string> unset;  ///< variables that the ranks must not see
};

/// Throws WrongOptions.
Plan make_plan(const Options& options);
/// Returns the variables that number a rank among `size` on this host.
std::vector<std::pair<std::string, std::string>> variables_of_rank(int rank, int size);

/// Passes the ranks' output on line by line, passes SIGINT, SIGTERM and SIGHUP on to them, stops
/// and goes on with them (SIGTSTP), ends them where nobody reads their output any more (SIGPIPE),
/// and ends the others some seconds after one has failed. Returns the exit code: 0, or that of the
/// rank that failed first (128 and the signal's number, where a signal ended it), or 128 and the
/// number of the signal that hvdrun was sent. Throws std::runtime_error if ranks cannot be started;
/// none is left then.
int run_ranks(const Plan& plan, const Options& options);

}  // namespace hvdrun
