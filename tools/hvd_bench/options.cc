#include "tools/hvd_bench/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>

#include "hvd/topology.h"
#include "tools/hvd_bench/models.h"
#include "tools/hvd_bench/rivals.h"

namespace bench {

namespace {

template <class T>
using Choices = std::map<std::string, T>;

const Choices<Collective> kCollectives{
    {"allreduce", Collective::Allreduce},         {"broadcast", Collective::Broadcast},
    {"allgather", Collective::Allgather},         {"alltoall", Collective::Alltoall},
    {"reducescatter", Collective::Reducescatter}, {"barrier", Collective::Barrier}};
const Choices<Backend> kBackends{
    {"auto", Backend::Auto}, {"shm", Backend::Shm}, {"mpi", Backend::Mpi}};
const Choices<hvd::Compression> kWires{{"none", hvd::Compression::none()},
                                       {"fp16", hvd::Compression::fp16()},
                                       {"bf16", hvd::Compression::bf16()}};
const Choices<hvd::ReduceOp> kOps{
    {"sum", hvd::ReduceOp::Sum},         {"average", hvd::ReduceOp::Average},
    {"min", hvd::ReduceOp::Min},         {"max", hvd::ReduceOp::Max},
    {"product", hvd::ReduceOp::Product}, {"adasum", hvd::ReduceOp::Adasum},
    {"bitand", hvd::ReduceOp::BitAnd},   {"bitor", hvd::ReduceOp::BitOr},
    {"bitxor", hvd::ReduceOp::BitXor}};

Choices<hvd::DataType> dtypes() {
  Choices<hvd::DataType> choices;
  for (int number = 0; number < hvd::kDataTypes; ++number) {
    const auto dtype = static_cast<hvd::DataType>(number);
    choices.emplace(hvd::name_of(dtype), dtype);
  }
  choices.insert({{"half", hvd::DataType::Float16},  // as nccl-tests calls them
                  {"float", hvd::DataType::Float32},
                  {"double", hvd::DataType::Float64}});
  return choices;
}

template <class T>
T choose(const Choices<T>& choices, const std::string& option, const std::string& said) {
  if (const auto found = choices.find(said); found != choices.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& choice : choices) names.push_back(choice.first);
  throw WrongOptions(
      fmt::format("{} '{}': must be one of {}", option, said, fmt::join(names, ", ")));
}

template <class T>
std::string said_by(const Choices<T>& choices, T value) {
  for (const auto& [name, choice] : choices)
    if (choice == value) return name;
  return "?";
}

/// "4", "64K", "64KiB", "1G": a power of 1024 either way.
std::uint64_t bytes_of(const std::string& option, const std::string& said) {
  std::string text = said;
  std::uint64_t bytes = 0;
  try {
    CLI::AsSizeValue(false)(text);
    if (!text.empty() && text.find_first_not_of("0123456789") == std::string::npos)
      bytes = std::stoull(text);
  } catch (const std::exception&) {
    bytes = 0;
  }
  if (bytes == 0 || bytes > std::uint64_t{1} << 40)
    throw WrongOptions(fmt::format(
        "{} '{}': must be a number of bytes from 1 to 1T, such as 4, 64K, 64MiB", option, said));
  return bytes;
}

std::vector<bool> rows(const std::string& option, const std::vector<std::string>& said,
                       const std::string& no, const std::string& yes) {
  std::vector<bool> result;
  for (const auto& word : said) {
    if (word != no && word != yes)
      throw WrongOptions(
          fmt::format("{} '{}': must be {}, {} or both with a comma", option, word, no, yes));
    result.push_back(word == yes);
  }
  return result;
}

std::string names_of_models() { return fmt::format("{}", fmt::join(model_names(), ", ")); }

/// What the library refuses anyway, in the words of the options.
void check_reduction(const Options& options) {
  const auto op = options.op;
  const bool orders = op == hvd::ReduceOp::Min || op == hvd::ReduceOp::Max;
  const bool adds = op == hvd::ReduceOp::Sum || op == hvd::ReduceOp::Average;
  const bool is_bits = hvd::is_bitwise(op);
  const bool is_bool = options.dtype == hvd::DataType::Bool;
  const auto refuse = [&](const char* allowed) {
    throw WrongOptions(fmt::format("--op {}: {}s of {} take {} only", said_by(kOps, op),
                                   name_of(options.collective), hvd::name_of(options.dtype),
                                   allowed));
  };
  if (is_bool && !orders && !is_bits) refuse("min, max, bitand, bitor and bitxor");
  if (hvd::is_complex(options.dtype) && !adds) refuse("sum and average");
  if (op == hvd::ReduceOp::Adasum && hvd::is_integer(options.dtype))
    refuse("sum, average, min, max, product and those of bits");
  if (is_bits && !is_bool && !hvd::is_integer(options.dtype))
    refuse("sum, average, min, max, product and adasum");
}

void check(const Options& options) {
  if (options.max_bytes < options.min_bytes)
    throw WrongOptions(fmt::format("--max-bytes {} is below --min-bytes {}", options.max_bytes,
                                   options.min_bytes));
  if (!options.model.empty() && options.collective != Collective::Allreduce)
    throw WrongOptions("--model goes with --collective allreduce only: gradients are reduced");
  if (reduces(options.collective)) check_reduction(options);
  const bool scatters = options.collective == Collective::Reducescatter;
  if (scatters && options.op != hvd::ReduceOp::Sum && options.op != hvd::ReduceOp::Average)
    throw WrongOptions("--op: reducescatter knows sum and average only");
  if (options.into && !is_shared_out(options.collective) && !options.sweep)
    throw WrongOptions(
        "--into goes with --collective allgather, alltoall and reducescatter only: the others "
        "always do");
  if (options.persistent &&
      (options.async || options.grouped || options.collective == Collective::Barrier))
    throw WrongOptions("--persistent goes without --async, --grouped and --collective barrier");
  if (options.persistent && is_shared_out(options.collective) && !options.into)
    throw WrongOptions(
        "--persistent: --collective allgather, alltoall and reducescatter need --into, as "
        "persistent operations do");
  if (options.grouped && options.collective != Collective::Allreduce)
    throw WrongOptions("--grouped goes with --collective allreduce only");
  for (const auto wire : options.wires) {
    if (wire == hvd::Compression::none()) continue;
    if (options.collective != Collective::Allreduce ||
        wire.wire_type(options.dtype) == options.dtype)
      throw WrongOptions(fmt::format(
          "--wire {}: goes with --collective allreduce of float32 or float64 only", name_of(wire)));
  }
  if (options.on_gpu) {
    if (options.collective != Collective::Allreduce && options.collective != Collective::Broadcast)
      throw WrongOptions("--device cuda: goes with --collective allreduce and broadcast only");
    if (options.wires != std::vector{hvd::Compression::none()})
      throw WrongOptions("--device cuda: goes with --wire none only");
    if (options.versus_mpi || options.versus_packed || options.versus_line)
      throw WrongOptions("--device cuda: goes with --versus memcpy only");
  }
  if (options.versus_packed && options.model.empty())
    throw WrongOptions("--versus packed goes with --model: one tensor needs no packing");
  if ((options.versus_mpi || options.versus_packed) && !mpi_type(options.dtype))
    throw WrongOptions(
        fmt::format("--versus mpi: MPI has no type for {}", hvd::name_of(options.dtype)));
}

}  // namespace

std::vector<std::uint64_t> sizes_of(const Options& options) {
  std::vector<std::uint64_t> sizes{options.min_bytes};
  while (sizes.back() <= options.max_bytes / options.factor)
    sizes.push_back(sizes.back() * options.factor);
  return sizes;
}

std::string name_of(Collective collective) { return said_by(kCollectives, collective); }
std::string name_of(Backend backend) { return said_by(kBackends, backend); }
std::string name_of(hvd::Compression wire) {
  if (wire == hvd::Compression::fp16()) return "fp16";
  return wire == hvd::Compression::bf16() ? "bf16" : "none";
}

namespace {

/// What is said in words, before it is looked up.
struct Words {
  std::string collective = "allreduce", min_bytes = "4", max_bytes = "64M", op = "sum",
              dtype = "float32", backend = "auto", device = "cpu", model;
  std::vector<std::string> memory{"ordinary"}, place{"in"}, wire{"none"}, versus;
};

void add_options(CLI::App& app, Options& options, Words& words) {
  app.add_option("--collective", words.collective,
                 "allreduce, broadcast, allgather, alltoall, reducescatter or barrier");
  app.add_option("-b,--min-bytes", words.min_bytes, "Smallest size; suffixes K, M, G (default 4)");
  app.add_option("-e,--max-bytes", words.max_bytes, "Largest size (default 64M)");
  app.add_option("-f,--factor", options.factor, "From one size to the next (default 4)")
      ->check(CLI::Range(2, 1 << 30));
  app.add_option("-o,--op", words.op, "sum, average, min, max, product or adasum (default sum)");
  app.add_option("-d,--dtype", words.dtype,
                 "float32 (default), float64, float16, bfloat16, uint8, int8, int16, int32, int64, "
                 "bool, complex64 or complex128");
  app.add_option("--memory", words.memory,
                 "ordinary, arena or both: whose memory the tensors are in")
      ->delimiter(',');
  app.add_option("--device", words.device,
                 "cpu (default) or cuda: where the tensors are; an arena on a GPU is memory that "
                 "hvd has lent");
  app.add_option("--place", words.place,
                 "in, out or both: whether the result overwrites the input (default in)")
      ->delimiter(',');
  app.add_option(
         "--wire", words.wire,
         "none, fp16, bf16 or several: how fp32 and fp64 travel, copies included (default none)")
      ->delimiter(',');
  app.add_flag("--grouped", options.grouped,
               "Submit an allreduce as a group; all gradients of a model are one");
  app.add_flag("--into", options.into,
               "Allgather, alltoall and reducescatter write into memory that exists, as MPI's do");
  app.add_flag("--persistent", options.persistent,
               "Beside each row one that starts persistent operations (place: again)");
  app.add_flag("--sweep", options.sweep,
               "All collectives from --min-bytes to --max-bytes by --factor (16) against MPI: a "
               "table of ratios, and how many are won");
  app.add_option("--burst", options.burst,
                 "So many allreduces of --min-bytes (200) and --max-bytes (16K) at once and then "
                 "waited for, in one order and in another on each rank, beside a group, one after "
                 "the other, and with --versus mpi MPI_Iallreduce of each and MPI_Waitall")
      ->check(CLI::Range(1, 10'000));
  app.add_flag("--async", options.async, "Submit with the _async form and wait on the handle");
  app.add_option("-n,--iterations", options.rounds, "Measured rounds (default 11)")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("-w,--warmup", options.warmup, "Rounds before them that do not count (default 2)")
      ->check(CLI::Range(0, 1'000'000));
  app.add_option("--repeats", options.repeats,
                 "Operations in a row in one round (default 200 below 64 KiB, otherwise 1)")
      ->check(CLI::Range(1, 1'000'000));
  app.add_flag(
      "-c,--check", options.check,
      "Compare every result with one computed locally; wrong ones are counted and fail the run");
  app.add_option("--json", options.json, "Write the results to this file too")
      ->check([](const std::string& name) { return name.empty() ? "'' is no file" : ""; });
  app.add_option("--model", words.model,
                 fmt::format("Gradients of {} as a burst in backward order, instead of sizes",
                             names_of_models()));
  app.add_option("--backend", words.backend,
                 "auto; shm: fail where ranks of a host share no memory; mpi: shared memory off");
  app.add_option("--versus", words.versus,
                 "mpi, memcpy, line (plain messages of as many bytes as have to leave each host), "
                 "packed (with --model: one MPI_Allreduce of all gradients and the copies) or "
                 "several: measure them in the same rounds")
      ->delimiter(',');
  app.add_flag("--routes", options.routes,
               "Only print which way each collective takes at each size, and why (docs/routes.md); "
               "--op, --dtype and --memory count");
  app.add_option("--ranks", options.ranks,
                 "With --routes: of so many ranks, which are not started (default: those that are, "
                 "or one per core)")
      ->check(CLI::Range(1, 65536));
  app.add_option("--hosts", options.hosts, "With --routes: on so many hosts (default 1)")
      ->check(CLI::Range(1, 65536));
  app.add_option("--cores", options.cores,
                 "With --routes: of so many cores each (default: this one's)")
      ->check(CLI::Range(1, 65536));
  app.add_option("--idle", options.idle_seconds,
                 "Only initialize, sleep so many seconds, and print the processor time that took")
      ->check(CLI::Range(0.1, 1e6));
}

/// Looks up what the words mean.
void look_up(const Words& words, Options& options) {
  options.collective = choose(kCollectives, "--collective", words.collective);
  options.min_bytes = bytes_of("--min-bytes", words.min_bytes);
  options.max_bytes = bytes_of("--max-bytes", words.max_bytes);
  options.op = choose(kOps, "--op", words.op);
  options.dtype = choose(dtypes(), "--dtype", words.dtype);
  options.backend = choose(kBackends, "--backend", words.backend);
  options.on_gpu = choose(Choices<bool>{{"cpu", false}, {"cuda", true}}, "--device", words.device);
  if (!words.model.empty()) {
    Choices<std::string> models;
    for (const auto& name : model_names()) models.emplace(name, name);
    options.model = choose(models, "--model", words.model);
  }
  options.in_arena = rows("--memory", words.memory, "ordinary", "arena");
  options.in_place = rows("--place", words.place, "out", "in");
  for (const auto& word : words.versus) {
    const Choices<bool*> rivals{{"mpi", &options.versus_mpi},
                                {"packed", &options.versus_packed},
                                {"memcpy", &options.versus_memcpy},
                                {"line", &options.versus_line}};
    *choose(rivals, "--versus", word) = true;
  }
  options.wires.clear();
  for (const auto& word : words.wire) options.wires.push_back(choose(kWires, "--wire", word));
}

}  // namespace

CommandLine parse_command_line(int argc, char** argv) {
  CLI::App app(
      "Microbenchmark of hvd in the columns of nccl-tests. All subjects (rows of one size, "
      "--versus) are measured in turn, round by round, "
      "in one run; a time is the median over the rounds, of the slowest rank.",
      "hvd_bench");
  app.get_formatter()->column_width(34);
  CommandLine line;
  Options& options = line.options;
  Words words;
  add_options(app, options, words);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    line.help = app.help();
    return line;
  } catch (const CLI::ParseError& error) {
    throw WrongOptions(fmt::format("{}; --help lists the options", error.what()));
  }
  look_up(words, options);
  if (!options.routes && app.count("--ranks") + app.count("--hosts") + app.count("--cores") > 0)
    throw WrongOptions(
        "--ranks, --hosts and --cores go with --routes only: ranks are started by mpirun or "
        "hvdrun");
  if (options.ranks == 0)
    options.ranks =
        hvd::launcher_hints().size.value_or(static_cast<int>(hvd::detail::usable_cores()));
  if (options.routes && options.hosts > options.ranks)
    throw WrongOptions(
        fmt::format("--hosts {}: more than --ranks {}", options.hosts, options.ranks));
  if (options.sweep) {
    if (app.count("--factor") == 0) options.factor = 16;
    options.versus_mpi = true;
    if (app.count("--collective") + app.count("--model") + app.count("--device") +
            app.count("--versus") >
        0)
      throw WrongOptions(
          "--sweep measures all collectives of host tensors against MPI; it goes without "
          "--collective, --model, --device and --versus");
  }
  if (options.burst > 0) {
    if (app.count("--min-bytes") == 0) options.min_bytes = 200;
    if (app.count("--max-bytes") == 0)
      options.max_bytes = std::max<std::uint64_t>(options.min_bytes, 16 << 10);
    if (app.count("--factor") == 0)
      options.factor = std::max<std::uint64_t>(2, options.max_bytes / options.min_bytes + 1);
    if (options.on_gpu || options.sweep || app.count("--collective") + app.count("--model") > 0)
      throw WrongOptions(
          "--burst measures allreduces of host tensors; it goes without --collective, --model, "
          "--device and --sweep");
    if (options.versus_packed || options.versus_memcpy || options.versus_line)
      throw WrongOptions("--burst goes with --versus mpi only");
  }
  // What these have no choice in.
  if (options.collective == Collective::Broadcast) options.in_place = {true};
  if (is_shared_out(options.collective) || options.collective == Collective::Barrier)
    options.in_place = {false};
  if (options.collective == Collective::Barrier) options.max_bytes = options.min_bytes;
  check(options);
  return line;
}

}  // namespace bench
