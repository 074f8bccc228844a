#pragma once
/// What hvd_bench prints and writes: lines, the JSON file, and the Report of what was measured as a
/// table in the columns of nccl-tests. All ranks make them; rank 0 alone prints and writes.

#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/hvd_bench/options.h"
#include "tools/hvd_bench/race.h"

namespace bench {

/// Prints a line, on rank 0.
void say(const std::string& line);
/// "64 KiB", "1 MiB", "1000 B"
std::string text_of_bytes(std::size_t bytes);
/// Returns a number of wrong elements as JSON has it: null where nothing was checked.
inline nlohmann::ordered_json json_of(const std::optional<std::size_t>& wrong) {
  return wrong ? nlohmann::ordered_json(*wrong) : nullptr;
}

/// The file that --json names; empty: none. Where it cannot be opened or written both throw
/// std::runtime_error, on all ranks. Collective.
class JsonFile {
 public:
  /// Opens it, so that a run whose file cannot be written ends before it has begun.
  explicit JsonFile(const std::string& path);
  void write(const nlohmann::ordered_json& json);

 private:
  void agree() const;

  std::string path_;
  std::ofstream file_;
};

/// One line of the table. algbw = bytes / time; busbw = algbw x 2(n-1)/n for an allreduce, (n-1)/n
/// for an allgather, 1 for a broadcast: what each rank's link would have to carry, whatever the
/// number of ranks.
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
  /// Opens the JSON file, and begins the table.
  explicit Report(const Options& options);
  void add(const Row& row);
  /// CPU time of the ranks while they slept, in percent of a core.
  void add_idle(double seconds, const std::vector<double>& percent);
  void end();

 private:
  const Options& options_;
  JsonFile file_;
  nlohmann::ordered_json json_;
  double bus_bandwidths_ = 0;
  std::size_t rows_ = 0;
  std::size_t wrong_ = 0;
};

}  // namespace bench
