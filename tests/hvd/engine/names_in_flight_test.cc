/// Names whose operation has ended, and whose caller does not know yet: the same answer on every
/// rank.

#include <doctest/doctest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "hvd/engine/core/repeated_op.h"
#include "hvd/engine/engine.h"
#include "tests/support/engine_probe.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

SmallCall call_on(std::vector<float>& values, const Shape& shape, std::string_view name) {
  SmallCall call;
  call.name = name;
  call.shape = shape;
  call.input = call.output = values.data();
  call.op = ReduceOp::Sum;
  return call;
}

}  // namespace

TEST_CASE(
    "a persistent operation has its name in flight, on every rank, under way and until it has been "
    "waited for") {
  for (const int number : {0, 1, 2, 3, 4, 5}) {
    const int domains = 1 + number % 3;
    const bool has_ended = number >= 3;
    CAPTURE(domains);
    CAPTURE(has_ended);
    ThreadWorld world({.size = 3, .domains = domains, .config = {}});
    std::barrier all(3);
    std::atomic<int> refused{0};
    world.run([&](int rank, Engine& engine) {
      std::vector<float> values(10, 1.0F);
      std::vector<float> others(10, 1.0F);
      const Shape shape{10};
      for (int round = 0; round < 3; ++round)
        engine.wait(*engine.submit(allreduce_of(values, "a", DataType::Float32), After::Wait));
      all.arrive_and_wait();
      if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      auto op = engine.small_calls().start(call_on(values, shape, "a"), After::Repeat);
      std::shared_ptr<HandleState> pending;
      if (!op) pending = engine.submit(allreduce_of(values, "a", DataType::Float32), After::Repeat);
      const HandleState& state = op ? *op->pending : *pending;
      for (HandleState nothing; has_ended && !state.done.load();) engine.poll(nothing);
      std::shared_ptr<HandleState> second;
      try {
        second = engine.submit(allreduce_of(others, "a", DataType::Float32));
      } catch (const DuplicateName&) {
        ++refused;
      }
      all.arrive_and_wait();
      if (op) {
        engine.small_calls().finish(*op, call_on(values, shape, "a"));
      } else {
        engine.wait(*pending);
      }
      if (second && refused == 0) engine.wait(*second);
    });
    CHECK(refused == 3);
  }
}

TEST_CASE("a name is in flight until the function that follows is called, on every rank") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 3, .domains = domains, .config = {}});
    std::barrier all(3);
    std::atomic<int> refused{0};
    std::atomic<bool> may_call{false};
    world.run([&](int rank, Engine& engine) {
      std::vector<float> first(10, 1.0F);
      std::vector<float> values(10, 1.0F);
      std::vector<float> others(10, 1.0F);
      // Functions are called one after the other: this one keeps the next ones waiting.
      const auto before = engine.submit(allreduce_of(first, "first", DataType::Float32));
      engine.then(*before, [&may_call] {
        while (!may_call) std::this_thread::yield();
      });
      engine.wait(*before);
      all.arrive_and_wait();
      const auto submit = [&] {
        return engine.submit(allreduce_of(values, "a", DataType::Float32));
      };
      std::shared_ptr<HandleState> pending;
      if (rank != 2) pending = submit();
      all.arrive_and_wait();
      if (rank == 2) pending = submit();
      engine.then(*pending, [] {});
      std::shared_ptr<HandleState> second;
      try {
        second = engine.submit(allreduce_of(others, "a", DataType::Float32));
      } catch (const DuplicateName&) {
        ++refused;
      }
      all.arrive_and_wait();
      may_call = true;
      engine.wait(*pending);
      all.arrive_and_wait();
      if (refused < 3 && !second)
        second = engine.submit(allreduce_of(others, "a", DataType::Float32));
      if (second) engine.wait(*second);
    });
    CHECK(refused == 3);
  }
}

TEST_CASE("what failed and was not waited for") {
  for (const int domains : {1, 2}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 2, .domains = domains, .config = {}});
    std::barrier all(2);
    world.run([&](int rank, Engine& engine) {
      std::vector<float> values(10 + static_cast<std::size_t>(rank), 1.0F);
      std::vector<float> same(10, 1.0F);
      for (int round = 0; round < 20; ++round) {
        // Blocking calls: no trace of those that failed.
        CHECK_THROWS_AS(
            engine.wait(*engine.submit(allreduce_of(values, "a", DataType::Float32), After::Wait)),
            Mismatch);
        engine.wait(*engine.submit(allreduce_of(same, "a", DataType::Float32), After::Wait));
        auto handle = engine.submit(allreduce_of(values, "b", DataType::Float32));
        CHECK_THROWS_AS(engine.wait(*handle), Mismatch);
        // while the one before is still there
        handle = engine.submit(allreduce_of(same, "b", DataType::Float32));
        engine.wait(*handle);
        handle = engine.submit(allreduce_of(same, "b", DataType::Float32));
        engine.wait(*handle);
        handle = engine.submit(allreduce_of(values, "b", DataType::Float32));
        CHECK_THROWS_AS(engine.wait(*handle), Mismatch);
        all.arrive_and_wait();
      }
    });
  }
}

TEST_CASE("threads drop handles of names that others submit again") {
  ThreadWorld world({.size = 2, .domains = 1, .config = {}});
  world.run([&](int, Engine& engine) {
    std::vector<std::vector<float>> values(64, std::vector<float>(10, 1.0F));
    for (int round = 0; round < 60; ++round) {
      std::vector<std::shared_ptr<HandleState>> handles;
      for (std::size_t i = 0; i < values.size(); ++i)
        handles.push_back(
            engine.submit(allreduce_of(values[i], std::to_string(i), DataType::Float32)));
      for (auto& handle : handles) {
        if (round % 3 == 0) engine.wait(*handle);
        if (round % 3 == 1)
          while (!engine.poll(*handle)) std::this_thread::yield();
        if (round % 3 == 2)
          for (HandleState nothing; !handle->done.load();) engine.poll(nothing);
      }
      std::thread dropping([&handles] { handles.clear(); });
      std::size_t refused = 0;
      for (std::size_t i = 0; i < values.size(); ++i) try {
          engine.wait(*engine.submit(
              allreduce_of(values[i], "x" + std::to_string(i), DataType::Float32), After::Wait));
        } catch (const DuplicateName&) {
          ++refused;
        }
      dropping.join();
      CHECK(refused == 0);
    }
  });
}

TEST_CASE(
    "a burst on a thread that never waits ends: the other waits for its last one, or nobody "
    "waits") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    Config config;
    config.cache_capacity = 256;
    ThreadWorld world({.size = 3, .domains = domains, .config = config});
    std::barrier all(3);
    world.run([&](int rank, Engine& engine) {
      for (int round = 0; round < 15; ++round) {
        std::vector<std::vector<float>> values(200, std::vector<float>(10, 1.0F));
        std::vector<std::shared_ptr<HandleState>> handles;
        for (std::size_t i = 0; i < values.size(); ++i) try {
            handles.push_back(engine.submit(
                allreduce_of(values[i], std::to_string(round % 7) + "." + std::to_string(i),
                             DataType::Float32)));
          } catch (const BackendError&) {
            FAIL("no room");
          }
        if (round % 3 == rank) {
          for (auto& handle : handles) engine.wait(*handle);
        } else {
          for (auto& handle : handles)
            while (!handle->done.load())
              std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
        handles.clear();
        all.arrive_and_wait();
      }
    });
  }
}

TEST_CASE("a name stays in flight while others take the place of its repeated operation") {
  for (const int domains : {1, 2})
    for (const int others : {20, 60, 200}) {
      CAPTURE(domains);
      CAPTURE(others);
      Config config;
      config.cache_capacity = 64;
      ThreadWorld world({.size = 2, .domains = domains, .config = config});
      std::barrier all(2);
      world.run([&](int /*rank*/, Engine& engine) {
        std::vector<float> values(10, 1.0F);
        std::vector<std::shared_ptr<HandleState>> unseen;
        std::vector<std::vector<float>> kept(20, std::vector<float>(10, 1.0F));
        for (int round = 0; round < 3; ++round) {
          unseen.clear();
          for (std::size_t i = 0; i < kept.size(); ++i) {
            unseen.push_back(engine.submit(
                allreduce_of(kept[i], "kept" + std::to_string(i), DataType::Float32)));
            for (HandleState nothing; !unseen.back()->done.load();) engine.poll(nothing);
          }
        }
        for (int i = 0; i < others; ++i)
          for (int times = 0; times < 3; ++times)
            engine.wait(*engine.submit(allreduce_of(values, std::to_string(i), DataType::Float32),
                                       After::Wait));
        all.arrive_and_wait();
        int refused = 0;
        std::vector<std::shared_ptr<HandleState>> again;
        for (std::size_t i = 0; i < kept.size(); ++i) try {
            again.push_back(engine.submit(
                allreduce_of(kept[i], "kept" + std::to_string(i), DataType::Float32)));
          } catch (const DuplicateName&) {
            ++refused;
          }
        CHECK(refused == static_cast<int>(kept.size()));
        for (const auto& pending : again) engine.wait(*pending);
        all.arrive_and_wait();
      });
    }
}

TEST_CASE(
    "bursts of a thread that drives nothing end beside threads that wait, poll, or are called "
    "back") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    Config config;
    config.process_sets = {{0, 1}, {1, 2, 3}, {2, 3}};
    ThreadWorld world({.size = 4, .domains = domains, .config = config});
    world.run([&](int rank, Engine& engine) {
      std::atomic<bool> over{false};
      const auto part = [&](int set, bool member, const std::string& prefix, int style) {
        if (!member) return;
        for (int round = 0; round < 40; ++round) {
          std::vector<std::vector<float>> values(30, std::vector<float>(10, 1.0F));
          std::vector<std::shared_ptr<HandleState>> handles;
          std::atomic<int> called{0};
          for (std::size_t i = 0; i < values.size(); ++i) {
            const auto number = (round + rank) % 2 == 0 ? i : values.size() - 1 - i;
            auto submission = allreduce_of(
                values[number], prefix + std::to_string(round) + "." + std::to_string(number),
                DataType::Float32);
            submission.process_set = set;
            handles.push_back(engine.submit(std::move(submission)));
            if (style == 3) engine.then(*handles.back(), [&called] { ++called; });
          }
          if (style == 0)
            for (auto& handle : handles)
              while (!handle->done.load())
                std::this_thread::sleep_for(std::chrono::microseconds(50));
          if (style == 1)
            for (auto& handle : handles) engine.wait(*handle);
          if (style == 2)
            for (auto& handle : handles)
              while (!engine.poll(*handle)) std::this_thread::yield();
          while (style == 3 && called < 30)
            std::this_thread::sleep_for(std::chrono::microseconds(50));
          for (auto& handle : handles) CHECK(handle->status.ok());
        }
      };
      std::thread a([&] { part(0, true, "a", (rank + 0) % 4); });
      std::thread b([&] { part(1, rank <= 1, "b", 0); });
      std::thread c([&] { part(2, rank >= 1, "c", (rank + 1) % 4); });
      part(3, rank >= 2, "d", 0);
      a.join();
      b.join();
      c.join();
    });
  }
}

TEST_CASE("a rank leaves early, and another thread ends its engine") {
  for (const int domains : {1, 2, 3})
    for (int early = 0; early < 3; ++early) {
      CAPTURE(domains);
      CAPTURE(early);
      Config config;
      config.process_sets = {{1, 2}, {0, 2}, {0, 1}};
      ThreadWorld world({.size = 3, .domains = domains, .config = config});
      world.run(
          [&](int rank, Engine& engine) {
            std::vector<float> values(100, 1.0F);
            for (int round = 0; round < 5; ++round)
              engine.wait(
                  *engine.submit(allreduce_of(values, "all", DataType::Float32), After::Wait));
            std::atomic<bool> called{false};
            const auto pending = engine.submit(allreduce_of(values, "last", DataType::Float32));
            engine.then(*pending, [&called] {
              std::this_thread::sleep_for(std::chrono::milliseconds(300));
              called = true;
            });
            if (rank == early) {
              CHECK(!engine.leave(std::chrono::milliseconds(20)));
              CHECK(pending->done.load());
              std::thread lasting([&] { CHECK(engine.shutdown()); });
              CHECK_THROWS_AS(engine.submit(allreduce_of(values, "x", DataType::Float32)),
                              Shutdown);
              engine.wait(*pending);
              lasting.join();
            } else {
              engine.wait(*pending);
              for (int round = 0; round < 200; ++round) {
                auto submission =
                    allreduce_of(values, "rest" + std::to_string(round % 50), DataType::Float32);
                submission.process_set = early + 1;
                engine.wait(*engine.submit(std::move(submission), After::Wait));
                std::this_thread::sleep_for(std::chrono::microseconds(300));
              }
              CHECK_THROWS_AS(engine.wait(*engine.submit(
                                  allreduce_of(values, "all", DataType::Float32), After::Wait)),
                              Shutdown);
              CHECK(engine.shutdown());
            }
            while (!called) std::this_thread::yield();
          },
          false);
    }
}

}  // namespace hvd::test
