/// Ranks that wait for one another are told so at once, on all of them, and go on; ranks that are
/// merely late are not. Threads as ranks.

#include "hvd/engine/health/deadlocks.h"

#include <doctest/doctest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/engine/engine.h"
#include "tests/support/deadlocks.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

const std::vector<std::pair<int, int>> kWorlds{{2, 1}, {4, 1}, {3, 3}, {5, 2}};

void each_stuck_world(const std::function<void(ThreadWorld&, int size)>& body,
                      const Config& config = {}) {
  for (const auto& [size, domains] : kWorlds) {
    CAPTURE(size);
    CAPTURE(domains);
    ThreadWorld world({.size = size, .domains = domains, .config = config});
    body(world, size);
  }
}

}  // namespace

TEST_CASE(
    "deadlocks: a rank that has left out a step is told of on all ranks, by the names that each "
    "waits for, and the world goes on") {
  each_stuck_world([](ThreadWorld& world, int size) {
    world.run([&](int rank, Engine& engine) { LeftOut(size).run(rank, engine); });
  });
}

TEST_CASE("deadlocks: what one rank alone waits for can end while it computes, however long") {
  each_stuck_world([](ThreadWorld& world, int size) {
    world.run([&](int rank, Engine& engine) {
      CHECK(sum_of(engine, "first", 1) == static_cast<float>(size));
      if (rank == 0) std::this_thread::sleep_for(Deadlocks::kGrace + 1200ms);
      CHECK(sum_of(engine, "second", 2) == static_cast<float>(2 * size));
    });
  });
}

TEST_CASE("deadlocks: a rank whose other thread still computes waits for no one for ever") {
  each_stuck_world([](ThreadWorld& world, int size) {
    world.run([&](int rank, Engine& engine) {
      std::thread other([&] {
        // Its wait may be over before it begins.
        std::vector<float> first{1};
        const auto pending = engine.submit(allreduce_of(first, "other's first", DataType::Float32));
        while (rank == 0 && !engine.poll(*pending)) std::this_thread::yield();
        engine.wait(*pending);
        CHECK(first.front() == static_cast<float>(size));
        if (rank == 0) std::this_thread::sleep_for(Deadlocks::kGrace + 1200ms);
        CHECK(sum_of(engine, "y", 3) == static_cast<float>(3 * size));
        if (rank != 0) CHECK(sum_of(engine, "x", 2) == static_cast<float>(2 * size));
      });
      if (rank == 0) CHECK(sum_of(engine, "x", 2) == static_cast<float>(2 * size));
      other.join();
    });
  });
}

TEST_CASE("deadlocks: process sets in a circle, while ranks outside of it compute") {
  for (const int domains : {1, 4}) {
    CAPTURE(domains);
    Config config;
    config.process_sets = {{0, 1}, {1, 2}, {0, 2}};
    ThreadWorld world({.size = 4, .domains = domains, .config = config});
    world.run([&](int rank, Engine& engine) {
      if (rank == 3) {
        std::this_thread::sleep_for(Deadlocks::kGrace);
      } else {
        // Set 1 is {0, 1}, set 2 {1, 2}, set 3 {0, 2}: each rank waits for the next.
        const auto error = mismatch_of([&] { sum_of(engine, "in a circle", 1, 1 + rank); });
        CHECK(error.find("wait for one another: rank 0 waits for allreduce 'in a circle' of "
                         "process set 1; rank 1") != std::string::npos);
        CHECK(error.find("rank 2 waits for allreduce 'in a circle' of process set 3") !=
              std::string::npos);
      }
      CHECK(sum_of(engine, "after", 1) == 4.0F);
    });
  }
}

TEST_CASE(
    "deadlocks: ranks that have joined are not waited for, and their join ends when the others "
    "have joined") {
  each_stuck_world([](ThreadWorld& world, int size) {
    if (size < 3) return;
    world.run([&](int rank, Engine& engine) {
      if (rank > 0) {
        const auto error = mismatch_of([&] { sum_of(engine, rank == 1 ? "left" : "right", 1); });
        CHECK(error.find("rank 1 waits for allreduce 'left'") != std::string::npos);
        CHECK(error.find("rank 0 waits for join 'join'") != std::string::npos);
      }
      Submission join;
      join.kind = OpKind::Join;
      join.name = std::string(kJoin);
      engine.wait(*engine.submit(std::move(join), After::Wait));
      CHECK(sum_of(engine, "after", 1) == static_cast<float>(size));
    });
  });
}

TEST_CASE("deadlocks: small operations that come back, and others that are under way beside them") {
  each_stuck_world([](ThreadWorld& world, int size) {
    world.run([&](int rank, Engine& engine) {
      for (int round = 0; round < 20; ++round)
        CHECK(sum_of(engine, "loss", 1) == static_cast<float>(size));
      // One rank has submitted more than it waits for: another one waits for some of that, and goes
      // on.
      std::vector<float> ahead{static_cast<float>(rank)};
      const auto pending = engine.submit(allreduce_of(ahead, "ahead", DataType::Float32));
      if (rank == size - 1) engine.wait(*pending);
      const auto error = mismatch_of([&] { sum_of(engine, rank == 0 ? "validation" : "loss", 1); });
      CHECK(error.find("rank 0 waits for allreduce 'validation'") != std::string::npos);
      engine.wait(*pending);
      CHECK(ahead.front() == static_cast<float>(size * (size - 1) / 2));
      for (int round = 0; round < 20; ++round)
        CHECK(sum_of(engine, "loss", 1) == static_cast<float>(size));
    });
  });
}

TEST_CASE("deadlocks: more operations in flight than there are names for") {
  std::vector<std::vector<float>> values(2, std::vector<float>(300, 1));
  each_stuck_world([&](ThreadWorld& world, int size) {
    world.run([&](int rank, Engine& engine) {
      for (const std::size_t waited : {std::size_t{0}, values[0].size() - 1}) {
        if (rank == 0) {
          std::vector<std::shared_ptr<HandleState>> pending;
          for (float& value : values[waited == 0 ? 0 : 1]) {
            Submission one;
            one.op = ReduceOp::Sum;
            one.tensors.push_back({&value, &value, DataType::Float32, {1}, nullptr, true});
            pending.push_back(engine.submit(std::move(one), After::Return));
          }
          CHECK_THROWS_AS(engine.wait(*pending[waited]), Deadlock);
          // what had no name yet goes with it: it would meet what the others submit next
          CHECK_THROWS_AS(engine.wait(*pending.back()), Deadlock);
        } else {
          CHECK_THROWS_AS(sum_of(engine, "weights", 1), Deadlock);
        }
        CHECK(sum_of(engine, "later", 1) == static_cast<float>(size));
        if (waited == 0) CHECK(sum_of(engine, "again", 1) == static_cast<float>(size));
      }
    });
  });
}

TEST_CASE("deadlocks: operations without names go on together after those that some ranks lacked") {
  each_stuck_world([](ThreadWorld& world, int size) {
    world.run([&](int rank, Engine& engine) {
      const auto sum = [&](int round) {
        CHECK(sum_of(engine, "", static_cast<float>(round)) == static_cast<float>(round * size));
      };
      for (const int before : {0, 6}) {  // negotiated; and repeated
        for (int round = 0; round < before; ++round) sum(round);
        if (rank == 0) {
          Submission barrier;
          barrier.kind = OpKind::Barrier;
          CHECK_THROWS_AS(engine.wait(*engine.submit(std::move(barrier), After::Wait)), Deadlock);
        } else {
          std::vector<float> values(3, 1);
          std::vector<std::shared_ptr<HandleState>> pending;
          for (float& value : values) {
            Submission one;
            one.op = ReduceOp::Sum;
            one.tensors.push_back({&value, &value, DataType::Float32, {1}, nullptr, true});
            pending.push_back(engine.submit(std::move(one), After::Return));
          }
          for (const auto& one : pending) CHECK_THROWS_AS(engine.wait(*one), Deadlock);
        }
        for (int round = 0; round < 10; ++round) sum(round);
      }
    });
  });
}

}  // namespace hvd::test
