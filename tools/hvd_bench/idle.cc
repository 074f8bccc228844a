#include "tools/hvd_bench/idle.h"

#include <hvd/hvd.h>
#include <sys/resource.h>

#include <chrono>
#include <cstring>
#include <thread>

namespace bench {

namespace {

double processor_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) { return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

}  // namespace

std::vector<double> measure_idle(double seconds) {
  hvd::barrier();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the others' way out of the barrier does not count
  const auto start = std::chrono::steady_clock::now();
  const double before = processor_seconds();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  const double used = processor_seconds() - before;
  const double slept = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  double percent = 100 * used / slept;
  const auto all = hvd::allgather({&percent, hvd::DataType::Float64, {1}, {}}, {.name = "hvd_bench.idle"});
  std::vector<double> result(static_cast<std::size_t>(hvd::size()));
  std::memcpy(result.data(), all.data.data(), all.data.size());
  return result;
}

}  // namespace bench
