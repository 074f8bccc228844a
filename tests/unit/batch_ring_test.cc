// More batches than a board has places for: whoever cuts them waits for those that are slow.
#include <doctest/doctest.h>

#include <numeric>

#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

constexpr int kTensors = 2 * static_cast<int>(Board::kBatchRing) + 100;

/// Submits so many tensors at once, each a batch of its own, to the set `process_set` of `members`; all sums must be right.
void flood(Engine& engine, int rank, int process_set, const std::vector<int>& members) {
  std::vector<std::vector<float>> values;
  std::vector<std::shared_ptr<HandleState>> pending;
  for (int i = 0; i < kTensors; ++i) values.emplace_back(5, static_cast<float>(i + rank));
  for (int i = 0; i < kTensors; ++i) {
    Submission submission = allreduce_of(values[static_cast<std::size_t>(i)], "tensor." + std::to_string(i), DataType::Float32);
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

}  // namespace

TEST_CASE("more batches than places, on a set without ranks of the host that cuts: it waits for the others") {
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
