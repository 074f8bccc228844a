#include "tools/hvd_bench/sweep_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "tools/hvd_bench/race.h"

namespace bench {

namespace {

constexpr double kWon = 1.0;
constexpr double kLevel = 0.95;
constexpr const char* kSweepColumns = "{:<14} {:>10} {:<8} {:>11} {:>11} {:>7}  {}";

void say(const std::string& line) {
  if (hvd::rank() != 0) return;
  std::fputs((line + "\n").c_str(), stdout);
  std::fflush(stdout);
}

const char* word_for(double ratio) { return ratio >= kWon ? "won" : ratio >= kLevel ? "level" : "lost"; }

std::string text_of_size(std::uint64_t bytes) {
  if (bytes >= 1 << 20 && bytes % (1 << 20) == 0) return fmt::format("{} MiB", bytes >> 20);
  if (bytes >= 1 << 10 && bytes % (1 << 10) == 0) return fmt::format("{} KiB", bytes >> 10);
  return fmt::format("{} B", bytes);
}

}  // namespace

SweepReport::SweepReport(const Options& options) : path_(options.json) {
  std::string mistake;
  if (!path_.empty() && hvd::rank() == 0) {
    file_.open(path_);
    if (!file_) mistake = fmt::format("--json {}: {}", path_, std::strerror(errno));
  }
  agree(mistake);
  json_ = {{"program", "hvd_bench"},
           {"sweep", true},
           {"ranks", hvd::size()},
           {"cores", std::thread::hardware_concurrency()},
           {"description", hvd::backend_description()},
           {"dtype", hvd::name_of(options.dtype)},
           {"op", hvd::name_of(options.op)},
           {"rounds", options.rounds},
           {"rows", nlohmann::ordered_json::array()}};
  say(fmt::format("# hvd_bench --sweep: {}, {} {}, {}", hvd::backend_description(), hvd::name_of(options.dtype), hvd::name_of(options.op),
                  fmt::format("{} rounds, all in turn", options.rounds)));
  say("# main: ordinary memory, results into memory that exists, as MPI's; plain: results are new; arena: memory of the ranks' own;");
  say(fmt::format("# grouped: the size in 4 tensors; ratio: MPI's time / hvd's; won: {:.2f} and more, level: {:.2f} and more", kWon,
                  kLevel));
  say(fmt::format(kSweepColumns, "# collective", "size", "way", "hvd (us)", "MPI (us)", "ratio", ""));
}

void SweepReport::add(const SweepRow& row) {
  const std::string wrong = row.wrong.value_or(0) == 0 ? "" : fmt::format(", {} elements WRONG", *row.wrong);
  say(fmt::format(kSweepColumns, row.collective, text_of_size(row.bytes), row.way, fmt::format("{:.2f}", row.time),
                  fmt::format("{:.2f}", row.mpi), fmt::format("{:.2f}", row.ratio()), word_for(row.ratio()) + wrong));
  json_["rows"].push_back({{"collective", row.collective},
                           {"bytes", row.bytes},
                           {"way", row.way},
                           {"time_us", row.time},
                           {"mpi_us", row.mpi},
                           {"ratio", row.ratio()},
                           {"wrong", row.wrong ? nlohmann::ordered_json(*row.wrong) : nlohmann::ordered_json()}});
  if (!counts_.contains(row.way)) ways_.push_back(row.way);
  Count& count = counts_[row.way];
  ++(row.ratio() >= kWon ? count.won : row.ratio() >= kLevel ? count.level : count.lost);
  count.least = std::min(count.least, row.ratio());
}

void SweepReport::end() {
  for (const auto& way : ways_) {
    const Count& count = counts_[way];
    say(fmt::format("# {:<8} {} cells: {} won, {} level, {} lost; least ratio {:.2f}", way, count.won + count.level + count.lost, count.won,
                    count.level, count.lost, count.least));
    json_["counts"][way] = {{"won", count.won}, {"level", count.level}, {"lost", count.lost}, {"least", count.least}};
  }
  std::string mistake;
  if (file_.is_open()) {
    file_ << json_.dump(2) << "\n";
    file_.close();
    if (!file_) mistake = fmt::format("--json {}: could not be written", path_);
  }
  agree(mistake);
}

void SweepReport::agree(const std::string& mistake) const {
  if (largest(mistake.empty() ? 0 : 1) > 0)
    throw std::runtime_error(mistake.empty() ? fmt::format("--json {}: rank 0 could not write it", path_) : mistake);
}

}  // namespace bench
