#pragma once
/// One parameter is one TensorImpl, however many names a model has for it: tied weights (a decoder that uses the embedding's weight) are
/// listed twice by LibTorch's `parameters()` and `named_parameters()`. A function only; any thread; throws nothing of its own.

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace hvd::detail {

/// Returns every tensor of `named` once, at its first place. One with several names gets them all, sorted and joined, so that ranks which
/// list them in another order call it the same: "decoder.weight = embedding.weight". Undefined tensors are kept as they are.
std::vector<std::pair<std::string, at::Tensor>> unique_parameters(const std::vector<std::pair<std::string, at::Tensor>>& named);

}  // namespace hvd::detail
