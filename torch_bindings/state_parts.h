#pragma once
/// What LibTorch's optimizers keep for a parameter, by its parts: tensors like the parameter, and a step counter. Functions only; any
/// thread.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace hvd::detail {

/// What a state has for each element of its parameter, and what it has once.
struct StateParts {
  std::vector<at::Tensor*> tensors;
  std::int64_t* step = nullptr;
};
/// Returns no tensors for a state that LibTorch does not know.
StateParts parts_of(torch::optim::OptimizerParamState& state);
/// Returns an empty state of the kind that the optimizer keeps; null if LibTorch does not know it.
std::unique_ptr<torch::optim::OptimizerParamState> fresh_state(const torch::optim::Optimizer& optimizer);
/// Returns whether it is a state that no optimizer of LibTorch makes, and none can step with: as `fresh_state` gives it.
bool is_left_over(torch::optim::OptimizerParamState& state);

}  // namespace hvd::detail
