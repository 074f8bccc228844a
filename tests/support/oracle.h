#pragma once
/// What a program's operations must result in, computed from the program alone: its own arithmetic, its own conversions, its
/// own reading of the rules. Shares nothing with the library but the words of hvd/types.h. Pure functions.

#include <span>
#include <string>
#include <vector>

#include "tests/support/random_program.h"

namespace hvd::test::oracle {

/// What the tensor holds before the operation: zeros where the rank has nothing to say.
Data input_of(const Call& call, int rank, std::size_t tensor);

/// Whether there is such a reduction at all.
bool has(OpKind kind, DataType dtype, ReduceOp op);

/// Fills in what every rank of `ranks` (the process set) gets. Those without a call have joined.
void expect(Op& op, const std::vector<int>& ranks);

/// Whether the bytes are what is expected, zeros of either sign and all NaNs being equal; `about`: up to rounding.
bool equal(DataType dtype, std::span<const std::byte> a, std::span<const std::byte> b, bool about);

/// "ranks 0-2, 5", "rank 3"
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace hvd::test::oracle
