#include "tools/hvdrun/hosts.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string_view>

#include "tools/hvdrun/options.h"

namespace hvdrun {

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
    hosts.push_back(
        {name, colon == std::string::npos ? 1 : slots_of(one.substr(colon + 1), "-H " + list)});
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

}  // namespace hvdrun
