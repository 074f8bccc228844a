#pragma once
/// Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021) is a
/// sum of gradients in which what they have in common counts once. Orthogonal vectors add, parallel
/// ones average; two vectors that stand for m and n ranks give
///
///   adasum(a, b) = (1 - m/(m+n) a.b / |a|^2) a + (1 - n/(m+n) a.b / |b|^2) b
///
/// (there m = n), and more than two are combined in pairs of neighbours, the results again in
/// pairs; one that is left over waits for the next round. Every intermediate vector is a linear
/// combination of the inputs, so two passes over the data are enough: one for the inputs' scalar
/// products, from which the combination's coefficients follow, and one for the result. Pure
/// functions: any thread, no state.
// Tested in tests/ops/p2p/execution_test.cc

#include <span>
#include <vector>

#include "ops/kernels/reduce.h"

namespace hvd::kernels {

/// Float16, BFloat16, Float32, Float64.
bool adasum_supported(DataType dtype);

/// Returns the coefficients of the Adasum of vectors with these scalar products (n*n, symmetric)
/// that stand for so many `ranks`; empty: one each. A vector of zeros, or one that is nothing but
/// rounding errors, has no direction: the other of its
/// pair goes on as it is, for both.
std::vector<double> adasum_coefficients(std::span<const double> products, std::size_t n,
                                        std::span<const double> ranks = {});

/// Writes the Adasum of all `in` into every `out`; a null input counts as zeros, in its place;
/// `reduction` gives dtype and scales, its operation is not looked at. Scalar products are summed
/// in double, of values scaled by a power of two so that they neither overflow nor vanish; 16-bit
/// types are rounded once. Aliasing as in `reduce`. Throws std::invalid_argument for another dtype.
/// `ranks`: as above.
void adasum(const Reduction& reduction, std::span<const void* const> in, std::span<void* const> out,
            std::size_t count, std::span<const double> ranks = {});

}  // namespace hvd::kernels
