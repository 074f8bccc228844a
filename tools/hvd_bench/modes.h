#pragma once
/// What hvd_bench does instead of measuring one collective: --sweep, --burst and --routes. Each of
/// the first two is collective, prints a table on rank 0, writes `options.json` where one is named,
/// and returns how many elements were wrong, over all ranks, where `options.check` asks. They throw
/// std::runtime_error on all ranks if the file cannot be written.

#include <cstddef>
#include <string>

#include "tools/hvd_bench/options.h"

namespace bench {

/// Measures every collective at every size against MPI in the same run, round by round in turn, and
/// says how many of the cells hvd wins. Where MPI writes into memory that exists, hvd does. Beside
/// the main row of a cell stand rows of the same work done in another way: forms that return a new
/// tensor, memory shared by the ranks, values that travel in 16 bits, a group of tensors.
std::size_t run_sweep(const Options& options);

/// Measures N small allreduces that are submitted at once and then waited for, beside the same work
/// done in other ways, all in turn in one run: as a group, one after the other, and by
/// MPI_Iallreduce of each and one MPI_Waitall. A line for each size.
std::size_t run_burst(const Options& options);

/// Returns which way each collective takes at each size, and why (hvd/routes.h), as Markdown.
/// Measures this machine where the options do not describe it: whether reading another process is
/// slow. No other rank is started.
std::string routes_text(const Options& options);

}  // namespace bench
