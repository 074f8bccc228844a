#pragma once
/// A Network is the simulated wires between the hosts. A message leaves when its sender's card has
/// sent what came before, takes its bytes' time, a delay, and a random while longer, and never
/// overtakes another of the same sender and receiver. A receiver's card takes any number of
/// messages at once. It is for one thread; the same seed gives the same times.

#include <cstdint>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "tests/scale/clock.h"

namespace scale {

struct NetworkModel {
  Time delay{10'000};               ///< from card to card, one way
  Time jitter{2'000};               ///< mean of what comes on top, exponentially distributed
  double gigabits_per_second = 25;  ///< of each host's card
};

class Network {
 public:
  Network(const NetworkModel& model, int hosts, std::uint64_t seed)
      : model_(model), card_free_(static_cast<std::size_t>(hosts)), random_(seed) {}

  /// When a message of `bytes`, handed over at `now`, arrives.
  Time arrival(int from, int to, std::size_t bytes, Time now);
  /// A random while of that mean, exponentially distributed.
  Time random(Time mean);

 private:
  NetworkModel model_;
  std::vector<Time> card_free_;
  std::map<std::pair<int, int>, Time> last_arrival_;
  std::mt19937_64 random_;
};

}  // namespace scale
