#pragma once
/// What step_bench says at the end.

#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <string>

#include "examples/bench/step/options.h"
#include "examples/bench/step/subject.h"

namespace step_bench {

/// Returns what --check finds wrong on this rank; empty: nothing. All ranks call it. `start`: the parameters before the first step.
std::string mistakes(const Subjects& subjects, const torch::Tensor& start);
/// Prints the tables and returns them.
nlohmann::ordered_json report(const Options& options, const Subjects& subjects);

}  // namespace step_bench
