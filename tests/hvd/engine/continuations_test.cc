/// Functions that follow operations (Handle::then): called once, however the operation ends, by a
/// thread that has nothing of the engine. Threads as ranks. The functions of all ranks are called
/// by one thread here, so none of them waits for another rank's.

#include "hvd/engine/core/continuations.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/engine/health/deadlocks.h"
#include "hvd/hvd.h"
#include "tests/support/deadlocks.h"
#include "tests/support/engine_probe.h"
#include "tests/support/sanitized.h"
#include "tests/support/shapes.h"
#include "tests/support/stderr_text.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

/// The handle of what a rank submits, as front ends make it.
Handle<float> start_sum(Engine& engine, std::vector<float>& values, const std::string& name,
                        std::shared_ptr<void> keep_alive = nullptr) {
  Submission submission = allreduce_of(values, name, DataType::Float32);
  submission.keep_alive = std::move(keep_alive);
  return {std::shared_ptr<Engine>(std::shared_ptr<void>(), &engine),
          engine.submit(std::move(submission)), [&values] { return values.front(); }};
}

/// Counts what was called. Whoever waits for that is no thread that drives.
class Called {
 public:
  void note() {
    const std::lock_guard lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  void wait_for(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return count_ >= count; });
  }
  int count() {
    const std::lock_guard lock(mutex_);
    return count_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

void each_world_of_handles(const std::function<void(ThreadWorld&, int size)>& body) {
  for (const auto& [size, domains] : kShapes) {
    CAPTURE(size);
    CAPTURE(domains);
    ThreadWorld world({.size = size, .domains = domains, .config = {}});
    body(world, size);
  }
}

/// What the operation of the handle has failed with.
template <class T>
std::string kind_of_failure(const Handle<T>& handle) {
  try {
    static_cast<void>(handle.wait());
    return "none";
  } catch (const Mismatch&) {
    return "Mismatch";
  } catch (const RankFailed&) {
    return "RankFailed";
  } catch (const Shutdown&) {
    return "Shutdown";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

TEST_CASE(
    "then: without anybody who waits, of operations of all sizes, new and repeated, and with their "
    "results") {
  each_world_of_handles([](ThreadWorld& world, int size) {
    const auto sum = static_cast<float>(size * (size + 1) / 2);
    world.run([&](int rank, Engine& engine) {
      Called called;
      std::atomic<int> wrong{0};
      int expected = 0;
      for (const std::size_t count : {std::size_t{1}, std::size_t{3000}, std::size_t{200000}}) {
        for (int round = 0; round < 6; ++round) {
          std::vector<float> values(count, static_cast<float>(rank + 1));
          start_sum(engine, values, "t" + std::to_string(count))
              .then([&](const Handle<float>& handle) {
                wrong += CallbackThread::is_here() && handle.done() && handle.wait_for(0s) &&
                                 handle.wait() == sum
                             ? 0
                             : 1;
                called.note();
              });
          called.wait_for(++expected);
        }
      }
      CHECK(wrong == 0);
      CHECK(called.count() == expected);
    });
  });
}

TEST_CASE(
    "then: functions of one operation are called once each, in their order, before its end and "
    "after it") {
  each_world_of_handles([](ThreadWorld& world, int size) {
    world.run([&](int rank, Engine& engine) {
      for (int round = 0; round < 20; ++round) {
        std::vector<float> values{static_cast<float>(rank)};
        std::vector<int> order;
        Called called;
        const auto note = [&](int which) {
          return [&order, &called, which] {
            order.push_back(which);
            called.note();
          };
        };
        const auto handle = start_sum(engine, values, "repeated");
        for (int which = 0; which < 5; ++which) handle.then(note(which));
        if (round % 2 == 1) CHECK(handle.wait() == static_cast<float>(size * (size - 1) / 2));
        for (int which = 5; which < 10; ++which) handle.then(note(which));
        called.wait_for(10);
        CHECK(std::is_sorted(order.begin(), order.end()));
        CHECK(order.size() == 10);
      }
    });
  });
}

TEST_CASE("then: a function may be one that cannot be copied, and what it owns ends with it") {
  ThreadWorld world({.size = 2, .config = {}});
  world.run([&](int rank, Engine& engine) {
    std::vector<float> values{static_cast<float>(rank + 1)};
    std::promise<float> promise;
    auto future = promise.get_future();
    Called ended;
    std::shared_ptr<void> end(nullptr, [&](void*) { ended.note(); });
    start_sum(engine, values, "promised")
        .then([promise = std::move(promise), end = std::move(end)](auto handle) mutable {
          promise.set_value(handle.wait());
        });
    CHECK(future.get() == 3);
    ended.wait_for(1);
  });
}

TEST_CASE(
    "then: whatever an operation fails with, its functions are called once and can ask for it") {
  const std::vector<std::pair<int, int>> worlds{{2, 1}, {4, 2}, {6, 3}};
  for (const auto& [size, domains] : worlds) {
    CAPTURE(size);
    CAPTURE(domains);
    ThreadWorld world({.size = size, .domains = domains, .config = {.log_level = LogLevel::Off}});
    std::atomic<int> died{0}, pending{0};
    const int ranks = size;
    world.run(
        [&](int rank, Engine& engine) {
          Called called;
          std::vector<std::string> errors;
          std::vector<float> differs(static_cast<std::size_t>(rank + 1)), late(3), repeated(1);
          const auto note = [&](const Handle<float>& handle) {
            errors.push_back(kind_of_failure(handle));
            called.note();
          };
          start_sum(engine, differs, "differs").then(note);
          called.wait_for(1);
          CHECK(errors == std::vector<std::string>{"Mismatch"});
          for (int round = 0; round < 4; ++round) sum_of(engine, "repeated", 1);
          if (rank == ranks - 1) {
            while (pending < ranks - 1) std::this_thread::sleep_for(1ms);
            return EngineProbe::die(engine);
          }
          // New ones, those that wait for their name, and those that the fast path has.
          std::vector<std::vector<float>> many(40, std::vector<float>(1));
          for (std::size_t i = 0; i < many.size(); ++i) start_sum(engine, many[i], "").then(note);
          start_sum(engine, repeated, "repeated").then(note);
          start_sum(engine, late, "late").then(note);
          ++pending;
          called.wait_for(43);
          died += static_cast<int>(std::count(errors.begin(), errors.end(), "RankFailed"));
          engine.shutdown();
          CHECK(called.count() == 43);
        },
        false);
    CHECK(died == 42 * (size - 1));
  }
}

TEST_CASE(
    "then: what is pending at shutdown() is called before that returns, with the operation's "
    "error") {
  each_world_of_handles([](ThreadWorld& world, int size) {
    if (size == 1) return;
    world.run([&](int rank, Engine& engine) {
      std::vector<float> alone(3), all(3, static_cast<float>(rank));
      std::vector<std::string> errors;  // of one thread after the other
      const auto note = [&](const Handle<float>& handle) {
        std::this_thread::sleep_for(1ms);
        errors.push_back(kind_of_failure(handle));
      };
      start_sum(engine, all, "all").then(note);
      if (rank == 0) start_sum(engine, alone, "alone").then(note);
      CHECK(engine.shutdown());
      std::sort(errors.begin(), errors.end());
      CHECK(errors == (rank == 0 ? std::vector<std::string>{"Shutdown", "none"}
                                 : std::vector<std::string>{"none"}));
      // And what comes later.
      Called called;
      std::vector<float> unused(1);
      Handle<float> refused;
      CHECK_THROWS_AS(refused.then([] {}), InvalidArgument);
      CHECK_THROWS_AS(refused = start_sum(engine, unused, "later"), Shutdown);
    });
  });
}

TEST_CASE("then: a function may be given after shutdown(), and may itself call it") {
  for (const int domains : {1, 2}) {
    ThreadWorld world({.size = 2, .domains = domains, .config = {}});
    std::array<Called, 2> called;
    world.run(
        [&](int rank, Engine& engine) {
          std::vector<float> values{1};
          const auto handle = start_sum(engine, values, "last");
          if (rank == 0)
            handle.then([&] {
              engine.shutdown();
              called[0].note();
            });
          if (rank == 0) return called[0].wait_for(1);
          CHECK(handle.wait() == 2);
          engine.shutdown();
          handle.then([&] { called[1].note(); });
          called[1].wait_for(1);
        },
        false);
  }
}

TEST_CASE("then: a function that throws is told of, and harms nobody") {
  const StderrText text;
  ThreadWorld world({.size = 2, .config = {}});
  world.run([&](int rank, Engine& engine) {
    std::vector<float> values{1}, more{2};
    Called called;
    const auto handle = start_sum(engine, values, "thrown");
    handle.then([] { throw std::runtime_error("the function's own mistake"); });
    if (rank == 0) handle.then([] { throw 7; });
    handle.then([&] { called.note(); });
    start_sum(engine, more, "more").then([&] { called.note(); });
    called.wait_for(2);
    CHECK(more.front() == 4);
  });
  CHECK(text.get().find(
            "a function that was given to Handle::then() has thrown: the function's own mistake") !=
        std::string::npos);
  CHECK(text.get().find("has thrown: an exception that is no std::exception") != std::string::npos);
}

TEST_CASE("then: what an operation keeps alive ends after its functions, in their thread") {
  each_world_of_handles([](ThreadWorld& world, int size) {
    constexpr int kRounds = 8;  // new at first, then repeated
    std::atomic<int> given{0};
    world.run([&](int rank, Engine& engine) {
      for (int round = 0; round < kRounds; ++round) {
        std::vector<float> values(round % 2 == 0 ? 1 : 100000, 1);
        const std::string name = "kept" + std::to_string(round % 2);
        if (rank == 0) {  // comes last
          while (given < (size - 1) * (round + 1)) std::this_thread::yield();
          CHECK(start_sum(engine, values, name).wait() == static_cast<float>(size));
          continue;
        }
        std::vector<char> order;  // of one thread
        Called ended;
        std::shared_ptr<void> memory(values.data(), [&](void*) {
          order.push_back(CallbackThread::is_here() ? 'm' : '!');
          ended.note();
        });
        const auto handle = start_sum(engine, values, name, std::move(memory));
        handle.then([&] { order.push_back('f'); });
        handle.then([&] { order.push_back('g'); });
        ++given;
        if (round % 3 == 0) CHECK(handle.wait() == static_cast<float>(size));
        ended.wait_for(1);

        CHECK(std::string(order.begin(), order.end()) == "fgm");
      }
    });
  });
}

TEST_CASE("then: a function may submit what its rank does next") {
  each_world_of_handles([](ThreadWorld& world, int size) {
    constexpr int kSteps = 30;
    // outlive the functions
    std::vector<std::function<void(int)>> steps(static_cast<std::size_t>(size));
    world.run([&](int rank, Engine& engine) {
      Called called;
      std::vector<std::vector<float>> values(kSteps,
                                             std::vector<float>{static_cast<float>(rank + 1)});
      auto& step = steps[static_cast<std::size_t>(rank)];
      step = [&](int now) {
        start_sum(engine, values[static_cast<std::size_t>(now)], "chain." + std::to_string(now % 4))
            .then([&, now] {
              if (now + 1 < kSteps) step(now + 1);
              called.note();
            });
      };
      step(0);
      called.wait_for(kSteps);
      for (const auto& of_step : values)
        CHECK(of_step.front() == static_cast<float>(size * (size + 1) / 2));
    });
  });
}

TEST_CASE("then: several threads submit, wait and give functions, in orders of their own") {
  const std::vector<std::pair<int, int>> worlds{{2, 1}, {3, 1}, {4, 2}, {3, 3}};
  const int rounds = kSanitized ? 20 : 100;
  for (const auto& [size, domains] : worlds) {
    CAPTURE(size);
    CAPTURE(domains);
    ThreadWorld world({.size = size, .domains = domains, .config = {}});
    const auto sum = static_cast<float>(size * (size + 1) / 2);
    world.run([&](int rank, Engine& engine) {
      std::atomic<int> wrong{0};
      const auto body = [&](int thread) {
        Called called;
        std::mt19937 random(static_cast<unsigned>(rank * 10 + thread));
        std::vector<std::vector<float>> values(static_cast<std::size_t>(rounds));
        std::vector<Handle<float>> handles;
        for (int round = 0; round < rounds; ++round) {
          auto& mine = values[static_cast<std::size_t>(round)];
          mine.assign(round % 7 == 0 ? 30000 : 4, static_cast<float>(rank + 1));
          const auto handle =
              start_sum(engine, mine, std::to_string(thread) + "." + std::to_string(round % 5));
          const auto look = [&](const Handle<float>& ended) {
            wrong += ended.wait() == sum ? 0 : 1;
            called.note();
          };
          const bool early = random() % 2 == 0;
          if (early) handle.then(look);
          if (random() % 3 == 0) std::this_thread::yield();
          handle.wait();  // its name comes again
          if (!early) handle.then(look);
        }
        called.wait_for(rounds);
      };
      std::thread other([&] { body(1); });
      body(0);
      other.join();
      CHECK(wrong == 0);
    });
  }
}

TEST_CASE("then: ranks that wait for one another are told so, also of what functions wait for") {
  const std::vector<std::pair<int, int>> worlds{{2, 1}, {3, 3}, {4, 2}};
  for (const auto& [size, domains] : worlds) {
    CAPTURE(size);
    CAPTURE(domains);
    ThreadWorld world({.size = size, .domains = domains, .config = {}});
    world.run([&](int rank, Engine& engine) {
      std::vector<float> values(1), besides(1);
      Called called;
      std::string error;
      const auto handle = start_sum(engine, values, rank == 0 ? "left" : "right");
      handle.then([&] { called.note(); });
      start_sum(engine, besides, rank == 0 ? "left too" : "right too")
          .then([&](const Handle<float>& ended) {
            error = kind_of_failure(ended);
            called.note();
          });
      const auto text = mismatch_of([&] { static_cast<void>(handle.wait()); });
      CHECK(text.find("wait for one another") != std::string::npos);
      called.wait_for(2);
      CHECK(error == "Mismatch");
    });
  }
}

TEST_CASE("then: a rank whose function goes on working waits for no one for ever") {
  const std::vector<std::pair<int, int>> worlds{{2, 1}, {3, 3}};
  for (const auto& [size, domains] : worlds) {
    CAPTURE(size);
    CAPTURE(domains);
    ThreadWorld world({.size = size, .domains = domains, .config = {}});
    const int ranks = size;
    world.run([&](int rank, Engine& engine) {
      std::vector<float> first{1}, second{1};
      Called called;
      start_sum(engine, first, "first").then([&, rank] {
        if (rank == 0) {
          // computes, and then submits what the others wait for
          std::this_thread::sleep_for(Deadlocks::kGrace + 1200ms);
          start_sum(engine, second, "second").then([&] { called.note(); });
        }
        called.note();
      });
      if (rank == 0) {
        CHECK(sum_of(engine, "third", 1) == static_cast<float>(ranks));
        called.wait_for(2);
      } else {
        const auto handle = start_sum(engine, second, "second");
        CHECK(handle.wait() == static_cast<float>(ranks));
        CHECK(sum_of(engine, "third", 1) == static_cast<float>(ranks));
        called.wait_for(1);
      }
    });
  }
}

TEST_CASE("then: a rank whose function waits for one that computes waits for no one for ever") {
  for (const int domains : {1, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 3, .domains = domains, .config = {.process_sets = {{0, 1}}}});
    world.run([&](int rank, Engine& engine) {
      std::vector<float> first{1}, of_two{1};
      Called called;
      if (rank == 2) std::this_thread::sleep_for(Deadlocks::kGrace + 1200ms);  // computes
      const auto handle = start_sum(engine, first, "first");
      if (rank == 0) {
        handle.then([&] {
          Submission submission = allreduce_of(of_two, "second", DataType::Float32);
          submission.process_set = 1;
          engine.submit(std::move(submission));
          called.note();
        });
        CHECK(sum_of(engine, "third", 1, 1) == 2);
        called.wait_for(1);
      } else if (rank == 1) {
        CHECK(sum_of(engine, "second", 1, 1) == 2);
        CHECK(sum_of(engine, "third", 1, 1) == 2);
      }
      CHECK(handle.wait() == 3);
    });
  }
}

}  // namespace hvd::test
