#pragma once
/// The oracle's arithmetic, one element at a time and written to be read. Pure functions.

#include <cstdint>
#include <optional>
#include <vector>

#include "tests/support/random_program.h"

namespace hvd::test::oracle {

/// A 16-bit number, or any other real one, as a double. `dtype` is one of the real floating-point types.
double decode(DataType dtype, const std::byte* from);
/// To nearest even.
void encode(DataType dtype, double value, std::byte* to);

/// The values that `rank` puts into a tensor.
Data values(std::uint64_t seed, int rank, DataType dtype, std::size_t count);

struct Folding {
  DataType dtype;
  ReduceOp op;
  double prescale;
  double postscale;
  int divisor;
};
/// All inputs, in their order, element by element.
Data fold(const Folding& folding, const std::vector<Data>& inputs, std::size_t count);
/// By the definition: neighbours in pairs, the results again in pairs; one that is left over waits. None where vectors nearly cancel out on
/// the way: of what is left then, rounding decides the direction.
std::optional<Data> adasum(const Folding& folding, const std::vector<Data>& inputs, std::size_t count);

}  // namespace hvd::test::oracle
