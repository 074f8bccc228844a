#pragma once
/// This header reads which hosts there are, and how many ranks each may have: from -H, from a file, or from an allocation of Slurm's. Pure
/// functions but for the files and the host's name; any thread. They throw WrongOptions.

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
/// Reads what Slurm says of an allocation: "node[1-2,7],login" and "4(x2),2".
std::vector<Host> read_slurm(const std::string& nodes, const std::string& tasks_per_node);
/// Returns the hosts with those of one name put together, where the first of them stood; all names of this host are one.
std::vector<Host> merged(const std::vector<Host>& hosts);
/// Returns the number in `text`; `where` is what it is said in.
int slots_of(const std::string& text, const std::string& where);
bool is_this_host(const std::string& name);

}  // namespace hvdrun
