#pragma once
/// Reads which hosts there are, and how many ranks each may have, from -H or from a file. Any
/// thread. Throws WrongOptions.

#include <string>
#include <vector>

namespace hvdrun {

struct Host {
  std::string name;
  int slots = 1;
};

/// Reads "first:4,second:4". An IPv6 address stands in brackets.
std::vector<Host> read_hosts(const std::string& list);
/// Reads lines of "first slots=4"; # begins a remark.
std::vector<Host> read_hostfile(const std::string& path);
/// Returns the number in `text`; `where` is what it is said in.
int slots_of(const std::string& text, const std::string& where);
bool is_this_host(const std::string& name);

}  // namespace hvdrun
