#include "tools/hvdrun/hosts.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string_view>

#include "tools/hvdrun/options.h"

namespace hvdrun {

namespace {

/// Splits at the commas that stand in no brackets.
std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (const char letter : list) {
    depth += letter == '[' ? 1 : letter == ']' ? -1 : 0;
    if (letter == ',' && depth == 0) {
      parts.emplace_back();
    } else {
      parts.back() += letter;
    }
  }
  return parts;
}

int node_number(const std::string& text) {
  char* end = nullptr;
  const long number = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || number < 0 || number > 1 << 20)
    throw WrongOptions(fmt::format("SLURM_JOB_NODELIST: '{}' is no number of a node", text));
  return static_cast<int>(number);
}

/// "node[08-10,12]x" as node08x, node09x, node10x, node12x; several brackets one after the other.
std::vector<std::string> expand(const std::string& text) {
  const auto open = text.find('[');
  const auto close = text.find(']', open);
  if (open == std::string::npos || close == std::string::npos) return {text};
  std::vector<std::string> names;
  for (const auto& range : split(text.substr(open + 1, close - open - 1))) {
    const auto dash = range.find('-');
    const std::string first = range.substr(0, dash);
    const std::string last = dash == std::string::npos ? first : range.substr(dash + 1);
    for (int number = node_number(first); number <= node_number(last); ++number)
      for (const auto& rest : expand(text.substr(close + 1)))
        names.push_back(fmt::format("{}{:0{}}{}", text.substr(0, open), number, first.size(), rest));
  }
  return names;
}

}  // namespace

int slots_of(const std::string& text, const std::string& where) {
  char* end = nullptr;
  const long number = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || number < 1 || number > 1 << 20)
    throw WrongOptions(fmt::format("{}: '{}' is no number of slots", where, text));
  return static_cast<int>(number);
}

std::vector<Host> read_hosts(const std::string& list) {
  std::vector<Host> hosts;
  std::istringstream in(list);
  for (std::string one; std::getline(in, one, ',');) {
    const bool is_bracketed = one.starts_with('[') && one.find(']') != std::string::npos;
    const auto colon = one.find(':', is_bracketed ? one.find(']') : 0);
    const std::string name = is_bracketed ? one.substr(1, one.find(']') - 1) : one.substr(0, colon);
    if (name.empty()) throw WrongOptions(fmt::format("-H {}: a host has no name", list));
    hosts.push_back({name, colon == std::string::npos ? 1 : slots_of(one.substr(colon + 1), "-H " + list)});
  }
  return hosts;
}

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

std::vector<Host> read_slurm(const std::string& nodes, const std::string& tasks_per_node) {
  std::vector<Host> hosts;
  for (const auto& part : split(nodes))
    for (const auto& name : expand(part)) hosts.push_back({name, 1});
  std::vector<int> tasks;
  for (const auto& part : split(tasks_per_node)) {
    const auto times = part.find("(x");
    const int count = times == std::string::npos ? 1 : slots_of(part.substr(times + 2, part.size() - times - 3), "SLURM_TASKS_PER_NODE");
    tasks.insert(tasks.end(), static_cast<std::size_t>(count), slots_of(part.substr(0, times), "SLURM_TASKS_PER_NODE"));
  }
  if (tasks.size() != hosts.size())
    throw WrongOptions(fmt::format("SLURM_JOB_NODELIST={} names {} hosts, SLURM_TASKS_PER_NODE={} speaks of {}", nodes, hosts.size(),
                                   tasks_per_node, tasks.size()));
  for (std::size_t i = 0; i < hosts.size(); ++i) hosts[i].slots = tasks[i];
  return hosts;
}

std::vector<Host> merged(const std::vector<Host>& hosts) {
  std::vector<Host> all;
  for (const auto& host : hosts) {
    const auto same = std::find_if(all.begin(), all.end(), [&](const Host& other) {
      return other.name == host.name || (is_this_host(other.name) && is_this_host(host.name));
    });
    if (same == all.end()) {
      all.push_back(host);
    } else {
      same->slots += host.slots;
    }
  }
  return all;
}

bool is_this_host(const std::string& name) {
  std::array<char, 256> own{};
  ::gethostname(own.data(), own.size() - 1);
  const std::string_view all(own.data());
  return name == "localhost" || name == "127.0.0.1" || name == "::1" || name == all || name == all.substr(0, all.find('.'));
}

}  // namespace hvdrun
