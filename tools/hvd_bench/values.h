#pragma once
/// This header has known inputs and the results that follow from them, computed here without the
/// library. Every rank's input and every position differ; the numbers are small, so that sums and
/// products are exact in every type. Averages may differ by one rounding, an Adasum by those of its
/// pairs. Bools are 0 and 1; the two parts of a complex number count as an element each.

#include <hvd/hvd.h>

#include <cstddef>
#include <span>
#include <vector>

namespace bench {

/// What is asked of the library.
struct Question {
  hvd::DataType dtype = hvd::DataType::Float32;
  hvd::ReduceOp op = hvd::ReduceOp::Sum;
  int ranks = 1;
  hvd::DataType wire = dtype;   ///< in which the values travel
  std::vector<int> hosts = {};  ///< of each rank: the ranks of one are combined first by an Adasum;
                                ///< empty: all are of one
};

/// Writes `rank`'s input for tensor `tensor`.
void fill(const Question& question, int rank, std::size_t tensor, std::span<std::byte> to);

/// How many elements are not what the reduction of all ranks' inputs gives.
/// `first`: where in the tensor `got` begins, in elements.
std::size_t count_wrong_reduced(const Question& question, std::size_t tensor,
                                std::span<const std::byte> got, std::size_t first = 0);
/// How many elements are not `rank`'s input.
std::size_t count_wrong_copied(const Question& question, int rank, std::size_t tensor,
                               std::span<const std::byte> got, std::size_t first = 0);

}  // namespace bench
