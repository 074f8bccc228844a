#include "tools/hvd_bench/modes.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hvd/topology.h"
#include "tools/hvd_bench/race.h"
#include "tools/hvd_bench/report.h"
#include "tools/hvd_bench/rivals.h"
#include "tools/hvd_bench/workload.h"

namespace bench {

namespace {

constexpr Collective kSweptCollectives[] = {Collective::Allreduce, Collective::Broadcast,
                                            Collective::Allgather, Collective::Alltoall,
                                            Collective::Reducescatter};
constexpr std::size_t kGroup = 4;  // tensors of a grouped allreduce

constexpr double kWon = 1.0;
constexpr double kLevel = 0.95;
constexpr const char* kSweepColumns = "{:<14} {:>10} {:<8} {:>11} {:>11} {:>7}  {}";

const char* word_for(double ratio) {
  return ratio >= kWon ? "won" : ratio >= kLevel ? "level" : "lost";
}

/// One way of one cell. Times are medians over the rounds, of the slowest rank, in microseconds.
struct SweepRow {
  std::string collective;
  std::uint64_t bytes = 0;
  std::string way;  ///< main, plain, arena, fp16, bf16 or grouped
  double time = 0, mpi = 0;
  std::optional<std::size_t> wrong;  ///< over all ranks; empty: not checked
  [[nodiscard]] double ratio() const { return mpi / time; }
};

/// A row for each way of each cell, and at the end how many of each way are won, level or lost.
class SweepReport {
 public:
  explicit SweepReport(const Options& options) : file_(options.json) {
    json_ = {{"program", "hvd_bench"},
             {"sweep", true},
             {"ranks", hvd::size()},
             {"cores", hvd::detail::usable_cores()},
             {"description", hvd::backend_description()},
             {"dtype", hvd::name_of(options.dtype)},
             {"op", hvd::name_of(options.op)},
             {"rounds", options.rounds},
             {"rows", nlohmann::ordered_json::array()}};
    say(fmt::format("# hvd_bench --sweep: {}, {} {}, {}", hvd::backend_description(),
                    hvd::name_of(options.dtype), hvd::name_of(options.op),
                    fmt::format("{} rounds, all in turn", options.rounds)));
    say("# main: ordinary memory, results into memory that exists, as MPI's; plain: results are "
        "new; arena: memory of the ranks' own;");
    say(
        fmt::format("# grouped: the size in 4 tensors; ratio: MPI's time / hvd's; won: {:.2f} and "
                    "more, level: {:.2f} and more",
                    kWon, kLevel));
    say(fmt::format(kSweepColumns, "# collective", "size", "way", "hvd (us)", "MPI (us)", "ratio",
                    ""));
  }

  void add(const SweepRow& row) {
    const std::string wrong =
        row.wrong.value_or(0) == 0 ? "" : fmt::format(", {} elements WRONG", *row.wrong);
    say(fmt::format(kSweepColumns, row.collective, text_of_bytes(row.bytes), row.way,
                    fmt::format("{:.2f}", row.time), fmt::format("{:.2f}", row.mpi),
                    fmt::format("{:.2f}", row.ratio()), word_for(row.ratio()) + wrong));
    json_["rows"].push_back({{"collective", row.collective},
                             {"bytes", row.bytes},
                             {"way", row.way},
                             {"time_us", row.time},
                             {"mpi_us", row.mpi},
                             {"ratio", row.ratio()},
                             {"wrong", json_of(row.wrong)}});
    if (!counts_.contains(row.way)) ways_.push_back(row.way);
    Count& count = counts_[row.way];
    ++(row.ratio() >= kWon ? count.won : row.ratio() >= kLevel ? count.level : count.lost);
    count.least = std::min(count.least, row.ratio());
  }

  void end() {
    for (const auto& way : ways_) {
      const Count& count = counts_[way];
      say(fmt::format("# {:<8} {} cells: {} won, {} level, {} lost; least ratio {:.2f}", way,
                      count.won + count.level + count.lost, count.won, count.level, count.lost,
                      count.least));
      json_["counts"][way] = {
          {"won", count.won}, {"level", count.level}, {"lost", count.lost}, {"least", count.least}};
    }
    file_.write(json_);
  }

 private:
  struct Count {
    int won = 0, level = 0, lost = 0;
    double least = 1e9;
  };

  JsonFile file_;
  nlohmann::ordered_json json_;
  std::vector<std::string> ways_;  // in the order of their first rows
  std::map<std::string, Count> counts_;
};

/// Operations in a row in one round: enough of them to be measured.
int repeats_for(std::uint64_t bytes) {
  if (bytes < (64 << 10)) return 200;
  if (bytes < (1 << 20)) return 20;
  return bytes < (16 << 20) ? 3 : 1;
}

/// One way of doing a cell's work, and what does the same by MPI.
struct Way {
  std::string name;
  Options options;  // before the subject, which refers to it
  std::unique_ptr<Subject> subject;
  std::size_t rival = 0;  // its place among the rivals
  std::size_t wrong = 0;
};

/// All ways of one collective at one size.
class Cell {
 public:
  Cell(const Options& options, Collective collective, std::uint64_t bytes)
      : common_(options), collective_(collective), bytes_(bytes) {
    common_.collective = collective;
    common_.sweep = false;
    const std::size_t parts = is_shared_out(collective) ? static_cast<std::size_t>(hvd::size()) : 1;
    counts_ = {std::max<std::size_t>(1, bytes / hvd::element_bytes(options.dtype) / parts) * parts};
    add_rival(counts_);
    Options main = common_;
    main.into = is_shared_out(collective);
    add("main", main, counts_);
    if (main.into) add("plain", common_, counts_);
    if (ranks_share_memory()) add("arena", main, counts_, true);
    if (collective != Collective::Allreduce) return;
    for (const auto wire : {hvd::Compression::fp16(), hvd::Compression::bf16()})
      add(bench::name_of(wire), main, counts_, false, wire);
    Options group = main;
    group.grouped = true;
    const std::vector<std::size_t> members(kGroup,
                                           std::max<std::size_t>(1, counts_.front() / kGroup));
    add_rival(members);
    add("grouped", group, members);
  }

  /// Measures all in turn and returns the rows. Collective.
  std::vector<SweepRow> measure() {
    count_wrong();
    std::vector<Runner> runners;
    for (const auto& way : ways_) {
      way->subject->zero();
      runners.push_back({way->name, [&way] { way->subject->run(); }});
    }
    for (const auto& rival : rivals_) runners.push_back({"MPI", [&rival] { rival->run_mpi(); }});
    const int repeats = common_.repeats > 0 ? common_.repeats : repeats_for(bytes_);
    const auto timings = race(runners, {common_.warmup, common_.rounds, repeats});
    count_wrong();
    std::vector<SweepRow> rows;
    for (std::size_t i = 0; i < ways_.size(); ++i) {
      const Way& way = *ways_[i];
      SweepRow row{bench::name_of(collective_),
                   bytes_,
                   way.name,
                   timings[i].median,
                   timings[ways_.size() + way.rival].median,
                   {}};
      if (common_.check) row.wrong = total(way.wrong);
      rows.push_back(row);
    }
    return rows;
  }

 private:
  void add_rival(const std::vector<std::size_t>& counts) {
    rivals_.push_back(std::make_unique<Rival>(common_, counts));
  }
  void add(const std::string& name, const Options& options, const std::vector<std::size_t>& counts,
           bool in_arena = false, hvd::Compression wire = {}) {
    auto way = std::make_unique<Way>(Way{name, options, nullptr, rivals_.size() - 1, 0});
    const bool in_place = collective_ == Collective::Broadcast;
    way->subject = std::make_unique<Subject>(way->options, counts, in_arena, in_place, wire);
    ways_.push_back(std::move(way));
  }
  void count_wrong() {
    for (const auto& way : ways_)
      if (common_.check) way->wrong += way->subject->count_wrong();
  }

  Options common_;
  Collective collective_;
  std::uint64_t bytes_;
  std::vector<std::size_t> counts_;
  std::vector<std::unique_ptr<Rival>> rivals_;
  std::vector<std::unique_ptr<Way>> ways_;
};

}  // namespace

std::size_t run_sweep(const Options& options) {
  SweepReport report(options);
  std::size_t wrong = 0;
  for (const Collective collective : kSweptCollectives)
    for (const std::uint64_t bytes : sizes_of(options))
      for (const auto& row : Cell(options, collective, bytes).measure()) {
        report.add(row);
        wrong += row.wrong.value_or(0);
      }
  report.end();
  return wrong;
}

}  // namespace bench
