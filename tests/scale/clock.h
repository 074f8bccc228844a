#pragma once
/// A simulation has two times: virtual time, which is its result, and the processor time that the
/// library's own code takes here while it is simulated.

#include <chrono>
#include <ctime>

namespace scale {

using Time = std::chrono::nanoseconds;

/// Processor time of the calling thread.
inline Time processor_time() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + Time(now.tv_nsec);
}

/// A duration in microseconds, for people.
constexpr double microseconds(Time time) { return static_cast<double>(time.count()) / 1e3; }

}  // namespace scale
