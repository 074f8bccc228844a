/// Operations on the fast path whose callers come back for the result later, or never: in different
/// orders, several at once, and next to ranks that take the long way. (That a call which waits at
/// once costs no memory and gives the right values: fast_path_test.cc.)

#include "hvd/engine/core/repeated_op.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "hvd/engine/engine.h"
#include "tests/support/engine_probe.h"
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

/// Where the tensors of a group of two sums lie, in elements of a rank's memory.
struct Places {
  std::size_t input[2], output[2];
};

/// A group of two sums of one rank, which may lie elsewhere from call to call.
struct Group {
  static constexpr std::size_t kCount = 2;
  Engine& engine;
  bool waits;
  Ints values = Ints(5 * kCount, -1);
  Shape shape{kCount};

  void fill(int rank, const Places& at) {
    std::ranges::fill(values, -1);
    for (const std::size_t begin : at.input)
      for (std::size_t i = begin; i < begin + kCount; ++i)
        values[i] = 100 * rank + static_cast<int>(i);
  }
  /// Returns whether it has taken the fast path, as far as can be seen.
  bool run(const Places& at) {
    SmallTensor small[2];
    Submission submission = allreduce_of(values, "group", DataType::Int32);
    submission.tensors.clear();
    for (int i : {0, 1}) {
      small[i] = {&values[at.input[i]], &values[at.output[i]], shape};
      submission.tensors.push_back(
          {small[i].input, small[i].output, DataType::Int32, shape, nullptr, true});
    }
    SmallCall call = call_of(submission);
    call.group = small;
    if (waits && engine.small_calls().try_run(call)) return true;
    engine.wait(*engine.submit(std::move(submission), waits ? After::Wait : After::Return));
    return false;
  }
  [[nodiscard]] bool is_sum(int ranks, const Places& at) const {
    for (int i : {0, 1})
      for (std::size_t j = 0; j < kCount; ++j)
        if (values[at.output[i] + j] !=
            100 * ranks * (ranks - 1) / 2 + ranks * static_cast<int>(at.input[i] + j))
          return false;
    return true;
  }
};

TEST_CASE("repeated op: a group whose result comes to lie where another tensor does is refused") {
  const Places good[] = {{{0, 2}, {4, 6}}, {{0, 2}, {0, 2}}, {{0, 0}, {4, 6}},
                         {{2, 0}, {8, 6}}, {{0, 2}, {6, 2}}, {{0, 4}, {1, 6}}};
  const Places bad[] = {{{0, 2}, {4, 4}}, {{0, 2}, {4, 5}}, {{0, 2}, {2, 6}}, {{0, 2}, {6, 0}},
                        {{0, 2}, {3, 6}}, {{0, 2}, {0, 1}}, {{0, 0}, {0, 4}}, {{0, 2}, {2, 0}}};
  for (const int domains : {1, 2, 4})
    for (const bool waits : {true, false}) {
      CAPTURE(domains);
      CAPTURE(waits);
      ThreadWorld world({.size = 4, .domains = domains});
      std::atomic<int> fast = 0, wrong = 0, let_through = 0;
      world.run([&](int rank, Engine& engine) {
        Group group{engine, waits};
        const auto run = [&](const Places& at) {
          group.fill(rank, at);
          fast += group.run(at) ? 1 : 0;
          wrong += group.is_sum(4, at) ? 0 : 1;
        };
        const auto refuse = [&](const Places& at) {
          group.fill(rank, at);
          const Ints before = group.values;
          try {
            group.run(at);
            ++let_through;
          } catch (const InvalidArgument&) {
            wrong += group.values == before ? 0 : 1;
          }
        };
        run(good[0]);
        run(good[0]);
        for (const Places& overlapping : bad) {
          refuse(overlapping);
          refuse(overlapping);  // and is as new each time
          for (const Places& apart : good) {
            run(apart);
            run(apart);
            refuse(overlapping);
          }
        }
      });
      CHECK(let_through == 0);
      CHECK(wrong == 0);
      if (waits) CHECK(fast > 0);
    }
}

TEST_CASE("repeated op: none is made of a group that has more tensors than a small call") {
  constexpr std::size_t kLargest = limit(Limit::GroupTensors);
  for (const std::size_t tensors : {kLargest, kLargest + 1}) {
    CAPTURE(tensors);
    ThreadWorld world({.size = 2});
    std::atomic<std::size_t> made = 0;
    std::atomic<int> wrong = 0;
    world.run([&](int rank, Engine& engine) {
      Ints values(tensors);
      for (int round = 0; round < 6; ++round) {
        Submission group = allreduce_of(values, "group", DataType::Int32);
        group.tensors.clear();
        for (std::size_t i = 0; i < tensors; ++i) {
          values[i] = 100 * rank + round + static_cast<int>(i);
          group.tensors.push_back({&values[i], &values[i], DataType::Int32, {1}, nullptr, true});
        }
        engine.wait(*engine.submit(std::move(group), After::Wait));
        for (std::size_t i = 0; i < tensors; ++i)
          wrong += values[i] == 100 + 2 * (round + static_cast<int>(i)) ? 0 : 1;
      }
      made += EngineProbe::drop_repeated(engine);
    });
    CHECK(made.load() == (tensors == kLargest ? 2U : 0U));
    CHECK(wrong == 0);
  }
}

TEST_CASE("overlaps of a group, of any number of tensors") {
  std::vector<std::byte> memory(4000);
  std::vector<TensorMemory> group;
  for (std::size_t i = 0; i < 100; ++i)
    group.push_back({&memory[20 * i], &memory[2000 + 20 * i], 20});
  for (const std::size_t tensors : {0, 1, 2, 32, 33, 100}) {
    CAPTURE(tensors);
    std::vector<TensorMemory> some(group.begin(),
                                   group.begin() + static_cast<std::ptrdiff_t>(tensors));
    CHECK_FALSE(find_overlap(some).has_value());
    if (tensors < 2) continue;
    some.back().output = &memory[1];  // in the first input
    auto overlap = find_overlap(some);
    REQUIRE(overlap.has_value());
    CHECK(overlap->written == tensors - 1);
    CHECK(overlap->other == 0);
    some.back().bytes = 0;
    CHECK_FALSE(find_overlap(some).has_value());
  }
  CHECK_FALSE(TensorMemory{&memory[0], &memory[0], 20}.overlaps_in_part());
  CHECK_FALSE(TensorMemory{&memory[0], &memory[20], 20}.overlaps_in_part());
  CHECK(TensorMemory{&memory[0], &memory[19], 20}.overlaps_in_part());
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
