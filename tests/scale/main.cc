// This is hvd_scale_sim [options]; --help lists them. Exit codes: 0 done, 1 failed, 2 wrong
// options.
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <vector>

#include "tests/scale/options.h"
#include "tests/scale/report.h"
#include "tests/scale/simulation.h"

namespace scale {
namespace {

/// A table remembers one word per rank and tensor; where that is too much for one per host, some
/// are shared.
int affordable_tables(const World& world, const Program& program) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{32} << 20;
  constexpr int kShared = 4;
  const auto words = static_cast<std::uint64_t>(world.ranks) *
                     static_cast<std::uint64_t>(world.hosts()) * (program.units.size() + 2);
  return words * sizeof(hvd::SharedSignature) <= kMostBytes ? world.hosts() : kShared;
}

Row simulate(const Options& options, int ranks) {
  World world = options.world;
  world.ranks = ranks;
  if (world.tables == 0) world.tables = affordable_tables(world, options.program);
  Simulation simulation(world, options.program);
  Row row{ranks, world.hosts(), std::min(world.tables, world.hosts()), {}, {}};
  row.first = summary_of({simulation.step()});
  std::vector<StepResult> steady;
  for (int step = 1; step < options.steps; ++step) steady.push_back(simulation.step());
  row.steady = summary_of(steady);
  return row;
}

void introduce(const Options& options) {
  std::size_t tensors = 0;
  for (const auto& unit : options.program.units) tensors += unit.signature->tensors.size();
  const World& world = options.world;
  fmt::print("{}: {} gradients in {} groups{}; {} ranks per host; seed {}\n", options.model,
             tensors, options.program.units.size(),
             options.program.one_by_one ? ", one after the other" : "", world.ranks_per_host,
             world.seed);
  fmt::print(
      "model: {} us delay + {} us jitter (mean), {} Gbit/s, {}, ranks up to {} us (mean) late; "
      "batches take no time\n",
      microseconds(world.network.delay), microseconds(world.network.jitter),
      world.network.gigabits_per_second,
      world.charge_measured
          ? "leaders busy as long as the code takes here"
          : fmt::format("leaders busy {} us per message", microseconds(world.per_message)),
      microseconds(world.skew));
}

int main(int argc, char** argv) {
  try {
    const Options options = parse_command_line(argc, argv);
    if (!options.help.empty()) {
      std::fputs(options.help.c_str(), stdout);
      return 0;
    }
    introduce(options);
    std::vector<Row> rows;
    for (const int ranks : options.ranks) {
      rows.push_back(simulate(options, ranks));
      const Row& row = rows.back();
      std::fprintf(stderr, "%d ranks: first step %.0f us, steady %.1f us\n", ranks,
                   row.first.time_us, row.steady.time_us);
    }
    print(rows);
    return 0;
  } catch (const WrongOptions& wrong) {
    std::fprintf(stderr, "hvd_scale_sim: %s\n", wrong.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hvd_scale_sim: %s\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace scale

int main(int argc, char** argv) { return scale::main(argc, argv); }
