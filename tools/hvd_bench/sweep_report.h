#pragma once
/// What --sweep says: a row for each way of each cell, and at the end how many cells of each way are won, level or lost. All ranks make
/// one and agree on whether the file could be written; rank 0 alone prints and writes.

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/hvd_bench/options.h"

namespace bench {

/// One way of one cell. Times are medians over the rounds, of the slowest rank, in microseconds.
struct SweepRow {
  std::string collective;
  std::uint64_t bytes = 0;
  std::string way;  ///< main, plain, arena, fp16, bf16 or grouped
  double time = 0, mpi = 0;
  std::optional<std::size_t> wrong;  ///< over all ranks; empty: not checked
  [[nodiscard]] double ratio() const { return mpi / time; }
};

class SweepReport {
 public:
  /// Opens the file that `options` names. Collective; throws std::runtime_error on all ranks if it cannot.
  explicit SweepReport(const Options& options);
  void add(const SweepRow& row);
  /// Prints the counts and writes the file. Collective; throws as the constructor does.
  void end();

 private:
  struct Count {
    int won = 0, level = 0, lost = 0;
    double least = 1e9;
  };
  void agree(const std::string& mistake) const;

  std::string path_;
  std::ofstream file_;
  nlohmann::ordered_json json_;
  std::vector<std::string> ways_;  // in the order of their first rows
  std::map<std::string, Count> counts_;
};

}  // namespace bench
