#pragma once
/// hvd_bench --burst N measures N small allreduces that are submitted at once and then waited for,
/// beside the same work done in other ways, all in turn in one run: as a group, one after the
/// other, and by MPI_Iallreduce of each and one MPI_Waitall.

#include "tools/hvd_bench/options.h"

namespace bench {

/// Prints a table with a line for each size on rank 0, and writes `options.json` where one is
/// named. Collective. Returns how many elements were wrong, over all ranks, where `options.check`
/// asks. Throws std::runtime_error on all ranks if the file cannot be written.
std::size_t run_burst(const Options& options);

}  // namespace bench
