#pragma once
/// run_ranks() starts the ranks of a plan and looks after them until all have ended: it passes
/// their output on line by line, passes SIGINT, SIGTERM and SIGHUP on to them, stops and goes on
/// with them (SIGTSTP), and ends the others some seconds after one has failed. It is for the main
/// thread of a process that does nothing else.

#include "tools/hvdrun/options.h"
#include "tools/hvdrun/plan.h"

namespace hvdrun {

/// Returns the exit code: 0, or that of the rank that failed first (128 and the signal's number,
/// where a signal ended it), or 128 and the number of the signal that hvdrun was sent. Throws
/// std::runtime_error if ranks cannot be started; none is left then.
int run_ranks(const Plan& plan, const Options& options);

}  // namespace hvdrun
