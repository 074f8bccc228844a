#pragma once
/// race() measures several ways of doing the same work in turn, round by round, so that what else
/// the machine does meets all of them alike. Collective: every rank calls it with the same list.

#include <functional>
#include <string>
#include <vector>

namespace bench {

struct Runner {
  std::string name;
  std::function<void()> run;  ///< one operation
};

/// In microseconds; of the slowest rank.
struct Timing {
  double median = 0;  ///< over the rounds, of a round's mean
  double p50 = 0;     ///< over single operations
  double p90 = 0, p99 = 0, max = 0;
};

struct Pace {
  int warmup = 2;
  int rounds = 11;
  int repeats = 1;
};

std::vector<Timing> race(const std::vector<Runner>& runners, const Pace& pace);

/// The largest value of all ranks.
double largest(double value);
/// The sum over all ranks.
std::size_t total(std::size_t value);

}  // namespace bench
