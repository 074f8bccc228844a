#include "tools/hvd_bench/race.h"

#include <hvd/hvd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace bench {

namespace {

using Clock = std::chrono::steady_clock;

// of so many operations in a row one more comes first, and does not count
constexpr int kUncounted = 10;

double quantile(std::vector<double> values, double share) {
  const auto place =
      static_cast<std::ptrdiff_t>(share * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + place, values.end());
  return values[static_cast<std::size_t>(place)];
}

struct Samples {
  std::vector<double> rounds;
  std::vector<double> operations;
};

void measure(const Runner& runner, int repeats, Samples& samples) {
  // what the subject before it has left in caches is not its affair
  for (int i = 0; i < repeats / kUncounted; ++i) runner.run();
  hvd::barrier();
  auto last = Clock::now();
  const auto start = last;
  for (int i = 0; i < repeats; ++i) {
    runner.run();
    const auto now = Clock::now();
    samples.operations.push_back(std::chrono::duration<double, std::micro>(now - last).count());
    last = now;
  }
  samples.rounds.push_back(std::chrono::duration<double, std::micro>(last - start).count() /
                           repeats);
}

template <class T>
T reduce(T value, hvd::DataType dtype, hvd::ReduceOp op, const char* name) {
  const hvd::Buffer buffer{&value, dtype, {1}, {}};
  hvd::allreduce(buffer, buffer, {.name = name, .op = op});
  return value;
}

}  // namespace

double largest(double value) {
  return reduce(value, hvd::DataType::Float64, hvd::ReduceOp::Max, "hvd_bench.largest");
}

std::size_t total(std::size_t value) {
  return static_cast<std::size_t>(reduce(static_cast<std::int64_t>(value), hvd::DataType::Int64,
                                         hvd::ReduceOp::Sum, "hvd_bench.total"));
}

std::vector<Timing> race(const std::vector<Runner>& runners, const Pace& pace) {
  std::vector<Samples> samples(runners.size());
  for (int round = 0; round < pace.warmup + pace.rounds; ++round) {
    if (round == pace.warmup) std::fill(samples.begin(), samples.end(), Samples{});
    for (std::size_t i = 0; i < runners.size(); ++i) measure(runners[i], pace.repeats, samples[i]);
  }
  std::vector<Timing> timings;
  for (const auto& sample : samples) {
    const auto latency = [&](double share) { return largest(quantile(sample.operations, share)); };
    timings.push_back({largest(quantile(sample.rounds, 0.5)), latency(0.5), latency(0.9),
                       latency(0.99), latency(1)});
  }
  return timings;
}

}  // namespace bench
