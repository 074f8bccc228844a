#pragma once
/// The command line of step_bench.

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "examples/train/models/bert.h"

namespace step_bench {

struct Options {
  std::string model = "resnet18";
  std::vector<std::string> subjects;
  std::string device = "cpu";
  std::string amp;
  int rounds = 20;
  int warmup = 3;
  std::int64_t batch = 4;
  std::int64_t side = 32;
  int classes = 100;
  examples::BertOptions bert;
  std::int64_t sequence = 128;
  std::string optimizer = "sgd";
  int updates = 0;
  bool check = false;
  std::string json;
  std::string profile;  ///< file of a profile; empty: none is written
};

/// Makes the options of the command line those of `options`.
void add_options(CLI::App& app, Options& options);
/// Returns what is wrong with options that are right one by one; empty: nothing.
std::string wrong_with(const Options& options);

}  // namespace step_bench
