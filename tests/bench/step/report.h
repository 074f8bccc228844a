#pragma once
/// What step_bench says at the end.

#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tests/bench/step/options.h"
#include "tests/bench/step/subject.h"

namespace step_bench {

/// Returns what --check finds wrong on this rank; empty: nothing. All ranks call it. `start`: the
/// parameters before the first step.
std::string mistakes(const Subjects& subjects, const torch::Tensor& start);
/// Returns the memory of this process, with what several processes use shared out among them (PSS).
double proportional_mebibytes();
/// Prints the tables and returns them. `mebibytes`: what the subjects have taken, on all ranks.
nlohmann::ordered_json report(const Options& options, const Subjects& subjects, double mebibytes);

}  // namespace step_bench
