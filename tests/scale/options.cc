#include "tests/scale/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cmath>

#include "tools/hvd_bench/models.h"

namespace scale {

namespace {

Time time_of(double microseconds) { return Time(std::llround(microseconds * 1e3)); }

}  // namespace

Options parse_command_line(int argc, char** argv) {
  CLI::App app(
      "Simulates how worlds of many ranks agree on a network's gradients: the library's own "
      "negotiator, leader tree and planner, over a simulated network, in virtual time. Prints "
      "messages, bytes and the time of a step outside the reduction, by number of ranks.",
      "hvd_scale_sim");
  app.get_formatter()->column_width(34);
  Options options;
  World& world = options.world;
  double delay = microseconds(world.network.delay), jitter = microseconds(world.network.jitter);
  double message = microseconds(world.per_message), skew = microseconds(world.skew);
  double bucket_mib = 25;
  bool one_by_one = false;
  const auto not_negative = CLI::Range(0.0, 1e6);
  app.add_option("-r,--ranks", options.ranks,
                 "Sizes of the world, with commas (default 8 to 16384, doubling)")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--ranks-per-host", world.ranks_per_host,
                 "One of them speaks for its host (default 8)")
      ->check(CLI::Range(1, 1024));
  app.add_option("--model", options.model,
                 fmt::format("Whose gradients: {} (default resnet50)",
                             fmt::join(bench::model_names(), ", ")))
      ->check(CLI::IsMember(bench::model_names()));
  app.add_option(
         "--bucket-mib", bucket_mib,
         "Gradients are submitted in groups of at most so many MiB; 0: each alone (default 25)")
      ->check(not_negative);
  app.add_flag("--one-by-one", one_by_one,
               "Wait for each group before the next is submitted; otherwise all come at once");
  app.add_option("-n,--steps", options.steps,
                 "The first is the one that introduces all tensors (default 6)")
      ->check(CLI::Range(2, 100000));
  app.add_option("--delay-us", delay, "Of a message, one way (default 10)")->check(not_negative);
  app.add_option("--jitter-us", jitter, "Mean of what comes on top, exponential (default 2)")
      ->check(not_negative);
  app.add_option("--gbps", world.network.gigabits_per_second,
                 "Of each host's card, in Gbit/s (default 25)")
      ->check(CLI::Range(1e-3, 1e6));
  app.add_option("--message-us", message,
                 "That a leader is busy with each message it sends or receives (default 2)")
      ->check(not_negative);
  app.add_option("--skew-us", skew,
                 "Mean of how much later than the first a rank submits, exponential (default 50)")
      ->check(not_negative);
  app.add_flag("--measured", world.charge_measured,
               "A leader is busy for as long as the library's code takes here, instead of "
               "--message-us; needs an idle machine");
  app.add_option("--seed", world.seed, "Of delays and lateness (default 1)");
  app.add_option("--tables", world.tables,
                 "Negotiators that all hosts share (default: one each while memory allows, then 4)")
      ->check(CLI::Range(1, 1 << 16));
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    options.help = app.help();
    return options;
  } catch (const CLI::ParseError& error) {
    throw WrongOptions(fmt::format("{}; --help lists the options", error.what()));
  }
  world.network.delay = time_of(delay);
  world.network.jitter = time_of(jitter);
  world.per_message = time_of(message);
  world.skew = time_of(skew);
  options.program =
      gradients_of(options.model, static_cast<std::uint64_t>(std::llround(bucket_mib * (1 << 20))));
  options.program.one_by_one = one_by_one;
  return options;
}

}  // namespace scale
