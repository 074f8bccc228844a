#include "tools/hvdrun/plan.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>

#include "tools/hvdrun/hosts.h"

namespace hvdrun {

namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
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

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

std::vector<std::string> mpirun(const Options& options, int ranks, bool is_one_host) {
  if (!is_found("mpirun"))
    throw WrongOptions(
        "mpirun, which starts the ranks here, is not found in PATH; --launcher ssh starts those of several hosts without "
        "MPI");
  std::vector<std::string> words{"mpirun", "-np", std::to_string(ranks)};
  if (!options.hosts.empty()) words.insert(words.end(), {"-H", options.hosts});
  if (!options.hostfile.empty()) words.insert(words.end(), {"--hostfile", options.hostfile});
  if (is_one_host) words.emplace_back("--oversubscribe");
  words.insert(words.end(), {"--bind-to", "none", "--mca", "btl_vader_single_copy_mechanism", "none"});
  if (!options.interfaces.empty())
    words.insert(words.end(), {"--mca", "btl_tcp_if_include", options.interfaces, "--mca", "oob_tcp_if_include", options.interfaces});
  if (options.ssh_port != 0 || !options.ssh_identity.empty() || !options.ssh.empty()) {
    std::string agent = options.ssh.empty() ? "ssh" : options.ssh;
    if (options.ssh_port != 0) agent += fmt::format(" -p {}", options.ssh_port);
    if (!options.ssh_identity.empty()) agent += " -i " + options.ssh_identity;
    words.insert(words.end(), {"--mca", "plm_rsh_agent", agent});
  }
  if (::geteuid() == 0) words.emplace_back("--allow-run-as-root");
  if (options.prefixes) words.emplace_back("--tag-output");
  if (!options.output_folder.empty()) words.insert(words.end(), {"--output-filename", options.output_folder});
  for (const auto& name : names_to_export(options)) words.insert(words.end(), {"-x", name});
  const auto more = words_of(options.mpi_arguments);
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

std::vector<std::string> ssh(const Options& options) {
  std::vector<std::string> words = words_of(options.ssh);
  if (words.empty()) {
    // No questions; and a host that has lost its power is noticed after a minute.
    words = {"ssh", "-x", "-T", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=15", "-oServerAliveCountMax=4"};
    if (!is_found("ssh")) throw WrongOptions("ssh, which starts the ranks of other hosts, is not found in PATH");
  }
  if (options.ssh_port != 0) words.push_back(fmt::format("-p{}", options.ssh_port));
  if (!options.ssh_identity.empty()) words.push_back("-i" + options.ssh_identity);
  return words;
}

std::vector<HostRanks> spread(const std::vector<Host>& hosts, int ranks) {
  std::vector<HostRanks> all;
  int next = 0;
  for (const auto& host : merged(hosts)) {
    const int count = std::min(host.slots, ranks - next);
    if (count == 0) break;
    all.push_back({host.name, is_this_host(host.name), next, count});
    next += count;
  }
  return all;
}

void plan_for_ssh(Plan& plan, const Options& options, const std::vector<Host>& hosts) {
  plan.hosts = spread(hosts, plan.ranks);
  if (std::any_of(plan.hosts.begin(), plan.hosts.end(), [](const HostRanks& host) { return !host.is_this_host; })) plan.ssh = ssh(options);
  auto names = names_to_export(options);
  for (char** one = environ; *one != nullptr; ++one) {
    const std::string name = std::string(*one).substr(0, std::string(*one).find('='));
    if (name.starts_with("UCX_") || name.starts_with("NCCL_")) names.insert(name);
  }
  for (const auto& name : names)
    if (const char* const value = std::getenv(name.c_str()); value != nullptr) plan.exports.emplace_back(name, value);
  plan.folder = std::filesystem::current_path();
  // What the user's shell calls it, where that is the same: other hosts may know the link alone.
  std::error_code none;
  if (const std::string said = variable("PWD"); !said.empty() && std::filesystem::equivalent(said, plan.folder, none)) plan.folder = said;
  plan.master_address = options.master_address;
  plan.interfaces = options.interfaces;
}

/// Reads the hosts that are said, or those of Slurm's allocation; none where the job has this host alone.
std::vector<Host> hosts_of(const Options& options) {
  if (!options.hosts.empty() && !options.hostfile.empty()) throw WrongOptions("-H and --hostfile: only one of them");
  if (!options.hosts.empty()) return read_hosts(options.hosts);
  if (!options.hostfile.empty()) return read_hostfile(options.hostfile);
  return {};
}

/// The numbers of a launcher that has started hvdrun are not those of the ranks that hvdrun starts.
std::vector<std::string> numbers_of_others() {
  return {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_ID",  "PMI_RANK",      "PMI_SIZE",           "PMIX_RANK",
          "MV2_COMM_WORLD_RANK",  "MV2_COMM_WORLD_SIZE",  "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE",
          "PALS_RANKID"};
}

Launcher launcher_of(const Options& options, bool is_one_host) {
  const bool needs_mpi = options.launcher == Launcher::Mpirun || !options.mpi_arguments.empty();
  if (options.launcher == Launcher::Ssh && !options.mpi_arguments.empty()) throw WrongOptions("--launcher ssh has no use for --mpi-args");
  if (needs_mpi) return Launcher::Mpirun;
  if (options.launcher == Launcher::Ssh) return Launcher::Ssh;
  if (is_one_host && variable("HVD_SHARED_MEMORY") != "off") return Launcher::None;
  return is_one_host || is_found("mpirun") ? Launcher::Mpirun : Launcher::Ssh;
}

}  // namespace

Plan make_plan(const Options& options) {
  std::vector<Host> hosts = hosts_of(options);
  int slots = 0;
  for (const auto& host : hosts) slots += host.slots;
  const std::string tasks = variable("SLURM_NTASKS");
  const bool in_slurm = hosts.empty() && !variable("SLURM_JOB_ID").empty();
  const std::string nodes = in_slurm ? variable("SLURM_JOB_NUM_NODES") : "";
  if (in_slurm && !tasks.empty()) slots = slots_of(tasks, "SLURM_NTASKS");
  Plan plan;
  plan.ranks = options.ranks != 0 ? options.ranks : slots;
  if (plan.ranks == 0) throw WrongOptions("how many ranks? -np RANKS");
  const bool is_one_host = std::all_of(hosts.begin(), hosts.end(), [](const Host& host) { return is_this_host(host.name); }) &&
                           (nodes.empty() || slots_of(nodes, "Slurm") == 1);
  const Launcher launcher = launcher_of(options, is_one_host);
  if (launcher == Launcher::Ssh && hosts.empty()) {
    hosts = is_one_host ? std::vector<Host>{{"localhost", plan.ranks}}
                        : read_slurm(variable("SLURM_JOB_NODELIST"), variable("SLURM_TASKS_PER_NODE"));
    slots = 0;
    for (const auto& host : hosts) slots += host.slots;
  }
  if (!hosts.empty() && plan.ranks > slots)
    throw WrongOptions(fmt::format("-np {}: there {} only {} slot{}; a host has as many as stand behind its name, or one", plan.ranks,
                                   slots == 1 ? "is" : "are", slots, slots == 1 ? "" : "s"));
  if (is_one_host && !is_found(options.command.front())) throw WrongOptions(no_such_program(options.command.front()));
  plan.program.command = options.command;
  plan.program.variables = options.variables;
  plan.program.unset = {"HVD_INIT", "HVD_INIT_TOKEN"};
  if (launcher == Launcher::Mpirun) {
    plan.launcher = mpirun(options, plan.ranks, is_one_host);
    return plan;
  }
  if (launcher == Launcher::Ssh) plan_for_ssh(plan, options, hosts);
  const auto numbers = numbers_of_others();
  plan.program.unset.insert(plan.program.unset.end(), numbers.begin(), numbers.end());
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

bool is_found(const std::string& program) {
  if (program.find('/') != std::string::npos) return ::access(program.c_str(), X_OK) == 0;
  std::istringstream folders(variable("PATH"));
  for (std::string folder; std::getline(folders, folder, ':');)
    if (::access((folder + '/' + program).c_str(), X_OK) == 0) return true;
  return false;
}

std::string no_such_program(const std::string& program) {
  return fmt::format("{}: no such program{}", program,
                     program.find('/') == std::string::npos ? " in PATH; one in this folder is ./NAME" : "");
}

std::vector<std::pair<std::string, std::string>> variables_of_rank(int rank, int size, int local, int local_size) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(size)},
          {"LOCAL_RANK", std::to_string(local)},
          {"LOCAL_WORLD_SIZE", std::to_string(local_size)}};
}

}  // namespace hvdrun
