#pragma once
/// Runs the cases of a world on one rank, watches over hangs, and puts the ranks' reports together.

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "hvd/routes.h"
#include "tests/contract/case.h"

namespace hvd::contract {

struct Choice {
  std::string filter;     ///< cases whose name has it; empty: all
  int every = 1;          ///< of the cases of the large products only every so manyth
  bool in_world = false;  ///< of processes: in a world of its own beside the global one, whose
                          ///< ranks are in the reverse order
};

/// What a rank has found; of several ranks, a case has failed if it failed on any.
struct Report {
  std::size_t run = 0;
  std::map<std::string, std::vector<std::string>> failed;  ///< by "setting: case"
  std::map<std::string, std::size_t> skipped;              ///< cases by reason
  std::map<std::string, std::uint64_t>
      taken;  ///< batches and rounds by the name of their way, of this process's ranks
  /// Another rank's of the same cases.
  void merge_rank(const Report& other);
  /// Of other cases.
  void add(const Report& other);
};

/// Which case each rank of this process is in. Ends the process when one is in the same case for
/// too long, and says so for all.
class Watch {
 public:
  Watch(std::string setting, int first_rank, int ranks);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  void enter(int rank, const std::string& one);

 private:
  void watch();
  const std::string setting_;
  const int first_rank_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> cases_;
  std::vector<int> turns_;
  bool ending_ = false;
  std::thread thread_;
};

/// One rank's run through a world: makes the late set, runs the chosen cases, shuts the world down.
/// `notebook` outlives the world.
Report run_rank(Endpoint& endpoint, const Setting& setting, int rank,
                std::map<std::string, Block>& notebook, const Choice& choice, Watch& watch);

/// Prints failures, skips and the routes that were taken, and the last line. Returns the exit code:
/// also one of `routes`, by their names, that nothing took is a failure.
int conclude(const Report& report, const std::vector<std::string>& routes = {});

}  // namespace hvd::contract
