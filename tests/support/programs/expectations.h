#pragma once
/// What a program's operations must result in, found from the program alone: who gets what, and who
/// disagrees with whom in which words. The numbers are the oracle's (oracle.h). Shares nothing with
/// the library but the words of hvd/types.h. Pure functions.

#include <string>
#include <vector>

#include "tests/support/programs/random_program.h"

namespace hvd::test {

/// What the tensor holds before the operation: zeros where the rank has nothing to say.
Data input_of(const Call& call, int rank, std::size_t tensor);

/// Whether there is such an operation at all.
bool is_defined(OpKind kind, DataType dtype, ReduceOp op);

/// Fills in what every rank of `ranks` (the process set) gets. Those without a call have joined.
void fill_expectations(Op& op, const std::vector<int>& ranks);

/// "ranks 0-2, 5", "rank 3"
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace hvd::test
