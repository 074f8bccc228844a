#pragma once
/// run_helper() is what `hvdrun --host-helper` does on each host whose ranks hvdrun starts by ssh: it is told by its standard input what to
/// start, and tells by its standard output what the ranks say and how they end. When its input ends, because hvdrun has ended or the
/// connection is lost, it ends the ranks: SIGTERM, and SIGKILL some seconds later. It is for the main thread of a process that does nothing
/// else.

namespace hvdrun {

/// Returns the exit code.
int run_helper();

}  // namespace hvdrun
