/// Names, numbers and places of what ranks introduce: groups that come back larger, unnamed calls
/// before a join, sets that are removed, tables that fill up. Whole engines as threads.

#include <doctest/doctest.h>

#include <atomic>
#include <barrier>
#include <functional>
#include <string>
#include <thread>

#include "hvd/engine/engine.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

Submission group_of(std::vector<std::vector<float>>& values, std::string name) {
  Submission group;
  group.name = std::move(name);
  group.op = ReduceOp::Sum;
  for (auto& one : values)
    group.tensors.push_back({one.data(),
                             one.data(),
                             DataType::Float32,
                             {static_cast<std::int64_t>(one.size())},
                             nullptr,
                             true});
  return group;
}

Submission joining() {
  Submission join;
  join.kind = OpKind::Join;
  join.name = kJoin;
  return join;
}

Submission control(std::string_view name, Shape ranks, int root) {
  Submission submission;
  submission.kind = OpKind::Control;
  submission.name = name;
  submission.root = root;
  submission.tensors.push_back(
      {nullptr, nullptr, DataType::Int64, std::move(ranks), nullptr, true});
  return submission;
}

/// Submits ever new names in a set of this rank alone, which crowd others out of its host's table.
void crowd_out_until(const std::function<bool()>& is_over, Engine& engine, int process_set) {
  for (int i = 0; !is_over(); ++i) {
    std::vector<float> values(1, 1.0F);
    Submission own = allreduce_of(values, "own " + std::to_string(i), DataType::Float32);
    own.process_set = process_set;
    engine.wait(*engine.submit(std::move(own), After::Wait));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// Waits for what other ranks disagree about. Returns what this one is told.
std::string text_of_dispute(Engine& engine, OpKind kind) {
  std::vector<float> values(1, 1.0F);
  Submission disputed = allreduce_of(values, "disputed", DataType::Float32);
  disputed.process_set = 1;
  disputed.kind = kind;
  try {
    engine.wait(*engine.submit(std::move(disputed), After::Wait));
  } catch (const Mismatch& error) {
    return error.what();
  }
  return "no Mismatch";
}

/// The name can be used again, by all.
void check_that_all_go_on(Engine& engine, int size) {
  std::vector<float> values(1, 1.0F);
  engine.wait(*engine.submit(allreduce_of(values, "disputed", DataType::Float32)));
  CHECK(values.front() == static_cast<float>(size));
}

}  // namespace

TEST_CASE("a name may come back with a larger group") {
  for (const int domains : {1, 2}) {
    ThreadWorld world({.size = 2, .domains = domains, .config = {}});
    world.run([](int, Engine& engine) {
      for (const std::size_t tensors : {1U, 4U, 2U, 7U}) {
        std::vector<std::vector<float>> values(tensors, std::vector<float>(5, 1.0F));
        engine.wait(*engine.submit(group_of(values, "group")));
        CHECK(values == std::vector<std::vector<float>>(tensors, std::vector<float>(5, 2.0F)));
      }
    });
  }
}

TEST_CASE(
    "ranks that have made different numbers of unnamed calls before a join go on together after "
    "it") {
  for (const int domains : {1, 3}) {
    ThreadWorld world({.size = 3, .domains = domains, .config = {}});
    world.run([](int rank, Engine& engine) {
      for (int round = 0; round < 20; ++round) {
        // Rank r takes part r times, and rank 2 is the last to join.
        for (int i = 0; i < rank; ++i) {
          std::vector<float> values(3, 1.0F);
          engine.wait(*engine.submit(allreduce_of(values, "", DataType::Float32), After::Wait));
          CHECK(values == std::vector<float>(3, static_cast<float>(2 - i)));
        }
        const auto joined = engine.submit(joining(), After::Wait);
        engine.wait(*joined);
        CHECK(joined->value == 2);
        std::vector<float> values(3, 1.0F);
        engine.wait(*engine.submit(allreduce_of(values, "", DataType::Float32), After::Wait));
        CHECK(values == std::vector<float>(3, 3.0F));
      }
    });
  }
}

TEST_CASE("what waits in a process set that is removed fails, and its places are free again") {
  Config config;
  config.cache_capacity = 16;
  for (const int domains : {1, 2}) {
    ThreadWorld world({.size = 3, .domains = domains, .config = config});
    world.run([](int rank, Engine& engine) {
      for (int round = 0; round < 20; ++round) {
        const auto made = engine.submit(control(kAddProcessSet, {0, 1, 2}, 0), After::Wait);
        engine.wait(*made);
        std::vector<float> values(3, 1.0F);
        Submission alone = allreduce_of(values, "alone", DataType::Float32);
        alone.process_set = static_cast<int>(made->value);
        std::shared_ptr<HandleState> pending;
        if (rank == 1) pending = engine.submit(alone);
        engine.wait(*engine.submit(
            control(kRemoveProcessSet, {0, 1, 2}, static_cast<int>(made->value)), After::Wait));
        if (pending) CHECK_THROWS_AS(engine.wait(*pending), InvalidArgument);
        CHECK_THROWS_AS(engine.submit(alone), InvalidArgument);
      }
    });
  }
}

TEST_CASE("ranks that do not take part and read late do not make a table full") {
  Config config;
  config.cache_capacity = 16;
  config.process_sets = {{0, 1}};
  for (const int domains : {1, 2, 3}) {
    ThreadWorld world({.size = 3, .domains = domains, .config = config});
    world.run([](int rank, Engine& engine) {
      for (int i = 0; rank < 2 && i < 200; ++i) {
        std::vector<float> values(3, 1.0F);
        Submission submission =
            allreduce_of(values, i % 2 == 0 ? "" : "name." + std::to_string(i), DataType::Float32);
        submission.process_set = 1;
        engine.wait(*engine.submit(std::move(submission), After::Wait));
        CHECK(values == std::vector<float>(3, 2.0F));
      }
    });
  }
}

TEST_CASE("a host that takes no part may forget a tensor between two ranks' introductions of it") {
  Config config;
  config.cache_capacity = 16;
  config.process_sets = {{1, 2}, {0}};
  ThreadWorld world({.size = 3, .domains = 3, .config = config});
  std::barrier meet(3);
  world.run([&](int rank, Engine& engine) {
    for (int round = 0; round < 10; ++round) {
      std::vector<float> values(3, 1.0F);
      Submission both = allreduce_of(values, "both", DataType::Float32);
      both.process_set = 1;
      both.prescale_factor = round;  // so that it is introduced again
      std::shared_ptr<HandleState> pending;
      if (rank == 1) {
        pending = engine.submit(both);
        for (int i = 0; i < 100; ++i) engine.poll(*pending);
      }
      meet.arrive_and_wait();
      for (int i = 0; rank == 0 && i < 40; ++i) {
        std::vector<float> own(1, 1.0F);
        Submission alone = allreduce_of(
            own, "own " + std::to_string(round) + "." + std::to_string(i), DataType::Float32);
        alone.process_set = 2;
        engine.wait(*engine.submit(alone, After::Wait));
        // rank 1's words arrive
        if (i == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      meet.arrive_and_wait();
      if (rank == 2) pending = engine.submit(both);
      if (!pending) continue;
      engine.wait(*pending);
      CHECK(values == std::vector<float>(3, static_cast<float>(2 * round)));
    }
  });
}

TEST_CASE("a host that takes no part may have forgotten what ranks of others disagree about") {
  for (const int idle : {0, 1, 2}) {
    CAPTURE(idle);
    const int first = idle == 0 ? 1 : 0;
    const int last = idle == 2 ? 1 : 2;
    Config config;
    config.cache_capacity = 16;
    config.process_sets = {{first, last}, {idle}};
    ThreadWorld world({.size = 3, .domains = 3, .config = config});
    std::atomic<int> told = 0;
    world.run([&](int rank, Engine& engine) {
      for (int round = 1; round < 3; ++round) {
        if (rank == idle) {
          crowd_out_until([&] { return told == 2 * round; }, engine, 2);
        } else {
          const bool gathers = rank == (round == 1 ? first : last);
          const std::string text =
              text_of_dispute(engine, gathers ? OpKind::Allgather : OpKind::Allreduce);
          CHECK(text.find("the operation differs between ranks") != std::string::npos);
          ++told;
        }
        check_that_all_go_on(engine, 3);
      }
    });
    CHECK(told == 4);
  }
}

TEST_CASE("a host may have forgotten what others want instead of what a rank of it waits for") {
  Config config;
  config.cache_capacity = 16;
  config.process_sets = {{0, 2}, {1}, {3}};
  ThreadWorld world({.size = 4, .domains = 2, .config = config});
  std::atomic<int> told = 0;
  world.run([&](int rank, Engine& engine) {
    if (rank % 2 == 1) {
      crowd_out_until([&] { return told == 2; }, engine, rank == 1 ? 2 : 3);
    } else {
      const std::string text =
          text_of_dispute(engine, rank == 0 ? OpKind::Allreduce : OpKind::Allgather);
      CHECK(text.find("rank 0: allreduce; rank 2: allgather") != std::string::npos);
      ++told;
    }
    check_that_all_go_on(engine, 4);
  });
  CHECK(told == 2);
}

}  // namespace hvd::test
