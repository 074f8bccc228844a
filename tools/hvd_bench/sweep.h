#pragma once
/// hvd_bench --sweep measures every collective at every size against MPI in the same run, round by
/// round in turn, and says how many of the cells hvd wins. Where MPI writes into memory that
/// exists, hvd does. Beside the main row of a cell stand rows of the same work done in another way:
/// forms that return a new tensor, memory shared by the ranks, values that travel in 16 bits, a
/// group of tensors.

#include "tools/hvd_bench/options.h"

namespace bench {

/// Prints the table on rank 0, and writes `options.json` where one is named. Collective. Returns
/// how many elements were wrong, over all ranks, where `options.check` asks. Throws
/// std::runtime_error on all ranks if the file cannot be written.
std::size_t run_sweep(const Options& options);

}  // namespace bench
