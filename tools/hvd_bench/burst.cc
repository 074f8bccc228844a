#include "tools/hvd_bench/modes.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <vector>

#include "tools/hvd_bench/race.h"
#include "tools/hvd_bench/report.h"
#include "tools/hvd_bench/rivals.h"
#include "tools/hvd_bench/workload.h"

namespace bench {

namespace {

constexpr const char* kBurstColumns =
    "{:>11} {:>9} {:>9} {:>9} {:>9} {:>9} {:>12} {:>12} {:>10} {:>7} {:>6}";

/// N tensors of one size, each with a name of its own, and the ways of reducing them.
class Burst {
 public:
  Burst(const Options& options, std::size_t count, const std::string& way)
      : options_(options),
        counts_(static_cast<std::size_t>(options.burst), count),
        input_(counts_, options.dtype, {}),
        output_(counts_, options.dtype, {}),
        order_(counts_.size()),
        random_(static_cast<unsigned>(hvd::rank())) {
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      inputs_.push_back(input_.buffer(i));
      outputs_.push_back(output_.buffer(i));
      each_.push_back({.name = fmt::format("burst.{}.{}.{}", way, count, i), .op = options.op});
      fill(question(), hvd::rank(), i, input_[i]);
    }
    handles_.resize(counts_.size());
    std::iota(order_.begin(), order_.end(), std::size_t{0});
  }

  void run_async() {
    for (const auto i : order_)
      handles_[i] = hvd::allreduce_async(inputs_[i], outputs_[i], each_[i]);
    for (const auto& handle : handles_) handle.wait();
  }
  /// In another order each time and on each rank.
  void run_shuffled() {
    std::shuffle(order_.begin(), order_.end(), random_);
    run_async();
  }
  void run_grouped() { hvd::grouped_allreduce(inputs_, outputs_, each_[0]); }
  void run_one_by_one() {
    for (std::size_t i = 0; i < inputs_.size(); ++i)
      hvd::allreduce(inputs_[i], outputs_[i], each_[i]);
  }
  void run_mpi() { run_raw_burst(inputs_, outputs_, options_.op); }

  [[nodiscard]] std::size_t count_wrong() const {
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < counts_.size(); ++i)
      wrong += count_wrong_reduced(question(), i, output_[i]);
    return wrong;
  }

 private:
  [[nodiscard]] Question question() const { return {options_.dtype, options_.op, hvd::size()}; }

  const Options& options_;
  std::vector<std::size_t> counts_;
  Tensors input_, output_;
  std::vector<hvd::Buffer> inputs_, outputs_;
  std::vector<hvd::AllreduceOptions> each_;
  std::vector<hvd::Handle<void>> handles_;
  std::vector<std::size_t> order_;
  std::mt19937 random_;
};

struct BurstRow {
  std::uint64_t bytes = 0;
  double async = 0, shuffled = 0, group = 0, plain = 0,
         mpi = 0;    ///< microseconds for the whole burst
  double fused = 0;  ///< share of the tensors that shared their batch with another
  std::size_t wrong = 0;
};

BurstRow measure_burst(const Options& options, std::uint64_t bytes) {
  const auto count = std::max<std::size_t>(1, bytes / hvd::element_bytes(options.dtype));
  Burst async(options, count, "async"), shuffled(options, count, "shuffled"),
      group(options, count, "group"), plain(options, count, "plain"), mpi(options, count, "mpi");
  double bursts = 0;
  std::uint64_t fused = 0;
  const auto run_async = [&] {
    const auto before = hvd::stats().tensors_fused;
    async.run_async();
    fused += hvd::stats().tensors_fused - before;
    ++bursts;
  };
  std::vector<Runner> runners{{"async", run_async},
                              {"shuffled", [&] { shuffled.run_shuffled(); }},
                              {"group", [&] { group.run_grouped(); }},
                              {"plain", [&] { plain.run_one_by_one(); }}};
  if (options.versus_mpi) runners.push_back({"MPI", [&] { mpi.run_mpi(); }});
  const auto timings =
      race(runners, {options.warmup, options.rounds, options.repeats > 0 ? options.repeats : 5});
  BurstRow row{
      bytes, timings[0].median, timings[1].median, timings[2].median, timings[3].median, 0, 0, 0};
  if (options.versus_mpi) row.mpi = timings[4].median;
  row.fused = largest(static_cast<double>(fused) / bursts / options.burst);
  if (options.check)
    row.wrong = total(async.count_wrong() + shuffled.count_wrong() + group.count_wrong() +
                      plain.count_wrong());
  return row;
}

std::vector<std::uint64_t> sizes(const Options& options) {
  std::vector<std::uint64_t> all = sizes_of(options);
  if (all.back() < options.max_bytes) all.push_back(options.max_bytes);
  return all;
}

void print_burst(const Options& options, const BurstRow& row) {
  const auto time = [](double microseconds) {
    return microseconds > 0 ? fmt::format("{:.1f}", microseconds) : std::string("-");
  };
  const auto ratio = [](double one, double other) {
    return other > 0 ? fmt::format("{:.2f}", one / other) : std::string("-");
  };
  say(fmt::format(kBurstColumns, row.bytes, time(row.async), time(row.shuffled), time(row.group),
                  time(row.plain), time(row.mpi), ratio(row.async, row.group),
                  ratio(row.async, row.plain), ratio(row.async, row.mpi),
                  fmt::format("{:.0f} %", 100 * row.fused),
                  options.check ? fmt::format("{}", row.wrong) : "-"));
}

}  // namespace

std::size_t run_burst(const Options& options) {
  JsonFile file(options.json);
  nlohmann::ordered_json json{{"program", "hvd_bench"},
                              {"burst", options.burst},
                              {"ranks", hvd::size()},
                              {"rows", nlohmann::ordered_json::array()}};
  say(
      fmt::format("# {} allreduces at once, {} ranks, {} of {}; microseconds for all of them, "
                  "median over {} rounds",
                  options.burst, hvd::size(), hvd::name_of(options.op), hvd::name_of(options.dtype),
                  options.rounds));
  say(fmt::format(kBurstColumns, "# bytes each", "async", "shuffled", "group", "plain", "MPI",
                  "async/group", "async/plain", "async/MPI", "fused", "wrong"));
  std::size_t wrong = 0;
  for (const auto bytes : sizes(options)) {
    const BurstRow row = measure_burst(options, bytes);
    wrong += row.wrong;
    print_burst(options, row);
    json["rows"].push_back({{"bytes", row.bytes},
                            {"async_us", row.async},
                            {"shuffled_us", row.shuffled},
                            {"group_us", row.group},
                            {"plain_us", row.plain},
                            {"mpi_us", row.mpi},
                            {"fused", row.fused},
                            {"wrong", row.wrong}});
  }
  file.write(json);
  return wrong;
}

}  // namespace bench
