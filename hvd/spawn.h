#pragma once
/// With spawn() a program starts its own ranks, so that it needs no launcher on its command line:
/// it is started once more under `mpirun`, with the same arguments, as often as there are ranks. It
/// is for the main thread, before `init()`. While it waits it owns the launcher's process and a
/// folder for what the ranks have to say (in TMPDIR, or /tmp).
// Tested in tests/system/scripts/starts/spawn.sh

#include <functional>

#include "hvd/errors.h"

#pragma GCC visibility push(default)
namespace hvd {

/// Calls `work` in a process that a launcher has started (by this function or by hand), or for one
/// rank. Otherwise starts `ranks` processes of this program, each of which is to come to this call
/// and does its work there, waits for them and returns without having called `work` itself; so
/// `main` should do nothing before it that is to be done once, and should return after it:
///
///     int main(int argc, char** argv) {
///       hvd::spawn(4, [&] { hvd::init(); train(argc, argv); hvd::shutdown(); });
///     }
///
/// An exception that leaves `work` leaves spawn() in that rank too. In the process that has started
/// the ranks spawn() throws Error if they did not all end well, with the launcher's exit code and
/// the text of each rank's exception; BackendError if there is no `mpirun` or TMPDIR is no folder;
/// InvalidArgument for fewer than one rank, and for several where a launcher has made a world of
/// one.
void spawn(int ranks, const std::function<void()>& work);

}  // namespace hvd
#pragma GCC visibility pop
