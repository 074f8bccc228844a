#pragma once
/// A report says what was measured, as a table in the columns of nccl-tests and as JSON. Rank 0 alone makes it; a file that cannot be
/// written throws std::runtime_error.

#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/hvd_bench/options.h"
#include "tools/hvd_bench/race.h"

namespace bench {

/// One line of the table. algbw = bytes / time; busbw = algbw x 2(n-1)/n for an allreduce, (n-1)/n for an allgather, 1 for a broadcast:
/// what each rank's link would have to carry, whatever the number of ranks.
struct Row {
  std::size_t bytes = 0;
  std::size_t elements = 0;
  std::size_t tensors = 1;
  std::string memory, place, wire;
  Timing time;
  std::optional<std::size_t> wrong;                 ///< over all ranks; empty: not checked
  std::optional<Timing> mpi, packed, memcpy, line;  ///< measured in the same rounds
  std::optional<double> batches;                    ///< per burst of a model's gradients
};

class Report {
 public:
  /// Opens the JSON file, so that a run that cannot be written ends before it has begun.
  Report(const Options& options, int ranks);
  void begin(const std::string& description);
  void add(const Row& row);
  /// CPU time of the ranks while they slept, in percent of a core.
  void add_idle(double seconds, const std::vector<double>& percent);
  void end();

 private:
  const Options& options_;
  int ranks_;
  std::ofstream file_;
  nlohmann::ordered_json json_;
  double bus_bandwidths_ = 0;
  std::size_t rows_ = 0;
  std::size_t wrong_ = 0;
};

}  // namespace bench
