#include "hvd/base/threads.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>

#include "hvd/base/cores.h"
#include "hvd/base/log.h"
#include "hvd/base/text.h"

namespace hvd {

namespace {

cpu_set_t cores_of_this_thread() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  ::sched_getaffinity(0, sizeof cores, &cores);
  return cores;
}

/// More than the process's mask says where its launcher has bound it: asked for all cores, the
/// kernel gives those of the cpuset.
const cpu_set_t& cores_of_cpuset() {
  static const cpu_set_t found = [] {
    cpu_set_t usable;
    const SignalsKeptOff of_it;
    try {
      std::thread([&usable] {
        cpu_set_t all;
        std::memset(&all, 0xff, sizeof all);
        ::sched_setaffinity(0, sizeof all, &all);
        usable = cores_of_this_thread();
      }).join();
    } catch (const std::system_error&) {  // there can be none; init() finds so, too, and says it
      usable = cores_of_this_thread();
    }
    return usable;
  }();
  return found;
}

/// None are found where the machine has more than a set has room for.
unsigned number_of(const cpu_set_t& cores) {
  const int number = CPU_COUNT(&cores);
  return number > 0 ? static_cast<unsigned>(number)
                    : std::max(1U, std::thread::hardware_concurrency());
}

}  // namespace

unsigned detail::usable_cores() { return number_of(cores_of_cpuset()); }

unsigned detail::bound_cores() { return number_of(cores_of_this_thread()); }

std::string affinity_problem(const std::vector<int>& cores, int local_rank, int local_size) {
  if (cores.empty()) return {};
  const auto refusal = [&](const std::string& allowed) {
    return formatted("HVD_THREAD_AFFINITY: '{}' is not allowed; it must be {}", joined(cores, ","),
                     allowed);
  };
  if (cores.size() < static_cast<std::size_t>(local_size))
    return refusal(formatted("a core for each of the {} ranks of the host", local_size));
  const cpu_set_t& usable = cores_of_cpuset();
  const int core = cores[static_cast<std::size_t>(local_rank)];
  if (core >= 0 && core < CPU_SETSIZE && CPU_ISSET(static_cast<unsigned>(core), &usable)) return {};
  std::vector<int> allowed;
  for (int other = 0; other < CPU_SETSIZE; ++other)
    if (CPU_ISSET(static_cast<unsigned>(other), &usable)) allowed.push_back(other);
  return refusal(formatted("of the cores that the process may use: {}", rank_list(allowed)));
}

void pin_this_thread(const std::vector<int>& cores, int local_rank) {
  if (static_cast<std::size_t>(local_rank) >= cores.size()) return;
  const int core = cores[static_cast<std::size_t>(local_rank)];
  cpu_set_t only;
  CPU_ZERO(&only);
  if (core >= 0 && core < CPU_SETSIZE) CPU_SET(static_cast<unsigned>(core), &only);
  if (const int error = ::pthread_setaffinity_np(::pthread_self(), sizeof only, &only); error != 0)
    log(LogLevel::Warning, "the coordination thread could not be pinned to core {} (error {})",
        core, error);
}

}  // namespace hvd
