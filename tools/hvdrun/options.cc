#include "tools/hvdrun/options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <optional>

namespace hvdrun {

namespace {

/// An option that is a knob of the library.
struct Knob {
  const char* option;
  const char* variable;
  const char* words;
  bool is_flag = false;
};
constexpr Knob kKnobs[]{
    {"--timeline-filename", "HVD_TIMELINE", "File that all ranks write their timeline to"},
    {"--timeline-mark-cycles", "HVD_TIMELINE_MARK_CYCLES", "With an event where each batch is cut",
     true},
    {"--fusion-threshold-mb", "HVD_FUSION_THRESHOLD",
     "MiB that tensors may fill together in one batch"},
    {"--cycle-time-ms", "HVD_CYCLE_TIME", "Read and without effect, as HVD_CYCLE_TIME"},
    {"--cache-capacity", "HVD_CACHE_CAPACITY", "Tensors known at once"},
    {"--hierarchical-allreduce", "HVD_HIERARCHICAL_ALLREDUCE",
     "NCCL's sums are made on each host first", true},
    {"--num-nccl-streams", "HVD_NUM_NCCL_STREAMS",
     "Streams that batches of GPU tensors go to in turn"},
    {"--no-stall-check", "HVD_STALL_CHECK_DISABLE", "Stalled tensors are not reported", true},
    {"--stall-check-warning-time-seconds", "HVD_STALL_CHECK_TIME_SECONDS",
     "When a stalled tensor is reported"},
    {"--stall-check-shutdown-time-seconds", "HVD_STALL_SHUTDOWN_TIME_SECONDS",
     "When a stalled tensor ends the job; 0: never"},
    {"--thread-affinity", "HVD_THREAD_AFFINITY",
     "Cores of the coordination threads, by local rank, with commas"},
    {"--log-level", "HVD_LOG_LEVEL", "trace, debug, info, warning, error, fatal or off"},
    {"--start-timeout", "HVD_START_TIMEOUT", "Seconds in which all ranks must have come"},
};

/// MiB as bytes; what is no number is left to the library, which says so.
std::string in_bytes(const std::string& mib) {
  char* end = nullptr;
  const double number = std::strtod(mib.c_str(), &end);
  if (mib.empty() || *end != '\0' || !(number >= 0 && number < 1e9)) return mib;
  return std::to_string(static_cast<std::uint64_t>(number * 1048576));
}

void take_exports(Options& options, const std::vector<std::string>& said) {
  for (const auto& one : said) {
    const auto equals = one.find('=');
    const std::string name = one.substr(0, equals);
    if (name.empty()) throw WrongOptions(fmt::format("-x {}: must be NAME or NAME=VALUE", one));
    options.exports.push_back(name);
    if (equals != std::string::npos) options.variables.emplace_back(name, one.substr(equals + 1));
  }
}

/// -np is no option as CLI11 knows them. Only the first: another one is the program's. So may that
/// be; the program gets its words as they are.
std::vector<std::string> words_of(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  const auto np = std::find(words.begin(), words.end(), "-np");
  if (np != words.end()) *np = "--np";
  std::reverse(words.begin(), words.end());  // as CLI11 takes them
  return words;
}

/// The knobs that are options, as the command line sets them.
class KnobOptions {
 public:
  explicit KnobOptions(CLI::App& app) {
    for (std::size_t i = 0; i < std::size(kKnobs); ++i) {
      const std::string words = fmt::format("{} ({})", kKnobs[i].words, kKnobs[i].variable);
      if (kKnobs[i].is_flag) {
        app.add_flag_function(
            kKnobs[i].option, [this, i](std::int64_t) { values_[i] = "1"; }, words);
      } else {
        app.add_option(kKnobs[i].option, values_[i], words);
      }
    }
  }
  KnobOptions(const KnobOptions&) = delete;
  KnobOptions& operator=(const KnobOptions&) = delete;

  void give(Options& options) const {
    for (std::size_t i = 0; i < std::size(kKnobs); ++i) {
      const std::string variable = kKnobs[i].variable;
      if (values_[i])
        options.variables.emplace_back(
            variable, variable == "HVD_FUSION_THRESHOLD" ? in_bytes(*values_[i]) : *values_[i]);
    }
  }

 private:
  std::array<std::optional<std::string>, std::size(kKnobs)> values_;
};

void add_options(CLI::App& app, Options& options, std::vector<std::string>& exports) {
  app.add_option(
         "-n,--np,--num-proc", options.ranks,
         "Ranks; also -np. Default: one for each slot of -H, --hostfile or Slurm's allocation")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("-H,--hosts", options.hosts,
                 "Hosts and their slots, with commas: first:4,second:4");
  app.add_option("--hostfile", options.hostfile, "A file with a line for each host: first slots=4");
  app.add_option("-x", exports,
                 "NAME or NAME=VALUE: a variable for the ranks; HVD_* go there anyway")
      ->allow_extra_args(false);
  app.add_option("--output-filename", options.output_folder,
                 "Folder that gets each rank's output as well: rank.N/stdout and rank.N/stderr");
  app.add_flag_function(
      "--no-prefix", [&options](std::int64_t) { options.prefixes = false; },
      "Ranks write where hvdrun does, without [RANK]<stdout>: before each line");
  app.add_option(
         "--time-to-end", options.time_to_end,
         "Seconds that ranks have to end after SIGTERM, before they are killed; default: 5, "
         "by mpirun 1")
      ->check(CLI::Range(0, 1 << 20));
  app.add_flag("--mpi", options.by_mpirun, "By mpirun on one host too");
  app.add_option("--mpi-args", options.mpi_arguments,
                 "More arguments for mpirun, which starts the ranks then");
  app.add_option("-p,--ssh-port", options.ssh_port,
                 "Port of the hosts' ssh servers, by which mpirun reaches them")
      ->check(CLI::Range(1, 65535));
  app.add_option("-i,--ssh-identity-file", options.ssh_identity,
                 "File with the key that the hosts know");
  app.add_option("--network-interfaces,--nics", options.interfaces,
                 "Interfaces that the hosts share, with commas: eth1,eth2");
  app.add_flag("--dry-run", options.dry_run, "Print what would be started");
  app.add_flag("--check-build", options.check_build, "Print what hvd was built with");
  app.add_flag("--verbose", options.verbose, "Say what is started");
}

}  // namespace

Options parse_command_line(int argc, char** argv) {
  CLI::App app(
      "Starts the ranks of a program: on this host by itself, without MPI, on several hosts by "
      "mpirun. Everything behind the program's name is the program's. Its exit code is that of the "
      "rank that failed first.",
      "hvdrun");
  app.get_formatter()->column_width(42);
  app.footer("For example: hvdrun -np 4 ./train --model resnet18");
  app.prefix_command();
  Options options;
  std::vector<std::string> exports;
  add_options(app, options, exports);
  const KnobOptions knobs(app);
  try {
    app.parse(words_of(argc, argv));
  } catch (const CLI::CallForHelp&) {
    options.help = app.help();
    return options;
  } catch (const CLI::ParseError& error) {
    throw WrongOptions(error.what());
  }
  // An unknown option comes first there, with more options between it and the program.
  const auto rest = app.remaining();
  if (!rest.empty() && rest.front().starts_with('-') && rest.front() != "--")
    throw WrongOptions(fmt::format("{}: no such option; hvdrun --help lists them", rest.front()));
  options.command.assign(argv + argc - static_cast<std::ptrdiff_t>(rest.size()), argv + argc);
  if (!options.command.empty() && options.command.front() == "--")
    options.command.erase(options.command.begin());
  if (!options.mpi_arguments.empty()) options.by_mpirun = true;
  knobs.give(options);
  if (!options.interfaces.empty()) {
    options.variables.emplace_back("UCX_NET_DEVICES", options.interfaces);
    // without the = NCCL would take eth1 for the beginning of a name
    options.variables.emplace_back("NCCL_SOCKET_IFNAME", "=" + options.interfaces);
  }
  take_exports(options, exports);
  if (options.command.empty() && !options.check_build)
    throw WrongOptions("no program is named; hvdrun -np RANKS PROGRAM [arguments]");
  return options;
}

}  // namespace hvdrun
