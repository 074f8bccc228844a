#pragma once
/// The values that random programs put into tensors. A pure function.

#include "tests/support/programs/random_program.h"

namespace hvd::test {

/// Those of `rank`: they differ by rank and element.
Data random_values(std::uint64_t seed, int rank, DataType dtype, std::size_t count);

}  // namespace hvd::test
