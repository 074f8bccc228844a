#pragma once
/// Single operations drawn from random: a right one for every rank of a process set, a wrong one,
/// and calls that are refused.

#include <string>
#include <vector>

#include "tests/support/programs/random_program.h"
#include "tests/support/random.h"

namespace hvd::test {

struct CallLimits {
  int largest_group = 4;
  bool large_tensors = true;
};

/// The operation for each rank of `ranks`, the members of `set`; `world` is the number of all
/// ranks.
Op draw_op(Random& random, OpKind kind, int set, const std::vector<int>& ranks, int world,
           std::string name, const CallLimits& limits);

/// One that all ranks of `ranks` submit alike, so that it may come back: of one tensor, often of
/// medium size.
Op draw_steady_op(Random& random, OpKind kind, int set, const std::vector<int>& ranks, int world,
                  std::string name);

/// Changes what some ranks say, so that they disagree. False if there is nothing in it to disagree
/// about.
bool spoil(Random& random, Op& op, const std::vector<int>& ranks);

/// A call that is refused on this rank, and how.
Step draw_refusal(Random& random, int rank, int world, const std::vector<SetDraw>& sets);

}  // namespace hvd::test
