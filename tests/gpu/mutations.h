#pragma once
/// Leaves out each wait, record, device guard and record_stream of hvd's code, one place after the
/// other, on virtual GPUs (tests/gpu/double): whoever counts on it must be found out. One thread.

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace hvd::gpu::test {

/// A job whose ranks, forked from this process, run the cases.
struct Scenario {
  std::string name;
  int ranks = 1;
  std::map<std::string, std::string> environment;
};

/// Runs the cases whole, then without the calls of one place after the other, in each scenario that
/// has made such calls until one fails; prints what is found. `cases` returns whether all is well,
/// and runs in a process of its own. `only`: places whose text has that, printed with what they
/// say; empty: all. Returns whether all are found.
bool finds_mutations(const std::vector<Scenario>& scenarios, const std::function<bool()>& cases,
                     const std::string& only);

}  // namespace hvd::gpu::test
