// When what is agreed becomes batches: process sets do not wait for one another, and more batches
// than a board has places for wait.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

constexpr int kTensors = 2 * static_cast<int>(BatchPlaces::kPlaces) + 100;

/// Submits so many tensors at once, each a batch of its own, to the set `process_set` of `members`;
/// all sums must be right.
void flood(Engine& engine, int rank, int process_set, const std::vector<int>& members) {
  std::vector<std::vector<float>> values;
  std::vector<std::shared_ptr<HandleState>> pending;
  for (int i = 0; i < kTensors; ++i) values.emplace_back(5, static_cast<float>(i + rank));
  for (int i = 0; i < kTensors; ++i) {
    Submission submission = allreduce_of(values[static_cast<std::size_t>(i)],
                                         "tensor." + std::to_string(i), DataType::Float32);
    submission.process_set = process_set;
    pending.push_back(engine.submit(std::move(submission)));
  }
  int wrong = 0;
  const int sum_of_ranks = std::accumulate(members.begin(), members.end(), 0);
  for (int i = 0; i < kTensors; ++i) {
    engine.wait(*pending[static_cast<std::size_t>(i)]);
    const auto expected = static_cast<float>(i * static_cast<int>(members.size()) + sum_of_ranks);
    if (values[static_cast<std::size_t>(i)] != std::vector<float>(5, expected)) ++wrong;
  }
  CHECK(wrong == 0);
}

/// Runs allreduces of int64, none of which ends before somebody says so.
class HeldBackend final : public Backend {
 public:
  explicit HeldBackend(const std::atomic<bool>& released) : released_(released) {}
  [[nodiscard]] std::string_view name() const override { return "held"; }
  [[nodiscard]] bool supports(const BatchTraits& traits) const override {
    return traits.kind == OpKind::Allreduce && traits.dtype == DataType::Int64;
  }
  std::unique_ptr<Execution> launch(Batch /*batch*/) override {
    struct Held final : Execution {
      explicit Held(const std::atomic<bool>& released) : released_(released) {}
      Progress advance() override { return released_.load() ? Progress::Done : Progress::Idle; }
      const std::atomic<bool>& released_;
    };
    return std::make_unique<Held>(released_);
  }

 private:
  const std::atomic<bool>& released_;
};

/// While a batch of `held` is under way, and stays so, `free` does many operations.
void hold_one_set(int domains, int rounds, const std::vector<int>& held,
                  const std::vector<int>& free) {
  CAPTURE(domains);
  std::atomic<bool> released{false};
  std::atomic<std::size_t> done{0};
  std::atomic<int> wrong{0};
  Config config;
  config.process_sets = {held, free};
  WorldOptions options{.size = 4, .domains = domains, .config = config};
  options.customize = [&](int /*rank*/, EngineParts& parts) {
    parts.backends.insert(parts.backends.begin(), std::make_unique<HeldBackend>(released));
  };
  ThreadWorld world(std::move(options));
  world.run([&](int rank, Engine& engine) {
    std::vector<std::int64_t> waiting(3);
    Submission slow = allreduce_of(waiting, "held", DataType::Int64);
    slow.process_set = 1;
    std::shared_ptr<HandleState> pending;
    const bool holds = std::find(held.begin(), held.end(), rank) != held.end();
    if (holds) pending = engine.submit(std::move(slow));
    if (std::find(free.begin(), free.end(), rank) != free.end()) {
      for (int i = 0; i < rounds; ++i) {
        std::vector<float> values(5000, static_cast<float>(rank + i));
        Submission quick =
            allreduce_of(values, "quick." + std::to_string(i % 7), DataType::Float32);
        quick.process_set = 2;
        engine.wait(*engine.submit(std::move(quick), i % 2 == 0 ? After::Wait : After::Return));
        const int sum =
            std::accumulate(free.begin(), free.end(), i * static_cast<int>(free.size()));
        if (values != std::vector<float>(5000, static_cast<float>(sum))) ++wrong;
      }
      if (++done == free.size()) released = true;
    }
    if (holds) engine.wait(*pending);
  });
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("a process set whose batch is under way for long holds up no other") {
  for (const int domains : {1, 2, 3, 4}) {
    hold_one_set(domains, static_cast<int>(BatchPlaces::kPlaces) + 50, {0, 1}, {2, 3});
    hold_one_set(domains, 20, {0, 2}, {1, 3});
    hold_one_set(domains, 20, {1, 3}, {0, 2});
    hold_one_set(domains, 20, {0, 1, 2, 3}, {1, 2});
    hold_one_set(domains, 20, {2, 3}, {0, 1, 2, 3});
  }
}

TEST_CASE(
    "cuts of a set without ranks of the root's host fuse: the root hears when the last is over") {
  Config config;
  config.process_sets = {{1, 2}};
  ThreadWorld world({.size = 3, .domains = 3, .config = config});
  world.run([&](int rank, Engine& engine) {
    if (rank == 0) return;
    constexpr int kTensors = 400;
    std::vector<std::vector<float>> values(kTensors,
                                           std::vector<float>(10, static_cast<float>(rank)));
    std::vector<std::shared_ptr<HandleState>> pending;
    for (int i = 0; i < kTensors; ++i) {
      Submission submission = allreduce_of(values[static_cast<std::size_t>(i)],
                                           "t." + std::to_string(i), DataType::Float32);
      submission.process_set = 1;
      pending.push_back(engine.submit(std::move(submission)));
    }
    for (const auto& one : pending) engine.wait(*one);
    for (const auto& one : values) CHECK(one == std::vector<float>(10, 3.0F));
    CHECK(engine.stats().batches_run < kTensors);
  });
}

TEST_CASE(
    "more batches than places, on a set without ranks of the host that cuts: it waits for the "
    "others") {
  // With 4 domains one of the two hears of cuts through the other.
  for (const auto& [size, domains] : {std::pair{3, 1}, {3, 2}, {3, 3}, {4, 4}}) {
    CAPTURE(domains);
    const std::vector<int> members{size - 2, size - 1};
    Config config;
    config.fusion_threshold_bytes = 0;
    config.process_sets = {members};
    ThreadWorld world({.size = size, .domains = domains, .config = config});
    world.run([&, size = size](int rank, Engine& engine) {
      if (rank >= size - 2) flood(engine, rank, 1, members);
    });
  }
}

TEST_CASE("more batches than places, for all ranks") {
  for (const auto& [size, domains] : {std::pair{2, 1}, {2, 2}, {3, 3}, {4, 2}}) {
    CAPTURE(size);
    CAPTURE(domains);
    Config config;
    config.fusion_threshold_bytes = 0;
    ThreadWorld world({.size = size, .domains = domains, .config = config});
    std::vector<int> everyone(static_cast<std::size_t>(size));
    std::iota(everyone.begin(), everyone.end(), 0);
    world.run([&](int rank, Engine& engine) { flood(engine, rank, 0, everyone); });
  }
}

}  // namespace hvd::test
