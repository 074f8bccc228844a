#pragma once
/// Lists of ranks, written as runs: what all ranks of a large world say alike then takes as much memory, and as many bytes on the wire, as
/// what one says. Plain values and functions without state.
// Tested in tests/hvd/negotiation/rank_signatures_test.cc

#include <optional>
#include <span>
#include <vector>

namespace hvd {

/// Ranks, or places in a process set, that follow one another.
struct Run {
  int first = 0;
  int count = 0;
  bool operator==(const Run&) const = default;
};
/// Ascending; no two touch.
using Runs = std::vector<Run>;

/// Adds the ranks of `run`, whether they are in the list or not.
void add(Runs& runs, Run run);
/// Takes the ranks of `run` out, as far as they are in the list.
void remove(Runs& runs, Run run);
/// Returns the places of the run's ranks in a list of ranks that ascends; none if one of them is not in it.
std::optional<Run> find_run(std::span<const int> ascending, Run run);

}  // namespace hvd
