// Names and process sets that are used once: what is kept of them stays bounded, on every host.
#include <doctest/doctest.h>
#include <malloc.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "hvd/base/text.h"
#include "tests/support/engine_probe.h"
#include "tests/support/sanitized.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

struct Size {
  int ranks, domains;
};

Submission sum_of(std::vector<float>& values, const std::string& name, int set = 0) {
  Submission submission = allreduce_of(values, name, DataType::Float32);
  submission.process_set = set;
  return submission;
}

/// Submits names `from` to `to`, some at a time, and checks the sums.
void use_names(Engine& engine, int rank, int ranks, int from, int to, int at_once) {
  for (int first = from; first < to; first += at_once) {
    std::vector<std::vector<float>> values;
    std::vector<std::shared_ptr<HandleState>> pending;
    values.reserve(static_cast<std::size_t>(at_once));
    for (int name = first; name < std::min(to, first + at_once); ++name) {
      values.emplace_back(2, static_cast<float>(rank + name % 100));
      pending.push_back(engine.submit(sum_of(values.back(), formatted("step {}/loss", name))));
    }
    for (int i = 0; i < static_cast<int>(pending.size()); ++i) {
      engine.wait(*pending[static_cast<std::size_t>(i)]);
      const auto sum = static_cast<float>(ranks * (ranks - 1) / 2 + ranks * ((first + i) % 100));
      if (values[static_cast<std::size_t>(i)] != std::vector<float>(2, sum))
        FAIL_CHECK("a wrong sum of ", first + i);
    }
  }
}

std::int64_t control(Engine& engine, std::string_view name, Shape ranks, int root) {
  Submission submission;
  submission.kind = OpKind::Control;
  submission.name = name;
  submission.root = root;
  submission.tensors.push_back(
      {nullptr, nullptr, DataType::Int64, std::move(ranks), nullptr, true});
  const auto pending = engine.submit(std::move(submission), After::Wait);
  engine.wait(*pending);
  return pending->value;
}

}  // namespace

TEST_CASE("forgetting: what is kept of names that are used once does not grow with their number") {
  // sanitizers have another malloc, of which mallinfo2() knows nothing
  constexpr int kNames = kSanitized ? 2'000 : 50'000;
  constexpr std::uint32_t kCapacity = 256;
  for (const auto& [ranks, domains] : {Size{3, 3}, Size{4, 2}, Size{2, 1}}) {
    CAPTURE(domains);
    Config config;
    config.cache_capacity = kCapacity;
    ThreadWorld world(
        {.size = ranks, .domains = domains, .config = config, .limit = std::chrono::seconds(240)});
    std::size_t early = 0;
    world.run([&, ranks = ranks](int rank, Engine& engine) {
      use_names(engine, rank, ranks, 0, kNames / 5, 60);
      if (rank == 0) early = mallinfo2().uordblks;
      use_names(engine, rank, ranks, kNames / 5, kNames, 60);
      CHECK(EngineProbe::tensors_kept(engine) <= 3 * kCapacity);
      for (int name = 0; name < (kSanitized ? 500 : 2000); ++name) {
        std::vector<float> values(1);
        engine.wait(*engine.submit(sum_of(values, formatted("waited for {}", name)), After::Wait));
      }
    });
    const std::size_t late = mallinfo2().uordblks;
    MESSAGE("bytes per name: ",
            (static_cast<double>(late) - static_cast<double>(early)) / (kNames * 4 / 5));
    CHECK(late < early + kNames);  // less than a byte or so for each
  }
}

TEST_CASE(
    "forgetting: names that come back after they were forgotten, while others wait for long") {
  Config config;
  config.cache_capacity = 32;
  for (const auto& [ranks, domains] : {Size{3, 3}, Size{6, 3}, Size{8, 4}}) {
    CAPTURE(domains);
    ThreadWorld world(
        {.size = ranks, .domains = domains, .config = config, .limit = std::chrono::seconds(120)});
    world.run([ranks = ranks](int rank, Engine& engine) {
      const auto sum = static_cast<float>(ranks * (ranks - 1) / 2);
      for (int round = 0; round < (kSanitized ? 2 : 4); ++round) {
        // All but the last rank wait for this one from the beginning of the round on.
        std::vector<float> early(1, static_cast<float>(rank));
        std::shared_ptr<HandleState> waiting;
        if (rank < ranks - 1) waiting = engine.submit(sum_of(early, "slow"));
        use_names(engine, rank, ranks, 0, 400, 5);
        if (rank == ranks - 1) waiting = engine.submit(sum_of(early, "slow"));
        engine.wait(*waiting);
        CHECK(early == std::vector<float>(1, sum));
        // Each in its own order.
        for (int i = 0; i < 60; ++i) {
          std::vector<float> a(1, static_cast<float>(rank)), b(1, static_cast<float>(rank));
          const std::string names[] = {formatted("a{}", i % 40), formatted("b{}", i % 17)};
          const auto first = engine.submit(sum_of(rank % 2 == 0 ? a : b, names[rank % 2]));
          const auto second = engine.submit(sum_of(rank % 2 == 0 ? b : a, names[1 - rank % 2]));
          engine.wait(*first);
          engine.wait(*second);
          CHECK((a.front() == sum && b.front() == sum));
        }
      }
    });
  }
}

TEST_CASE(
    "forgetting: process sets that are made and removed leave nothing behind, and a removed one is "
    "refused") {
  constexpr int kSets = kSanitized ? 60 : 1000;
  for (const auto& [ranks, domains] : {Size{3, 3}, Size{4, 2}, Size{3, 1}}) {
    CAPTURE(domains);
    ThreadWorld world(
        {.size = ranks, .domains = domains, .config = {}, .limit = std::chrono::seconds(240)});
    std::size_t early = 0;
    world.run([&, ranks = ranks](int rank, Engine& engine) {
      int before = 0;
      for (int round = 0; round < kSets; ++round) {
        if (rank == 0 && round == kSets / 5) early = mallinfo2().uordblks;
        Shape members(static_cast<std::size_t>(ranks - 1));
        for (int i = 0; i < ranks - 1; ++i) members[static_cast<std::size_t>(i)] = i + round % 2;
        const bool included = rank >= round % 2 && rank < ranks - 1 + round % 2;
        const int set = static_cast<int>(control(engine, kAddProcessSet, members, 0));
        CHECK(set > before);  // no id comes back: who still has the old one is refused
        if (included) {
          for (int i = 0; i < 4; ++i) {
            std::vector<float> values(1, 1.0F);
            engine.wait(*engine.submit(sum_of(values, "in the set", set), After::Wait));
            CHECK(values.front() == static_cast<float>(ranks - 1));
          }
        }
        CHECK(control(engine, kRemoveProcessSet, {}, set) == set);
        std::vector<float> values(1, 1.0F);
        CHECK_THROWS_AS(engine.submit(sum_of(values, "in the set", set)), InvalidArgument);
        if (before > 0)
          CHECK_THROWS_AS(engine.submit(sum_of(values, "in the set", before)), InvalidArgument);
        before = set;
      }
      CHECK(EngineProbe::sets_kept(engine) < 40);
    });
    const std::size_t late = mallinfo2().uordblks;
    MESSAGE("bytes per set: ",
            (static_cast<double>(late) - static_cast<double>(early)) / (kSets * 4 / 5));
    CHECK(late < early + kSets * 100);
  }
}

TEST_CASE(
    "forgetting: a set that is removed while much is under way on it: what was agreed before is "
    "done, the rest refused, on all ranks") {
  // more than a host may have cut ahead, and more than a board has places
  constexpr int kTensors = 700;
  for (const auto& [ranks, domains] : {Size{4, 2}, Size{3, 3}, Size{4, 4}, Size{2, 1}}) {
    CAPTURE(domains);
    Config config;
    config.fusion_threshold_bytes = 0;
    ThreadWorld world(
        {.size = ranks, .domains = domains, .config = config, .limit = std::chrono::seconds(60)});
    std::vector<std::vector<int>> outcomes(static_cast<std::size_t>(ranks));
    world.run([&, ranks = ranks](int rank, Engine& engine) {
      Shape members;
      for (int member = ranks > 2 ? 1 : 0; member < ranks; ++member) members.push_back(member);
      const int set = static_cast<int>(control(engine, kAddProcessSet, members, 0));
      const bool included = rank >= members.front();
      std::vector<std::vector<float>> values(kTensors,
                                             std::vector<float>(3, static_cast<float>(rank)));
      std::vector<std::shared_ptr<HandleState>> pending;
      for (int i = 0; included && i < kTensors; ++i)
        pending.push_back(
            engine.submit(sum_of(values[static_cast<std::size_t>(i)], formatted("t{}", i), set)));
      CHECK(control(engine, kRemoveProcessSet, {}, set) == set);
      for (std::size_t i = 0; i < pending.size(); ++i) {
        int outcome = 0;
        try {
          engine.wait(*pending[i]);
          outcome = static_cast<int>(values[i].front());
        } catch (const InvalidArgument&) {
          outcome = -1;
        }
        outcomes[static_cast<std::size_t>(rank)].push_back(outcome);
      }
    });
    const auto& expected = outcomes.back();
    for (int rank = ranks > 2 ? 1 : 0; rank < ranks; ++rank)
      CHECK(outcomes[static_cast<std::size_t>(rank)] == expected);
    for (const int outcome : expected) CHECK((outcome == -1 || outcome == ranks * (ranks - 1) / 2));
    MESSAGE("of ", kTensors,
            " done: ", std::count_if(expected.begin(), expected.end(), [](int outcome) {
              return outcome != -1;
            }));
  }
}

}  // namespace hvd::test
