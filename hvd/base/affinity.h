#pragma once
/// These functions say which core a thread of the library runs on. They keep no state; the list of cores is `Config::thread_affinity`.

#include <string>
#include <vector>

namespace hvd {

/// Returns why the thread of `local_rank` cannot be pinned, naming what is allowed; empty if it can, or if `cores` is empty.
std::string affinity_problem(const std::vector<int>& cores, int local_rank, int local_size);
/// Pins the calling thread to `cores[local_rank]`; does nothing where `cores` is empty, and only warns where the system refuses.
void pin_this_thread(const std::vector<int>& cores, int local_rank);

}  // namespace hvd
