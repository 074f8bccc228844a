#pragma once
/// A Plan is what hvdrun will start: ranks of this host, by itself; mpirun; or a helper on each host, by ssh.

#include <string>
#include <utility>
#include <vector>

#include "tools/hvdrun/options.h"
#include "tools/hvdrun/rank_process.h"

namespace hvdrun {

/// The ranks of a host that ssh starts.
struct HostRanks {
  std::string name;
  bool is_this_host = false;
  int first = 0, count = 0;
};

struct Plan {
  int ranks = 1;
  /// mpirun and its arguments, where it starts the ranks; else empty.
  std::vector<std::string> launcher;
  /// Where ssh starts the ranks; else empty.
  std::vector<HostRanks> hosts;
  Program program;
  std::vector<std::string> ssh;                              ///< the words before a host's name
  std::vector<std::pair<std::string, std::string>> exports;  ///< what hosts other than this one must be told of this environment
  std::string folder;                                        ///< in which ranks of other hosts start, too
  std::string master_address;                                ///< at which the ranks of several hosts meet; empty: to be found
  std::string interfaces;                                    ///< likewise: of one of these, with commas between them
};

/// Throws WrongOptions.
Plan make_plan(const Options& options);
/// Returns the words as a shell takes them.
std::string quoted(const std::vector<std::string>& words);
/// Returns whether a program can be run: it is in a folder of PATH, or at that place.
bool is_found(const std::string& program);
/// Returns the sentence for a program that is not.
std::string no_such_program(const std::string& program);
/// Returns rank's own variables; `local` is its number among the `local_size` of its host.
std::vector<std::pair<std::string, std::string>> variables_of_rank(int rank, int size, int local, int local_size);

}  // namespace hvdrun
