#pragma once
/// The command line of hvdrun.

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace hvdrun {

/// The command line cannot be followed; says why.
struct WrongOptions : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  int ranks = 0;                                               ///< 0: as many as there are slots
  std::string hosts;                                           ///< "first:4,second:4"
  std::string hostfile;                                        ///< a file with a line for each host
  std::vector<std::pair<std::string, std::string>> variables;  ///< for the ranks
  std::vector<std::string> exports;  ///< names to be passed to other hosts
  std::string output_folder;
  bool prefixes = true;
  bool by_mpirun = false;  ///< also on one host
  std::string mpi_arguments;
  int ssh_port = 0;
  std::string ssh_identity;
  std::string interfaces;  ///< that the hosts share, with commas
  bool dry_run = false;
  bool check_build = false;
  bool verbose = false;
  std::optional<int> time_to_end;  ///< seconds between SIGTERM and SIGKILL; default: 5
  std::vector<std::string> command;
  std::string help;  ///< to be printed instead of anything else
};

/// Throws WrongOptions.
Options parse_command_line(int argc, char** argv);

}  // namespace hvdrun
