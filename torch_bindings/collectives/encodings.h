#pragma once
/// Lossy encodings of tensors with floating point: what `Compression::int8`, `topk` and `powersgd`
/// send in place of the values. Functions only, without any memory of what is left out; any thread,
/// on the CPU or a GPU. What is not finite stays so for its block, value or tensor.
// Tested in tests/torch_bindings/gradients/compressor_test.cc,
// tests/torch_bindings/collectives/compressed_allreduce_test.cc

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "hvd/options.h"

namespace hvd::detail {

/// Returns "int8", "topk(0.1)" or "powersgd(2)".
std::string words_of(const Compression& compression);
/// Returns the type in which such a tensor is encoded: fp64 of fp64, else fp32.
at::ScalarType encoded_type(const at::Tensor& tensor);
/// Returns whether a compression that leaves out values takes this tensor: floating point, not
/// empty; for powersgd a matrix (first dimension by all others) that two thin ones are smaller
/// than.
bool is_encoded(const Compression& compression, const at::Tensor& tensor);

/// The values of a block of int8, which have one scale: the largest magnitude / 127 (Dettmers
/// 2016).
inline constexpr std::int64_t kInt8Block = 256;
/// The bytes of a block and its scale.
inline constexpr std::int64_t kInt8Row = kInt8Block + static_cast<std::int64_t>(sizeof(float));
/// Returns [blocks, 256] of fp32 or fp64 as [blocks, 260] of int8; off by half a step at most.
at::Tensor encode_int8(const at::Tensor& blocks);
at::Tensor decode_int8(const at::Tensor& rows, at::ScalarType type);

/// Returns the places of the values of largest magnitude of a vector, `ratio` of them and at least
/// one, and these values.
std::pair<at::Tensor, at::Tensor> largest(const at::Tensor& values, double ratio);

/// Returns random columns [rows, columns] of fp64: the same for a seed, and nobody else's numbers.
at::Tensor random_columns(at::IntArrayRef sizes, std::uint64_t seed);
/// Returns the columns of [rows, columns] made orthonormal (modified Gram-Schmidt), in plain loops:
/// the same bits on all ranks, whatever number of threads each has. Columns with nothing of their
/// own become zero; `empty` says which, if it is given.
at::Tensor orthonormal(const at::Tensor& columns, std::vector<std::int64_t>* empty = nullptr);
/// Returns left right^T; on the CPU in plain loops for the same reason.
at::Tensor low_rank_product(const at::Tensor& left, const at::Tensor& right);

}  // namespace hvd::detail
