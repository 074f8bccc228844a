#include "tools/hvdrun/job.h"

#include <fmt/format.h>
#include <strings.h>
#include <unistd.h>
#include <wordexp.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>

namespace hvdrun {

namespace {

struct Host {
  std::string name;
  int slots = 1;
};

/// Returns the number in `text`; `where` is what it is said in.
int slots_of(const std::string& text, const std::string& where) {
  char* end = nullptr;
  const long number = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || number < 1 || number > 1 << 20)
    throw WrongOptions(fmt::format("{}: '{}' is no number of slots", where, text));
  return static_cast<int>(number);
}

/// Reads "first:4,second:4". An IPv6 address stands in brackets.
std::vector<Host> read_hosts(const std::string& list) {
  std::vector<Host> hosts;
  std::istringstream in(list);
  for (std::string one; std::getline(in, one, ',');) {
    const bool is_bracketed = one.starts_with('[') && one.find(']') != std::string::npos;
    const auto colon = one.find(':', is_bracketed ? one.find(']') : 0);
    const std::string name = is_bracketed ? one.substr(1, one.find(']') - 1) : one.substr(0, colon);
    if (name.empty()) throw WrongOptions(fmt::format("-H {}: a host has no name", list));
    hosts.push_back(
        {name, colon == std::string::npos ? 1 : slots_of(one.substr(colon + 1), "-H " + list)});
  }
  return hosts;
}

/// Reads lines of "first slots=4"; # begins a remark.
std::vector<Host> read_hostfile(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw WrongOptions(fmt::format("--hostfile {}: cannot be read", path));
  std::vector<Host> hosts;
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line.substr(0, line.find('#')));
    Host host;
    if (!(words >> host.name)) continue;
    for (std::string word; words >> word;) {
      if (!word.starts_with("slots="))
        throw WrongOptions(fmt::format("--hostfile {}: '{}' is not slots=NUMBER", path, word));
      host.slots = slots_of(word.substr(6), "--hostfile " + path);
    }
    hosts.push_back(host);
  }
  if (hosts.empty()) throw WrongOptions(fmt::format("--hostfile {}: no host in it", path));
  return hosts;
}

bool is_this_host(const std::string& name) {
  std::array<char, 256> own{};
  ::gethostname(own.data(), own.size() - 1);
  const std::string_view all(own.data());
  return name == "localhost" || name == "127.0.0.1" || name == "::1" || name == all ||
         name == all.substr(0, all.find('.'));
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Returns a variable as the ranks see it: as the options set it, else as this process has it.
std::string variable_of_ranks(const Options& options, const std::string& name) {
  const auto last = std::find_if(options.variables.rbegin(), options.variables.rend(),
                                 [&](const auto& one) { return one.first == name; });
  return last != options.variables.rend() ? last->second : variable(name.c_str());
}

/// Returns whether a program can be run: it is in a folder of the ranks' PATH, in which an empty
/// word is the working directory, or at that place.
bool is_found(const std::string& program, const Options& options) {
  if (program.find('/') != std::string::npos) return ::access(program.c_str(), X_OK) == 0;
  std::istringstream folders(variable_of_ranks(options, "PATH") + ':');
  for (std::string folder; std::getline(folders, folder, ':');)
    if (::access(((folder.empty() ? "." : folder) + '/' + program).c_str(), X_OK) == 0) return true;
  return false;
}

/// Returns whether the ranks will not share memory, which Config::from_environment() reads in this
/// way.
bool is_shared_memory_off(const Options& options) {
  std::string said = variable_of_ranks(options, "HVD_SHARED_MEMORY");
  if (said.empty()) said = variable_of_ranks(options, "HOROVOD_SHARED_MEMORY");
  return ::strcasecmp(said.c_str(), "off") == 0;
}

/// Throws WrongOptions where the program is not found.
void require_program(const Options& options) {
  const std::string& program = options.command.front();
  if (is_found(program, options)) return;
  const bool is_path = program.find('/') != std::string::npos;
  throw WrongOptions(fmt::format("{}: {}", program,
                                 !is_path ? "no such program in PATH; one in this folder is ./NAME"
                                 : ::access(program.c_str(), F_OK) == 0
                                     ? "cannot be run; chmod +x makes a file a program"
                                     : "no such program"));
}

/// Returns the names of the variables that the ranks of other hosts must have, too.
std::set<std::string> names_to_export(const Options& options) {
  std::set<std::string> names(options.exports.begin(), options.exports.end());
  for (const auto& [name, value] : options.variables) names.insert(name);
  for (char** one = environ; *one != nullptr; ++one) {
    const std::string name = std::string(*one).substr(0, std::string(*one).find('='));
    if ((name.starts_with("HVD_") && !name.starts_with("HVD_INIT")) ||
        name.starts_with("HOROVOD_") || name == "PATH" || name == "LD_LIBRARY_PATH")
      names.insert(name);
  }
  return names;
}

/// Returns the words of --mpi-args as a shell has them, with its quotes.
std::vector<std::string> words_of(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  wordexp_t found{};
  if (::wordexp(text.c_str(), &found, WRDE_NOCMD) != 0)
    throw WrongOptions(
        fmt::format("--mpi-args: a shell does not read '{}' as words; what is not to mean anything "
                    "to it must be in quotes",
                    text));
  std::vector<std::string> words(found.we_wordv, found.we_wordv + found.we_wordc);
  ::wordfree(&found);
  return words;
}

std::vector<std::string> mpirun(const Options& options, int ranks, bool is_one_host) {
  if (!is_found("mpirun", options))
    throw WrongOptions(fmt::format(
        "mpirun, which starts {}, is not found in PATH{}",
        is_one_host ? "the ranks here" : "ranks of other hosts",
        is_one_host
            ? ""
            : "; without MPI start them by srun, torchrun, pdsh or an indexed Job of Kubernetes"));
  std::vector<std::string> words{"mpirun", "-np", std::to_string(ranks)};
  if (!options.hosts.empty()) words.insert(words.end(), {"-H", options.hosts});
  if (!options.hostfile.empty()) words.insert(words.end(), {"--hostfile", options.hostfile});
  if (is_one_host) words.emplace_back("--oversubscribe");
  words.insert(words.end(),
               {"--bind-to", "none", "--mca", "btl_vader_single_copy_mechanism", "none"});
  if (!options.interfaces.empty())
    words.insert(words.end(), {"--mca", "btl_tcp_if_include", options.interfaces, "--mca",
                               "oob_tcp_if_include", options.interfaces});
  if (options.ssh_port != 0 || !options.ssh_identity.empty()) {
    std::string agent = "ssh";
    if (options.ssh_port != 0) agent += fmt::format(" -p {}", options.ssh_port);
    if (!options.ssh_identity.empty()) agent += " -i " + options.ssh_identity;
    words.insert(words.end(), {"--mca", "plm_rsh_agent", agent});
  }
  if (::geteuid() == 0) words.emplace_back("--allow-run-as-root");
  if (options.time_to_end)
    words.insert(words.end(),
                 {"--mca", "odls_base_sigkill_timeout", std::to_string(*options.time_to_end)});
  if (options.prefixes) words.emplace_back("--tag-output");
  if (!options.output_folder.empty())
    words.insert(words.end(), {"--output-filename", options.output_folder});
  for (const auto& name : names_to_export(options)) words.insert(words.end(), {"-x", name});
  const auto more = words_of(options.mpi_arguments);
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

/// Returns the hosts that are said; none where none are.
std::vector<Host> hosts_of(const Options& options) {
  if (!options.hosts.empty() && !options.hostfile.empty())
    throw WrongOptions("-H and --hostfile: only one of them");
  if (!options.hosts.empty()) return read_hosts(options.hosts);
  if (!options.hostfile.empty()) return read_hostfile(options.hostfile);
  return {};
}

/// The numbers of a launcher that has started hvdrun are not those of the ranks that hvdrun starts.
std::vector<std::string> numbers_of_others() {
  return {"OMPI_COMM_WORLD_RANK",
          "OMPI_COMM_WORLD_SIZE",
          "SLURM_STEP_ID",
          "PMI_RANK",
          "PMI_SIZE",
          "PMIX_RANK",
          "MV2_COMM_WORLD_RANK",
          "MV2_COMM_WORLD_SIZE",
          "FLUX_TASK_RANK",
          "FLUX_JOB_SIZE",
          "JSM_NAMESPACE_RANK",
          "JSM_NAMESPACE_SIZE",
          "HOROVOD_RANK",
          "HOROVOD_SIZE",
          "PALS_RANKID"};
}

}  // namespace

Plan make_plan(const Options& options) {
  const std::vector<Host> hosts = hosts_of(options);
  int slots = 0;
  for (const auto& host : hosts) slots += host.slots;
  const std::string tasks = variable("SLURM_NTASKS");
  const bool in_slurm = hosts.empty() && !variable("SLURM_JOB_ID").empty();
  const std::string nodes = in_slurm ? variable("SLURM_JOB_NUM_NODES") : "";
  if (in_slurm && !tasks.empty()) slots = slots_of(tasks, "SLURM_NTASKS");
  Plan plan;
  plan.ranks = options.ranks != 0 ? options.ranks : slots;
  if (plan.ranks == 0) throw WrongOptions("how many ranks? -np RANKS");
  const bool is_one_host = std::all_of(hosts.begin(), hosts.end(),
                                       [](const Host& host) { return is_this_host(host.name); }) &&
                           (nodes.empty() || slots_of(nodes, "Slurm") == 1);
  if (!hosts.empty() && plan.ranks > slots)
    throw WrongOptions(fmt::format(
        "-np {}: there {} only {} slot{}; a host has as many as stand behind its name, or one",
        plan.ranks, slots == 1 ? "is" : "are", slots, slots == 1 ? "" : "s"));
  if (is_one_host) require_program(options);
  plan.command = options.command;
  plan.variables = options.variables;
  plan.unset = {"HVD_INIT", "HVD_INIT_TOKEN"};
  if (options.by_mpirun || !is_one_host || is_shared_memory_off(options)) {
    plan.launcher = mpirun(options, plan.ranks, is_one_host);
  } else {
    const auto numbers = numbers_of_others();
    plan.unset.insert(plan.unset.end(), numbers.begin(), numbers.end());
  }
  return plan;
}

std::vector<std::pair<std::string, std::string>> variables_of_rank(int rank, int size) {
  const std::string number = std::to_string(rank), all = std::to_string(size);
  return {{"RANK", number}, {"WORLD_SIZE", all}, {"LOCAL_RANK", number}, {"LOCAL_WORLD_SIZE", all}};
}

}  // namespace hvdrun
