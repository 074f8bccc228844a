#include "tools/hvd_bench/sweep.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "tools/hvd_bench/race.h"
#include "tools/hvd_bench/sweep_report.h"
#include "tools/hvd_bench/workload.h"

namespace bench {

namespace {

constexpr Collective kSweptCollectives[] = {Collective::Allreduce, Collective::Broadcast, Collective::Allgather, Collective::Alltoall,
                                            Collective::Reducescatter};
constexpr std::size_t kGroup = 4;  // tensors of a grouped allreduce

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
  Cell(const Options& options, Collective collective, std::uint64_t bytes) : common_(options), collective_(collective), bytes_(bytes) {
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
    for (const auto wire : {hvd::Compression::fp16(), hvd::Compression::bf16()}) add(bench::name_of(wire), main, counts_, false, wire);
    Options group = main;
    group.grouped = true;
    const std::vector<std::size_t> members(kGroup, std::max<std::size_t>(1, counts_.front() / kGroup));
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
      SweepRow row{bench::name_of(collective_), bytes_, way.name, timings[i].median, timings[ways_.size() + way.rival].median, {}};
      if (common_.check) row.wrong = total(way.wrong);
      rows.push_back(row);
    }
    return rows;
  }

 private:
  void add_rival(const std::vector<std::size_t>& counts) { rivals_.push_back(std::make_unique<Rival>(common_, counts)); }
  void add(const std::string& name, const Options& options, const std::vector<std::size_t>& counts, bool in_arena = false,
           hvd::Compression wire = {}) {
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
    for (std::uint64_t bytes = options.min_bytes; bytes <= options.max_bytes; bytes *= options.factor)
      for (const auto& row : Cell(options, collective, bytes).measure()) {
        report.add(row);
        wrong += row.wrong.value_or(0);
      }
  report.end();
  return wrong;
}

}  // namespace bench
