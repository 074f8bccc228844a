#pragma once
/// Options is the command line of hvd_scale_sim as a value. Wrong options throw `WrongOptions`,
/// whose text says what is allowed.

#include <stdexcept>
#include <string>
#include <vector>

#include "tests/scale/program.h"
#include "tests/scale/simulation.h"

namespace scale {

struct WrongOptions : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  std::string help;  ///< not empty: print it and end
  std::vector<int> ranks{8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
  std::string model = "resnet50";
  int steps = 6;  ///< the first introduces all tensors, the others are the steady state
  Program program;
  World world;  ///< but for its ranks
};

Options parse_command_line(int argc, char** argv);

}  // namespace scale
