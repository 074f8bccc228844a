#pragma once
/// The parts of what LibTorch's optimizers keep for a parameter: tensors like the parameter, and a
/// step counter. Functions only; any thread.
// Tested in tests/torch_bindings/optimizer/parameters_test.cc,
// tests/torch_bindings/sharding/optimizer_shards_test.cc

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace hvd::detail {

/// The parts of a state: tensors with a value for each element of the parameter, and the counter
/// that it has once.
struct StateParts {
  std::vector<at::Tensor*> tensors;
  std::int64_t* step = nullptr;
};
/// Returns no tensors for a state that LibTorch does not know.
StateParts parts_of(torch::optim::OptimizerParamState& state);
/// Returns whether the optimizer's step makes of each element what that element's gradient and
/// state say, so that it may see pieces of parameters: LibTorch's own do; a class that derives from
/// one of them (LARS, LAMB) may look at all of a parameter.
bool steps_by_element(const torch::optim::Optimizer& optimizer);
/// Returns whether it is LibTorch's own, whose `save` and `load` carry everything; not what a user
/// derives from them.
bool is_of_libtorch(const torch::optim::Optimizer& optimizer);
/// Returns a state of the kind that the optimizer keeps, empty, which throws InvalidArgument where
/// torch::save comes upon it; null if LibTorch does not know it.
std::unique_ptr<torch::optim::OptimizerParamState> state_in_shares(
    const torch::optim::Optimizer& optimizer);
/// Returns whether it is a state of LibTorch's own type, which `parts_of` has all of.
bool is_all_parts(const torch::optim::OptimizerParamState& state);
/// Returns an empty state of the kind that the optimizer keeps; null if LibTorch does not know it.
std::unique_ptr<torch::optim::OptimizerParamState> fresh_state(
    const torch::optim::Optimizer& optimizer);
/// Returns the learning rate; none for options that have none.
std::optional<double> rate_of(const torch::optim::OptimizerOptions& options);
/// Returns whether it is a state that no optimizer of LibTorch makes, and none can step with: as
/// `fresh_state` gives it.
bool is_left_over(torch::optim::OptimizerParamState& state);

}  // namespace hvd::detail
