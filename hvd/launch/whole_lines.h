#pragma once
/// print_whole_lines() sees to it that what a rank prints is heard line by line. The C library keeps back what goes to a pipe until it has
/// 4 KiB or the process ends in order, so an exception that nobody catches, or a signal, would take the last lines of a rank along, and
/// those of several ranks would be torn. It is called by the library before main(), so that what the program itself says of its buffers
/// counts; any thread.
// Tested in tests/system/scripts/hvdrun.sh

namespace hvd {

/// Makes standard output line-buffered, once, if a launcher has started this process as a rank.
void print_whole_lines() noexcept;

}  // namespace hvd
