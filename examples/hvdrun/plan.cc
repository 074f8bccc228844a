#include "examples/hvdrun/plan.h"

#include <fmt/format.h>
#include <unistd.h>

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

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int slots_of(const std::string& text, const std::string& where) {
  char* end = nullptr;
  const long number = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || number < 1 || number > 1 << 20)
    throw WrongOptions(fmt::format("{}: '{}' is no number of slots", where, text));
  return static_cast<int>(number);
}

/// "first:4,second:4"
std::vector<Host> read_hosts(const std::string& list) {
  std::vector<Host> hosts;
  std::istringstream in(list);
  for (std::string one; std::getline(in, one, ',');) {
    const auto colon = one.find(':');
    if (one.empty() || colon == 0) throw WrongOptions(fmt::format("-H {}: a host has no name", list));
    hosts.push_back({one.substr(0, colon), colon == std::string::npos ? 1 : slots_of(one.substr(colon + 1), "-H " + list)});
  }
  return hosts;
}

/// Lines of "first slots=4"; # begins a remark.
std::vector<Host> read_hostfile(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw WrongOptions(fmt::format("--hostfile {}: cannot be read", path));
  std::vector<Host> hosts;
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line.substr(0, line.find('#')));
    Host host;
    if (!(words >> host.name)) continue;
    for (std::string word; words >> word;) {
      if (!word.starts_with("slots=")) throw WrongOptions(fmt::format("--hostfile {}: '{}' is not slots=NUMBER", path, word));
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
  return name == "localhost" || name == "127.0.0.1" || name == "::1" || name == all || name == all.substr(0, all.find('.'));
}

bool is_found(const std::string& program) {
  if (program.find('/') != std::string::npos) return ::access(program.c_str(), X_OK) == 0;
  std::istringstream folders(variable("PATH"));
  for (std::string folder; std::getline(folders, folder, ':');)
    if (::access((folder + '/' + program).c_str(), X_OK) == 0) return true;
  return false;
}

/// What the ranks of other hosts must have, too.
std::set<std::string> names_to_export(const Options& options) {
  std::set<std::string> names(options.exports.begin(), options.exports.end());
  for (const auto& [name, value] : options.variables) names.insert(name);
  for (char** one = environ; *one != nullptr; ++one) {
    const std::string name = std::string(*one).substr(0, std::string(*one).find('='));
    if ((name.starts_with("HVD_") && !name.starts_with("HVD_INIT")) || name.starts_with("HOROVOD_") || name == "PATH" ||
        name == "LD_LIBRARY_PATH")
      names.insert(name);
  }
  return names;
}

std::vector<std::string> mpirun(const Options& options, int ranks, bool is_one_host) {
  if (!is_found("mpirun")) throw WrongOptions("mpirun, which starts the ranks here, is not found in PATH");
  std::vector<std::string> words{"mpirun", "-np", std::to_string(ranks)};
  if (!options.hosts.empty()) words.insert(words.end(), {"-H", options.hosts});
  if (!options.hostfile.empty()) words.insert(words.end(), {"--hostfile", options.hostfile});
  if (is_one_host) words.emplace_back("--oversubscribe");
  words.insert(words.end(), {"--bind-to", "none", "--mca", "btl_vader_single_copy_mechanism", "none"});
  if (::geteuid() == 0) words.emplace_back("--allow-run-as-root");
  if (options.prefixes) words.emplace_back("--tag-output");
  if (!options.output_folder.empty()) words.insert(words.end(), {"--output-filename", options.output_folder});
  for (const auto& name : names_to_export(options)) words.insert(words.end(), {"-x", name});
  std::istringstream more(options.mpi_arguments);
  for (std::string word; more >> word;) words.push_back(word);
  return words;
}

}  // namespace

Plan make_plan(const Options& options) {
  if (!options.hosts.empty() && !options.hostfile.empty()) throw WrongOptions("-H and --hostfile: only one of them");
  std::vector<Host> hosts;
  if (!options.hosts.empty()) hosts = read_hosts(options.hosts);
  if (!options.hostfile.empty()) hosts = read_hostfile(options.hostfile);
  int slots = 0;
  for (const auto& host : hosts) slots += host.slots;
  const std::string tasks = variable("SLURM_NTASKS");
  const bool in_slurm = hosts.empty() && !variable("SLURM_JOB_ID").empty();
  if (in_slurm && !tasks.empty()) slots = slots_of(tasks, "SLURM_NTASKS");
  Plan plan;
  plan.ranks = options.ranks != 0 ? options.ranks : slots;
  if (plan.ranks == 0) throw WrongOptions("how many ranks? -np RANKS");
  const bool is_one_host =
      std::all_of(hosts.begin(), hosts.end(), [](const Host& host) { return is_this_host(host.name); }) &&
      !(in_slurm && slots_of(variable("SLURM_JOB_NUM_NODES").empty() ? "1" : variable("SLURM_JOB_NUM_NODES"), "Slurm") > 1);
  if (!hosts.empty() && plan.ranks > slots)
    throw WrongOptions(fmt::format("-np {}: there {} only {} slot{}; a host has as many as stand behind its name, or one", plan.ranks,
                                   slots == 1 ? "is" : "are", slots, slots == 1 ? "" : "s"));
  if (is_one_host && !is_found(options.command.front()))
    throw WrongOptions(fmt::format("{}: no such program{}", options.command.front(),
                                   options.command.front().find('/') == std::string::npos ? " in PATH; one in this folder is ./NAME" : ""));
  if (!is_one_host || options.uses_mpi || !options.mpi_arguments.empty() || variable("HVD_SHARED_MEMORY") == "off")
    plan.launcher = mpirun(options, plan.ranks, is_one_host);
  plan.variables = options.variables;
  plan.unset = {"HVD_INIT", "HVD_INIT_TOKEN"};
  // The numbers of a launcher that has started hvdrun are not those of the ranks that hvdrun starts.
  if (plan.launcher.empty())
    plan.unset.insert(plan.unset.end(), {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_ID", "PMI_RANK", "PMI_SIZE",
                                         "PMIX_RANK", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "FLUX_TASK_RANK", "FLUX_JOB_SIZE",
                                         "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "PALS_RANKID"});
  plan.command = options.command;
  return plan;
}

std::string quoted(const std::vector<std::string>& words) {
  std::string all;
  for (const auto& word : words) {
    if (!all.empty()) all += ' ';
    const bool is_plain =
        !word.empty() &&
        word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:=,+@%") == std::string::npos;
    if (is_plain) {
      all += word;
      continue;
    }
    all += '\'';
    for (const char letter : word) all += letter == '\'' ? std::string("'\\''") : std::string(1, letter);
    all += '\'';
  }
  return all;
}

std::vector<std::pair<std::string, std::string>> variables_of_rank(const Plan& plan, int rank) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(plan.ranks)},
          {"LOCAL_RANK", std::to_string(rank)},
          {"LOCAL_WORLD_SIZE", std::to_string(plan.ranks)}};
}

}  // namespace hvdrun
