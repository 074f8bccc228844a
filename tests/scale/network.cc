#include "tests/scale/network.h"

#include <algorithm>
#include <cmath>

namespace scale {

Time Network::arrival(int from, int to, std::size_t bytes, Time now) {
  Time& free = card_free_[static_cast<std::size_t>(from)];
  free = std::max(free, now) +
         Time(std::llround(static_cast<double>(bytes) * 8 / model_.gigabits_per_second));
  Time& last = last_arrival_[{from, to}];
  last = std::max(last, free + model_.delay + random(model_.jitter));
  return last;
}

Time Network::random(Time mean) {
  // Not std::exponential_distribution, which may differ from one standard library to another.
  const double uniform = (static_cast<double>(random_() >> 11) + 0.5) / 9007199254740992.0;
  return Time(std::llround(-std::log(uniform) * static_cast<double>(mean.count())));
}

}  // namespace scale
