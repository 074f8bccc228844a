/// Operations without names of several threads: each thread gets its own results, or is refused.
/// Threads as ranks.

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "hvd/engine/engine.h"
#include "hvd/negotiation/values/unit_names.h"
#include "tests/support/error_of.h"
#include "tests/support/shapes.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

void each_world_with_threads(const std::function<void(ThreadWorld&, int size)>& body) {
  for (const auto& [size, domains] : kShapes) {
    CAPTURE(size);
    CAPTURE(domains);
    ThreadWorld world({.size = size, .domains = domains, .config = {}});
    body(world, size);
  }
}

/// The sum over the ranks of what they give, without a name unless one is given.
float sum(Engine& engine, float value, const std::string& name = {}) {
  std::vector<float> values{value};
  const Submission submission = allreduce_of(values, name, DataType::Float32);
  if (!engine.small_calls().try_run(call_of(submission)))
    engine.wait(*engine.submit(submission, After::Wait));
  return values.front();
}

/// Rounds of a thread whose results nobody else's can be taken for. Returns how many were wrong.
/// Ranks begin and pause at times of their own.
int wrong_rounds(Engine& engine, int rank, int size, int thread, const std::string& name) {
  int wrong = 0;
  for (int round = 0; round < 60; ++round) {
    if ((round * 7 + rank * 3 + thread) % 5 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(50 * ((rank + thread) % 3)));
    const float mine = static_cast<float>(1 + thread * 1000 + round);
    wrong += sum(engine, mine, name) == mine * static_cast<float>(size) ? 0 : 1;
  }
  return wrong;
}

}  // namespace

TEST_CASE(
    "threads: without names, the thread that called init() and one other have their own results "
    "each") {
  each_world_with_threads([](ThreadWorld& world, int size) {
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      engine.enter_init_thread();
      for (const std::string& name : {std::string(), library_name("tally")}) {
        std::thread other([&] { wrong += wrong_rounds(engine, rank, size, 1, name); });
        // there the other thread is first
        if (rank % 2 == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        wrong += wrong_rounds(engine, rank, size, 0, name);
        other.join();
      }
    });
    CHECK(wrong == 0);
  });
}

TEST_CASE(
    "threads: a third thread without names is refused at the call while the second lives, and told "
    "what to do") {
  each_world_with_threads([](ThreadWorld& world, int size) {
    world.run([&](int, Engine& engine) {
      engine.enter_init_thread();
      std::barrier meet(2);
      std::thread second([&] {
        CHECK(sum(engine, 2) == 2.0F * static_cast<float>(size));
        meet.arrive_and_wait();  // it lives, and nothing of it is under way
        meet.arrive_and_wait();
        CHECK(sum(engine, 4) == 4.0F * static_cast<float>(size));
      });
      meet.arrive_and_wait();
      std::thread third([&] {
        const std::string error = error_of<InvalidArgument>([&] { sum(engine, 3); });
        CHECK(error.find("allreduce without a name: another thread of this program has such "
                         "operations too") != std::string::npos);
        CHECK(error.find("options.name") != std::string::npos);
        CHECK(sum(engine, 3, "with a name") == 3.0F * static_cast<float>(size));
        CHECK(error_of<InvalidArgument>([&] {
                static_cast<void>(engine.persistent_name(0, OpKind::Allreduce));
              }) == "(no error)");
      });
      third.join();
      meet.arrive_and_wait();
      CHECK(sum(engine, 1) == static_cast<float>(size));
      second.join();
      CHECK(error_of<InvalidArgument>([&] {
              static_cast<void>(engine.persistent_name(0, OpKind::Allreduce));
            }) == "(no error)");
    });
  });
}

TEST_CASE(
    "threads: one after the other has ended goes on without names, as thread pools of one do") {
  each_world_with_threads([](ThreadWorld& world, int size) {
    world.run([&](int, Engine& engine) {
      engine.enter_init_thread();
      for (int i = 1; i <= 5; ++i) {
        std::thread([&] {
          for (int round = 0; round < 4; ++round)
            CHECK(sum(engine, static_cast<float>(i)) == static_cast<float>(i * size));
        }).join();
        CHECK(sum(engine, 100) == static_cast<float>(100 * size));
      }
    });
  });
}

TEST_CASE(
    "threads: in a program whose init() is in none of them, the first has the lane of that "
    "thread") {
  each_world_with_threads([](ThreadWorld& world, int size) {
    world.run([&](int, Engine& engine) {
      CHECK(sum(engine, 1) == static_cast<float>(size));
      std::thread([&] {
        CHECK(error_of<InvalidArgument>([&] { sum(engine, 2); }).find("without a name") !=
              std::string::npos);
      }).join();
      CHECK(sum(engine, 3) == static_cast<float>(3 * size));
    });
  });
}

TEST_CASE(
    "threads: what the library does is its caller's, and the other thread's by another name") {
  CHECK(is_library_name(library_name("tally")));
  CHECK(!is_library_name(library_name_of(library_name("tally"), Lane::InitThread)));
  CHECK(library_name_of(library_name("tally"), Lane::InitThread) !=
        library_name_of(library_name("tally"), Lane::OtherThread));
  CHECK(display_name(library_name("tally")) == "tally");
  CHECK(display_name(library_name_of(library_name("tally"), Lane::OtherThread)) == "tally.thread");
  CHECK(is_unnamed(library_name("tally")));
  CHECK(unnamed(OpKind::Barrier, 0, 3) != unnamed(OpKind::Barrier, 0, 3, Lane::OtherThread));
}

}  // namespace hvd::test
