/// The engine end to end, with threads as ranks: agreement, fusion, results, errors, failure and
/// shutdown.

#include "hvd/engine/engine.h"

#include <doctest/doctest.h>

#include <atomic>
#include <barrier>
#include <random>

#include "tests/support/engine_probe.h"
#include "tests/support/shapes.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

std::vector<float> pattern(int rank, std::size_t count, int salt = 0) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<float>((i * 7 + static_cast<std::size_t>(salt)) % 31) * 0.25F +
                static_cast<float>(rank) * 1.5F;
  return values;
}

std::vector<float> expected_sum(int size, std::size_t count, int salt = 0) {
  std::vector<float> sum = pattern(0, count, salt);
  for (int rank = 1; rank < size; ++rank) {
    const auto more = pattern(rank, count, salt);
    for (std::size_t i = 0; i < count; ++i) sum[i] += more[i];
  }
  return sum;
}

}  // namespace

TEST_CASE("allreduce sums in rank order, whatever the ranks, domains and sizes") {
  for (const auto& [size, domains] : kShapes) {
    CAPTURE(size);
    CAPTURE(domains);
    ThreadWorld world({.size = size, .domains = domains, .config = {}});
    world.run([n = size](int rank, Engine& engine) {
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{3},
                                      std::size_t{1000}, std::size_t{65537}, std::size_t{300000}})
        for (int round = 0; round < 3; ++round) {
          auto values = pattern(rank, count, round);
          auto pending = engine.submit(
              allreduce_of(values, "t" + std::to_string(count), DataType::Float32), After::Wait);
          engine.wait(*pending);
          CHECK(values == expected_sum(n, count, round));
        }
    });
  }
}

TEST_CASE("many tensors in another order on every rank, asynchronously") {
  for (const auto& [size, domains] : kShapes) {
    CAPTURE(size);
    CAPTURE(domains);
    ThreadWorld world({.size = size, .domains = domains, .config = {}});
    world.run([n = size](int rank, Engine& engine) {
      constexpr int kTensors = 60;
      std::mt19937 random(static_cast<unsigned>(rank));
      for (int round = 0; round < 5; ++round) {
        std::vector<int> order(kTensors);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        std::vector<std::vector<float>> values(kTensors);
        std::vector<std::shared_ptr<HandleState>> pending(kTensors);
        for (const int t : order) {
          const auto at = static_cast<std::size_t>(t);
          values[at] = pattern(rank, 10 + at * 97, t);
          pending[at] = engine.submit(
              allreduce_of(values[at], "tensor." + std::to_string(t), DataType::Float32));
        }
        for (const auto& one : pending) engine.wait(*one);
        for (int t = 0; t < kTensors; ++t) {
          const auto at = static_cast<std::size_t>(t);
          CHECK(values[at] == expected_sum(n, 10 + at * 97, t));
        }
      }
    });
  }
}

TEST_CASE(
    "a group becomes ready together and travels as one batch; several groups fuse up to the "
    "threshold") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 4, .domains = domains, .config = {}});
    world.run([](int rank, Engine& engine) {
      std::vector<std::vector<float>> values;
      Submission group;
      group.name = "group";
      group.op = ReduceOp::Sum;
      for (int t = 0; t < 20; ++t) values.push_back(pattern(rank, 100, t));
      for (auto& one : values)
        group.tensors.push_back({one.data(), one.data(), DataType::Float32, {100}, nullptr, true});
      const auto before = engine.stats();
      engine.wait(*engine.submit(std::move(group)));
      const auto after = engine.stats();
      CHECK(after.batches_run - before.batches_run == 1);
      CHECK(after.tensors_fused - before.tensors_fused == 20);
      CHECK(after.tensors_submitted - before.tensors_submitted == 20);
      for (int t = 0; t < 20; ++t)
        CHECK(values[static_cast<std::size_t>(t)] == expected_sum(4, 100, t));
    });
  }
}

TEST_CASE("a mismatch is raised on every rank, names what each sent, and leaves the name usable") {
  for (const auto& [size, domains] : kShapes) {
    if (size == 1) continue;
    CAPTURE(size);
    CAPTURE(domains);
    ThreadWorld world({.size = size, .domains = domains, .config = {}});
    world.run([n = size](int rank, Engine& engine) {
      for (int round = 0; round < 3; ++round) {
        std::vector<float> values(rank == n - 1 ? 18U : 17U, 1.0F);
        std::string text;
        try {
          engine.wait(*engine.submit(allreduce_of(values, "x", DataType::Float32), After::Wait));
        } catch (const Mismatch& error) {
          text = error.what();
        }
        CHECK(text.find("'x'") != std::string::npos);
        CHECK(text.find("float32 [17]") != std::string::npos);
        CHECK(text.find("rank " + std::to_string(n - 1) + ": float32 [18]") != std::string::npos);
        auto good = pattern(rank, 50);
        engine.wait(*engine.submit(allreduce_of(good, "x", DataType::Float32), After::Wait));
        CHECK(good == expected_sum(n, 50));
      }
    });
  }
}

TEST_CASE("broadcast and allgather, with rows that differ by rank") {
  for (const auto& [size, domains] : kShapes) {
    CAPTURE(size);
    CAPTURE(domains);
    ThreadWorld world({.size = size, .domains = domains, .config = {}});
    world.run([n = size](int rank, Engine& engine) {
      for (int root = 0; root < n; ++root) {
        std::vector<float> values = pattern(rank, 5000);
        Submission broadcast;
        broadcast.kind = OpKind::Broadcast;
        broadcast.root = root;
        broadcast.tensors.push_back(
            {values.data(), values.data(), DataType::Float32, {5000}, nullptr, true});
        engine.wait(*engine.submit(std::move(broadcast), After::Wait));
        CHECK(values == pattern(root, 5000));
      }
      for (int round = 0; round < 4; ++round) {
        const auto rows_of = [&](int r) { return (r + round) % 3; };
        std::vector<float> mine =
            pattern(rank, static_cast<std::size_t>(rows_of(rank)) * 10, round);
        std::vector<float> all;
        Submission gather;
        gather.kind = OpKind::Allgather;
        gather.name = "rows";
        gather.tensors.push_back(
            {mine.data(), nullptr, DataType::Float32, {rows_of(rank), 10}, nullptr, true});
        gather.allocate = [&all](std::size_t, std::int64_t rows) {
          all.assign(static_cast<std::size_t>(rows) * 10, -1.0F);
          return static_cast<void*>(all.data());
        };
        engine.wait(*engine.submit(std::move(gather), After::Wait));
        std::vector<float> expected;
        for (int r = 0; r < n; ++r) {
          const auto part = pattern(r, static_cast<std::size_t>(rows_of(r)) * 10, round);
          expected.insert(expected.end(), part.begin(), part.end());
        }
        CHECK(all == expected);
      }
      Submission barrier;
      barrier.kind = OpKind::Barrier;
      engine.wait(*engine.submit(std::move(barrier), After::Wait));
    });
  }
}

TEST_CASE("process sets, overlapping, at the same time") {
  Config config;
  config.process_sets = {{0, 2}, {1, 2, 3}};
  for (const int domains : {1, 2, 4}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 4, .domains = domains, .config = config});
    world.run([](int rank, Engine& engine) {
      for (int round = 0; round < 20; ++round)
        for (int set = 0; set < 3; ++set) {
          const auto& info = engine.negotiator().sets().info(set);
          std::vector<float> values = pattern(rank, 300, round);
          Submission submission = allreduce_of(values, "same name", DataType::Float32);
          submission.process_set = set;
          if (info.rank < 0) {
            CHECK_THROWS_AS(engine.submit(std::move(submission)), InvalidArgument);
            continue;
          }
          engine.wait(*engine.submit(std::move(submission), After::Wait));
          std::vector<float> sum = pattern(info.ranks[0], 300, round);
          for (std::size_t r = 1; r < info.ranks.size(); ++r) {
            const auto more = pattern(info.ranks[r], 300, round);
            for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += more[i];
          }
          CHECK(values == sum);
        }
    });
  }
}

TEST_CASE("a name in flight is refused at the call, and nothing else happens") {
  for (const int domains : {1, 2}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 2, .domains = domains, .config = {}});
    world.run([](int rank, Engine& engine) {
      auto values = pattern(rank, 10);
      auto again = pattern(rank, 10);
      if (rank == 0) {
        auto first = engine.submit(allreduce_of(values, "twice", DataType::Float32));
        CHECK_THROWS_AS(engine.submit(allreduce_of(again, "twice", DataType::Float32)),
                        DuplicateName);
        CHECK(engine.stats().tensors_submitted == 1);
        engine.wait(*first);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        engine.wait(*engine.submit(allreduce_of(values, "twice", DataType::Float32)));
      }
      CHECK(values == expected_sum(2, 10));
    });
  }
}

TEST_CASE(
    "a name is in flight until its caller has seen the end, on every rank, also on the one that "
    "came last") {
  enum class Sees : std::uint8_t { Waits, Polls, IsCalled, Forgets };
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 3, .domains = domains, .config = {}});
    std::barrier all(3);
    world.run([&](int rank, Engine& engine) {
      std::vector<float> values(10, 1.0F);
      std::vector<float> others(10, 1.0F);
      for (int round = 0; round < 24; ++round) {
        const auto sees = static_cast<Sees>(round % 4);
        CAPTURE(round);
        const auto submit = [&] {
          return engine.submit(allreduce_of(values, "name", DataType::Float32));
        };
        // From the third on it is repeated; some rounds are negotiated between repeated ones.
        values.assign(round % 9 == 8 ? 11 : 10, static_cast<float>(rank + round));
        auto pending = submit();
        engine.wait(*engine.submit(allreduce_of(others, "other", DataType::Float32), After::Wait));
        // drives, and tells nobody of this one's end
        for (HandleState nothing; !pending->done.load();) engine.poll(nothing);
        CHECK(values.front() == static_cast<float>(3 + 3 * round));
        CHECK_THROWS_AS(submit(), DuplicateName);
        CHECK_THROWS_AS(engine.wait(*engine.submit(allreduce_of(values, "name", DataType::Float32),
                                                   After::Wait)),
                        DuplicateName);
        CHECK(values.front() == static_cast<float>(3 + 3 * round));
        std::atomic<bool> called{false};
        switch (sees) {
          case Sees::Waits: engine.wait(*pending); break;
          case Sees::Polls: CHECK(engine.poll(*pending)); break;
          case Sees::IsCalled:
            engine.then(*pending, [&] { called = true; });
            while (!called) std::this_thread::yield();
            break;
          case Sees::Forgets: pending.reset();
        }
        if (round % 3 == 1)
          engine.wait(*engine.submit(allreduce_of(values, "name", DataType::Float32), After::Wait));
        all.arrive_and_wait();
      }
    });
  }
}

TEST_CASE(
    "tensors that nobody has are not reduced, and those that somebody has count zeros elsewhere") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 3, .domains = domains, .config = {}});
    world.run([](int rank, Engine& engine) {
      std::vector<float> a(8, 1.0F), b(8, rank == 1 ? 5.0F : 0.0F), c(8, -7.0F);
      Submission group;
      group.name = "partly";
      group.op = ReduceOp::Sum;
      group.tensors.push_back({a.data(), a.data(), DataType::Float32, {8}, nullptr, true});
      group.tensors.push_back({b.data(), b.data(), DataType::Float32, {8}, nullptr, rank == 1});
      group.tensors.push_back({c.data(), c.data(), DataType::Float32, {8}, nullptr, false});
      auto pending = engine.submit(std::move(group));
      engine.wait(*pending);
      CHECK(pending->present_anywhere == std::vector<bool>{true, true, false});
      CHECK(a == std::vector<float>(8, 3.0F));
      CHECK(b == std::vector<float>(8, 5.0F));
      CHECK(c == std::vector<float>(8, -7.0F));
    });
  }
}

TEST_CASE("more names than the table holds: old ones are forgotten and come back") {
  Config config;
  config.cache_capacity = 16;
  for (const int domains : {1, 2}) {
    ThreadWorld world({.size = 2, .domains = domains, .config = config});
    world.run([](int rank, Engine& engine) {
      for (int round = 0; round < 3; ++round)
        for (int t = 0; t < 50; ++t) {
          auto values = pattern(rank, 20, t);
          engine.wait(*engine.submit(
              allreduce_of(values, "name." + std::to_string(t), DataType::Float32), After::Wait));
          CHECK(values == expected_sum(2, 20, t));
        }
    });
  }
}

TEST_CASE(
    "more batches under way than the board's ring has places: cuts that are put off are made up "
    "for") {
  Config config;
  config.fusion_threshold_bytes = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    for (const int domains : {1, 2}) {
      CAPTURE(domains);
      ThreadWorld world({.size = 2, .domains = domains, .config = config});
      world.run([](int rank, Engine& engine) {
        constexpr std::size_t kTensors = 3 * BatchPlaces::kPlaces;
        std::vector<std::vector<float>> values(kTensors);
        std::vector<std::shared_ptr<HandleState>> pending;
        for (std::size_t t = 0; t < kTensors; ++t) {
          const std::size_t at = rank == 0 ? t : kTensors - 1 - t;
          values[at] = pattern(rank, 3, static_cast<int>(at));
          pending.push_back(engine.submit(
              allreduce_of(values[at], "ring." + std::to_string(at), DataType::Float32)));
        }
        for (const auto& one : pending) engine.wait(*one);
        for (std::size_t t = 0; t < kTensors; ++t)
          CHECK(values[t] == expected_sum(2, 3, static_cast<int>(t)));
      });
    }
  }
}

TEST_CASE("polling alone gets there") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 4, .domains = domains, .config = {}});
    world.run([](int rank, Engine& engine) {
      auto values = pattern(rank, 100000);
      auto pending = engine.submit(allreduce_of(values, "polled", DataType::Float32));
      while (!engine.poll(*pending)) std::this_thread::yield();
      CHECK(values == expected_sum(4, 100000));
    });
  }
}

TEST_CASE("several threads of each rank submit at once, in any order") {
  for (const int domains : {1, 2}) {
    ThreadWorld world({.size = 3, .domains = domains, .config = {}});
    world.run([](int rank, Engine& engine) {
      std::vector<std::thread> threads;
      std::atomic<int> wrong{0};
      for (int thread = 0; thread < 3; ++thread)
        threads.emplace_back([&, thread] {
          for (int round = 0; round < 60; ++round) {
            auto values = pattern(rank, 500, thread);
            engine.wait(*engine.submit(
                allreduce_of(values, "thread." + std::to_string(thread), DataType::Float32),
                After::Wait));
            wrong += values != expected_sum(3, 500, thread);
          }
        });
      for (auto& thread : threads) thread.join();
      CHECK(wrong == 0);
    });
  }
}

TEST_CASE("a rank that dies is named on all others, pending or not") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 6, .domains = domains, .config = {}});
    world.run(
        [&world](int rank, Engine& engine) {
          auto values = pattern(rank, 10);
          std::string text;
          try {
            engine.wait(
                *engine.submit(allreduce_of(values, "before", DataType::Float32), After::Wait));
            if (rank == 2) {
              EngineProbe::die(engine);
              return;
            }
            engine.wait(
                *engine.submit(allreduce_of(values, "after", DataType::Float32), After::Wait));
          } catch (const RankFailed& error) {
            text = error.what();
          }
          CHECK(text.find("rank 2") != std::string::npos);
          CHECK_THROWS_AS(engine.submit(allreduce_of(values, "later", DataType::Float32)),
                          RankFailed);
          engine.shutdown();
        },
        false);
  }
}

TEST_CASE(
    "shutdown with work pending fails every handle once; a rank that waits for one that left is "
    "told") {
  for (const int domains : {1, 2}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 3, .domains = domains, .config = {}});
    world.run([](int rank, Engine& engine) {
      auto values = pattern(rank, 10);
      if (rank == 0) return;  // goes straight to shutdown
      CHECK_THROWS_AS(engine.wait(*engine.submit(allreduce_of(values, "alone", DataType::Float32),
                                                 After::Wait)),
                      Shutdown);
    });
  }
}

TEST_CASE("fusion threshold 0 and large give bitwise the same") {
  std::vector<std::vector<float>> results;
  for (const std::uint64_t threshold :
       {std::uint64_t{0}, std::uint64_t{4096}, std::uint64_t{128} << 20}) {
    Config config;
    config.fusion_threshold_bytes = threshold;
    for (const int domains : {1, 2, 3}) {
      CAPTURE(domains);
      ThreadWorld world({.size = 4, .domains = domains, .config = config});
      std::vector<float> all;
      world.run([&all](int rank, Engine& engine) {
        std::vector<std::vector<float>> values(30);
        std::vector<std::shared_ptr<HandleState>> pending;
        for (int t = 0; t < 30; ++t) {
          auto& one = values[static_cast<std::size_t>(t)];
          one = pattern(rank, 1000 + static_cast<std::size_t>(t), t);
          for (auto& value : one) value = std::sin(value) * 1e-3F;
          pending.push_back(engine.submit(
              allreduce_of(one, "f" + std::to_string(t), DataType::Float32, ReduceOp::Average)));
        }
        for (const auto& one : pending) engine.wait(*one);
        if (rank == 1)
          for (const auto& one : values) all.insert(all.end(), one.begin(), one.end());
      });
      results.push_back(all);
    }
  }
  for (const auto& result : results) CHECK(result == results[0]);
}

TEST_CASE(
    "a stall is told with the ranks that are missing, also those of other hosts, and what they "
    "wait for instead") {
  const auto words = [](int size, int domains, const std::function<void(int, Engine&)>& meanwhile) {
    ThreadWorld world(
        {.size = size,
         .domains = domains,
         .config = {.stall_shutdown_time = std::chrono::seconds(1), .log_level = LogLevel::Off}});
    std::string text;
    std::atomic<bool> submitted{false};
    world.run(
        [&](int rank, Engine& engine) {
          std::vector<float> values(4);
          try {
            if (rank > 0) {
              while (!submitted) std::this_thread::yield();
              return meanwhile(rank, engine);
            }
            const auto pending = engine.submit(allreduce_of(values, "x", DataType::Float32));
            submitted = true;
            engine.wait(*pending);
          } catch (const StallTimeout& error) {
            if (rank == 0) text = error.what();
          }
        },
        false);
    return text;
  };
  const auto nothing = [](int /*rank*/, Engine& /*engine*/) {};
  CHECK(words(3, 1, nothing).find("ranks 1-2 have not submitted it") != std::string::npos);
  CHECK(words(4, 4, nothing).find("some of ranks 1-3, on other hosts, have not submitted it") !=
        std::string::npos);
  CHECK(words(2, 2, nothing).find("rank 1, on another host, has not submitted it") !=
        std::string::npos);
  const auto another = [](int /*rank*/, Engine& engine) {
    Submission barrier;
    barrier.kind = OpKind::Barrier;
    barrier.name = "x";
    static_cast<void>(engine.submit(std::move(barrier)));
  };
  // Of the allreduce or of the barrier, whichever is found first. The others have a second to
  // submit theirs; on a machine that does not give it to them, once more.
  std::string text;
  for (int attempt = 0; attempt < 10 && text.find(" of that name") == std::string::npos; ++attempt)
    text = words(3, 1, another);
  CAPTURE(text);
  CHECK((text.find("ranks 1-2 have not submitted it; ranks 1-2 wait for barrier of that name") !=
             std::string::npos ||
         text.find("rank 0 has not submitted it; rank 0 waits for allreduce of that name") !=
             std::string::npos));
}

}  // namespace hvd::test
