/// Operations on the fast path whose callers come back for the result later, or never: in different
/// orders, several at once, and next to ranks that take the long way. (That a call which waits at
/// once costs no memory and gives the right values: fast_path_test.cc.)

#include "hvd/engine/core/repeated_op.h"

#include <doctest/doctest.h>

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "hvd/engine/engine.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using Ints = std::vector<std::int32_t>;

/// An allreduce of one rank that is started again and again.
struct Repeated {
  Engine& engine;
  std::string name;
  std::shared_ptr<Ints> values = std::make_shared<Ints>(3);
  Shape shape{3};
  std::weak_ptr<RepeatedOp> known = {};
  std::shared_ptr<RepeatedOp> op = nullptr;
  std::shared_ptr<HandleState> pending = nullptr;

  SmallCall call() {
    SmallCall call;
    call.name = name;
    call.dtype = DataType::Int32;
    call.shape = shape;
    call.input = call.output = values->data();
    call.op = ReduceOp::Sum;
    call.known = &known;
    return call;
  }
  void fill(int rank, int round) {
    for (std::size_t i = 0; i < values->size(); ++i)
      (*values)[i] = 100 * rank + 10 * round + static_cast<int>(i);
  }
  void submit(const std::shared_ptr<void>& owner = nullptr) {
    Submission submission = allreduce_of(*values, name, DataType::Int32);
    submission.keep_alive = owner;
    pending = engine.submit(std::move(submission), After::Repeat);
  }
  /// Returns whether it has taken the fast path.
  bool start() {
    op = engine.small_calls().start(call(), After::Repeat);
    if (!op) submit();
    return op != nullptr;
  }
  void wait() {
    if (!op) return engine.wait(*pending);
    engine.small_calls().finish(*op, call());
    op = nullptr;
  }
  [[nodiscard]] bool is_sum(int ranks, int round) const {
    for (std::size_t i = 0; i < values->size(); ++i) {
      const int sum = 100 * ranks * (ranks - 1) / 2 + ranks * (10 * round + static_cast<int>(i));
      if ((*values)[i] != sum) return false;
    }
    return true;
  }
};

TEST_CASE("repeated op: started in different orders, several at once, waited for or polled") {
  for (const int domains : {1, 2, 3})
    for (const int size : {1, 2, 4}) {
      if (size < domains) continue;
      CAPTURE(domains);
      CAPTURE(size);
      ThreadWorld world({.size = size, .domains = domains});
      std::atomic<int> fast = 0, wrong = 0;
      world.run([&](int rank, Engine& engine) {
        std::deque<Repeated> all;
        for (const char* name : {"a", "b", "c", "d", "e"}) all.push_back({engine, name});
        for (int round = 0; round < 60; ++round) {
          for (std::size_t i = 0; i < all.size(); ++i) {
            Repeated& one = all[(i + static_cast<std::size_t>(rank * round)) % all.size()];
            one.fill(rank, round);
            if (one.start()) ++fast;
          }
          for (std::size_t i = 0; i < all.size(); ++i) {
            Repeated& one = all[(i * 2 + static_cast<std::size_t>(rank)) % all.size()];
            while (round % 3 == 1 && !engine.poll(one.op ? *one.op->pending : *one.pending))
              continue;
            one.wait();
            wrong += one.is_sum(size, round) ? 0 : 1;
          }
        }
      });
      CHECK(wrong == 0);
      CHECK(fast > 0);
    }
}

TEST_CASE("repeated op: one that is known is left when another takes its place") {
  ThreadWorld world({.size = 2});
  std::atomic<int> wrong = 0;
  std::atomic<int> fast = 0;
  world.run([&](int rank, Engine& engine) {
    Repeated first{engine, "a"};
    Repeated other{engine, "a", std::make_shared<Ints>(5), {5}};
    for (int round = 0; round < 24; ++round) {
      Repeated& one = round / 6 % 2 == 0 ? first : other;  // each has the name for a while
      one.fill(rank, round);
      if (one.start()) ++fast;
      one.wait();
      wrong += one.is_sum(2, round) ? 0 : 1;
    }
  });
  CHECK(wrong == 0);
  CHECK(fast > 0);
}

TEST_CASE("repeated op: what nobody comes back for ends, and gives its memory back") {
  for (const bool long_way : {false, true}) {
    CAPTURE(long_way);
    ThreadWorld world({.size = 3});
    std::atomic<int> wrong = 0, abandoned = 0;
    std::atomic<bool> may_start = false;
    world.run([&](int rank, Engine& engine) {
      Repeated one{engine, "a"};
      for (int round = 0; round < 10; ++round) {
        one.fill(rank, round);
        one.start();
        one.wait();
        wrong += one.is_sum(3, round) ? 0 : 1;
      }
      one.fill(rank, 10);
      if (rank == 0) {
        const std::weak_ptr<Ints> memory = one.values;
        if (one.start()) {
          ++abandoned;
          engine.small_calls().abandon(std::exchange(one.op, nullptr), one.values);
          one.values = std::make_shared<Ints>(3);  // the engine has the last one
          CHECK_THROWS_AS(one.submit(), DuplicateName);
        }
        CHECK(!memory.expired());
        may_start = true;
        HandleState nothing;
        while (abandoned > 0 && !memory.expired()) engine.poll(nothing);
      } else {
        while (!may_start) std::this_thread::yield();
        if (long_way && rank == 1) {
          one.submit();
        } else {
          one.start();
        }
      }
      if (rank != 0) {
        one.wait();
        wrong += one.is_sum(3, 10) ? 0 : 1;
      }
      for (int round = 11; round < 16; ++round) {
        one.fill(rank, round);
        one.start();
        one.wait();
        wrong += one.is_sum(3, round) ? 0 : 1;
      }
    });
    CHECK(wrong == 0);
    CHECK(abandoned == 1);
  }
}

TEST_CASE("repeated op: a name is free once the others are done, also where nobody has looked") {
  for (const bool submits : {false, true}) {
    CAPTURE(submits);
    ThreadWorld world({.size = 2});
    std::atomic<int> wrong = 0, round_of_other = 0, round_of_first = 0;
    world.run([&](int rank, Engine& engine) {
      Repeated one{engine, "a"};
      for (int round = 1; round < 40; ++round) {
        one.fill(rank, round);
        if (rank == 0) {
          if (submits && round % 2 == 0) {
            one.submit();  // what was left before this has ended
            ++round_of_first;
            one.wait();
            continue;
          }
          const bool fast = one.start();
          ++round_of_first;
          if (!fast) {
            one.wait();
          } else {
            engine.small_calls().abandon(std::exchange(one.op, nullptr), one.values);
            // the other is in use as long as it is under way
            one.values = std::make_shared<Ints>(3);
            while (round_of_other < round) std::this_thread::yield();
          }
        } else {
          while (round_of_first < round) std::this_thread::yield();
          one.start();
          one.wait();
          wrong += one.is_sum(2, round) ? 0 : 1;
          round_of_other = round;
        }
      }
    });
    CHECK(wrong == 0);
  }
}

TEST_CASE("repeated op: shutdown ends what nobody comes back for") {
  const auto memory = std::make_shared<Ints>(3);
  {
    ThreadWorld world({.size = 2});
    world.run([&](int rank, Engine& engine) {
      Repeated one{engine, "a", rank == 0 ? memory : std::make_shared<Ints>(3)};
      for (int round = 0; round < 10; ++round) {
        one.start();
        one.wait();
      }
      if (rank == 0 && one.start())
        engine.small_calls().abandon(std::exchange(one.op, nullptr), one.values);
    });
    CHECK(memory.use_count() == 1);
  }
}

TEST_CASE("persistent op: its names are numbered by kind and process set") {
  ThreadWorld world({.size = 2});
  world.run([&](int /*rank*/, Engine& engine) {
    const std::string first = engine.persistent_name(0, OpKind::Allreduce);
    CHECK(first != engine.persistent_name(0, OpKind::Allreduce));
    CHECK(engine.persistent_name(0, OpKind::Broadcast) != first);
    CHECK(engine.persistent_name(1, OpKind::Allreduce) == first);
  });
}

}  // namespace
}  // namespace hvd::test
