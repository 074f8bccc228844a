/// Small operations that come back under the same name: that they cost no memory, and that they
/// give what the general path gives, whichever way each rank goes.

#include <doctest/doctest.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <new>
#include <numeric>
#include <random>
#include <thread>

#include "hvd/engine/engine.h"
#include "tests/support/engine_probe.h"
#include "tests/support/random.h"
#include "tests/support/sanitized.h"
#include "tests/support/thread_world.h"

namespace {
thread_local std::size_t allocations = 0;
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Of the whole test program: counts what the thread allocates.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t /*bytes*/) noexcept {
  std::free(memory);
}
#endif

namespace hvd::test {
namespace {

constexpr OpKind kKinds[] = {OpKind::Allreduce, OpKind::Broadcast,     OpKind::Allgather,
                             OpKind::Alltoall,  OpKind::Reducescatter, OpKind::Barrier};

/// One operation of a rank, whose values follow from `round` and the rank.
struct Work {
  OpKind kind;
  int rank, size, round;
  std::string name;
  Shape shape;
  std::vector<std::int32_t> input, output;
  std::vector<std::int64_t> splits;
  // of an allreduce: the shapes of its tensors, one after the other in `input`; empty for one
  // tensor
  std::vector<Shape> group;
  std::vector<SmallTensor> small;

  /// `tensors`: of an allreduce, into how many its elements are cut, the last of them empty where
  /// there are more than two.
  Work(OpKind what, int of, int ranks, int number, std::string called, std::int64_t rows,
       std::int64_t tensors = 1)
      : kind(what), rank(of), size(ranks), round(number), name(std::move(called)), shape{rows, 3} {
    for (std::int64_t i = 0; i < 3 * rows; ++i) input.push_back(value(rank, i));
    if (tensors > 1 && kind == OpKind::Allreduce) {
      for (std::int64_t i = 1; i < tensors; ++i)
        group.push_back({i == 1 && tensors == 2 ? 1 : i == tensors - 1 ? 0 : 1});
      std::int64_t left = 3 * rows;
      for (const auto& one : group) left -= element_count(one);
      group.insert(group.begin(), {left});
    }
    std::int64_t result = rows;
    if (kind == OpKind::Allgather) result = rows * size;
    if (kind == OpKind::Alltoall) {  // the first rank gets what cannot be dealt evenly
      splits.assign(static_cast<std::size_t>(size), rows / size);
      splits.front() += rows % size;
      result = splits[static_cast<std::size_t>(rank)] * size;
    }
    if (kind == OpKind::Reducescatter)
      result = scattered_rows(rows, static_cast<std::size_t>(size), static_cast<std::size_t>(rank));
    output.assign(static_cast<std::size_t>(3 * result), -1);
  }
  [[nodiscard]] std::int32_t value(int of, std::int64_t i) const {
    return static_cast<std::int32_t>(1000 * of + 7 * round + static_cast<int>(i) % 5 + 1);
  }

  [[nodiscard]] SmallCall call() {
    SmallCall call;
    call.kind = kind;
    call.name = name;
    call.dtype = DataType::Int32;
    if (kind != OpKind::Barrier) {
      call.shape = shape;
      call.input = input.data();
      call.output = output.data();
      call.splits = splits;
    }
    std::int64_t at = 0;
    small.clear();
    for (const auto& one : group) {
      small.push_back({input.data() + at, output.data() + at, one});
      at += element_count(one);
    }
    call.group = small;
    call.op = ReduceOp::Sum;
    call.root = size - 1;
    return call;
  }
  [[nodiscard]] Submission submission() {
    Submission submission;
    submission.kind = kind;
    submission.name = name;
    submission.op = ReduceOp::Sum;
    submission.root = kind == OpKind::Broadcast ? size - 1 : 0;
    if (kind == OpKind::Barrier) return submission;
    std::int64_t at = 0;
    for (const auto& one : group) {
      submission.tensors.push_back(
          {input.data() + at, output.data() + at, DataType::Int32, one, nullptr, true});
      at += element_count(one);
    }
    if (!group.empty()) return submission;
    const bool by_rows = kind == OpKind::Allgather || kind == OpKind::Alltoall;
    submission.tensors.push_back({input.data(), by_rows ? nullptr : output.data(), DataType::Int32,
                                  shape, nullptr, true, splits});
    submission.allocate = [this](std::size_t /*index*/, std::int64_t /*rows*/) {
      return static_cast<void*>(output.data());
    };
    return submission;
  }
  void run(Engine& engine) {
    if (!engine.small_calls().try_run(call()))
      engine.wait(*engine.submit(submission(), After::Wait));
  }

  /// `absent`: ranks that have joined and count as zeros.
  [[nodiscard]] bool is_right(int absent = -1) const {
    const auto rows = shape.front();
    std::vector<std::int32_t> wanted;
    std::vector<std::int32_t> sums;
    for (std::int64_t i = 0; i < 3 * rows; ++i) {
      std::int32_t sum = 0;
      for (int of = 0; of < size; ++of) sum += of == absent ? 0 : value(of, i);
      sums.push_back(sum);
    }
    switch (kind) {
      case OpKind::Barrier: return true;
      case OpKind::Broadcast:
        for (std::int64_t i = 0; i < 3 * rows; ++i) wanted.push_back(value(size - 1, i));
        break;
      case OpKind::Allgather:
        for (int of = 0; of < size; ++of)
          for (std::int64_t i = 0; i < 3 * rows; ++i) wanted.push_back(value(of, i));
        break;
      case OpKind::Alltoall: {
        const auto before = std::accumulate(splits.begin(), splits.begin() + rank, std::int64_t{0});
        const auto own = splits[static_cast<std::size_t>(rank)];
        for (int of = 0; of < size; ++of)
          for (std::int64_t i = 3 * before; i < 3 * (before + own); ++i)
            wanted.push_back(value(of, i));
        break;
      }
      case OpKind::Reducescatter: {
        std::int64_t before = 0;
        for (int of = 0; of < rank; ++of)
          before +=
              scattered_rows(rows, static_cast<std::size_t>(size), static_cast<std::size_t>(of));
        const auto own =
            scattered_rows(rows, static_cast<std::size_t>(size), static_cast<std::size_t>(rank));
        wanted.assign(sums.begin() + 3 * before, sums.begin() + 3 * (before + own));
        break;
      }
      default: wanted = sums;
    }
    return output == wanted;
  }
};

}  // namespace

TEST_CASE(
    "lanes: a small operation that comes back allocates nothing, with and without a name, and "
    "gives the right values") {
  for (const int size : {1, 2, 3, 4}) {
    if (kSanitized && size == 4) continue;  // which takes as long as the others together
    for (const OpKind kind : kKinds) {
      for (const int way : {0, 1, 2}) {
        const bool named = way != 1;
        const int tensors = kind == OpKind::Allreduce && way == 2 ? 4 : 1;
        ThreadWorld world({.size = size, .config = {}});
        world.run([&](int rank, Engine& engine) {
          // as many names as there are for those without; in the last round others may be in
          // shutdown()
          constexpr int kWarm = 3 * 256;
          for (int round = 0; round < kWarm + 50; ++round) {
            Work work(kind, rank, size, round, named ? "again" : "", 5, tensors);
            const SmallCall call = work.call();
            const std::size_t before = allocations;
            const bool in_lane = engine.small_calls().try_run(call);
            const std::size_t made = allocations - before;
            if (!in_lane) engine.wait(*engine.submit(work.submission(), After::Wait));
            if (!work.is_right())
              FAIL_CHECK("wrong values in round " << round << " of kind "
                                                  << static_cast<int>(kind));
            if (round >= (named ? 3 : kWarm) && round < kWarm + 49 && (!in_lane || made > 0))
              FAIL_CHECK("size " << size << " round " << round << " of kind "
                                 << static_cast<int>(kind)
                                 << std::string(named ? "" : " without a name") << ": " << made
                                 << " allocations, "
                                 << std::string(in_lane ? "in its lane" : "without a lane"));
          }
          // what was pulled is given back when something else is staged
          Work last(OpKind::Allreduce, rank, size, 0, "last", 1);
          last.run(engine);
          CHECK(EngineProbe::drop_repeated(engine) >= 1);
          CHECK(world.arena(rank).used_bytes() == 0);
        });
      }
    }
  }
}

TEST_CASE(
    "lanes: memory for a result is asked for under no lock, and the block stays until it is "
    "copied") {
  for (const OpKind kind : {OpKind::Allgather, OpKind::Alltoall, OpKind::Reducescatter}) {
    ThreadWorld world({.size = 2, .config = {}});
    world.run([&](int rank, Engine& engine) {
      int asked = 0;
      for (int round = 0; round < 20; ++round) {
        Work work(kind, rank, 2, round, "again", 4);
        struct Asking {
          Work& work;
          Engine& engine;
          int& asked;
        } asking{work, engine, asked};
        SmallCall call = work.call();
        call.output = nullptr;
        call.context = &asking;
        call.allocate = [](void* context, std::int64_t) -> void* {
          auto& [mine, its_engine, count] = *static_cast<Asking*>(context);
          ++count;
          // What a user's allocation may well do: call the library again, and drop what is kept
          // under the name.
          static_cast<void>(its_engine.negotiator().sets().info(0));
          static_cast<void>(EngineProbe::drop_repeated(its_engine));
          return mine.output.data();
        };
        if (!engine.small_calls().try_run(call))
          engine.wait(*engine.submit(work.submission(), After::Wait));
        CHECK(work.is_right());
      }
      CHECK(asked > 0);
    });
  }
}

TEST_CASE("lanes: what is large has none") {
  for (const int domains : {1, 2}) {
    ThreadWorld world({.size = 2, .domains = domains, .config = {}});
    world.run([&](int rank, Engine& engine) {
      for (int round = 0; round < 10; ++round) {
        Work work(OpKind::Allreduce, rank, 2, round, "again", domains == 1 ? 2000 : 10000);
        CHECK_FALSE(engine.small_calls().try_run(work.call()));
        engine.wait(*engine.submit(work.submission(), After::Wait));
        CHECK(work.is_right());
      }
    });
  }
}

TEST_CASE("lanes: whichever way each rank goes, with few slots and other names in between") {
  for (const int size : {2, 3, 4}) {
    for (const std::uint32_t capacity : {16U, 256U}) {
      Config config;
      config.cache_capacity = capacity;
      for (int domains = 1; domains <= std::min(size, 3); ++domains) {
        CAPTURE(domains);
        ThreadWorld world(
            {.size = size, .domains = domains, .config = config, .cores = size < 4 ? 4U : 2U});
        world.run([&](int rank, Engine& engine) {
          std::mt19937 common(7), own(static_cast<unsigned>(rank) + 100);
          std::deque<std::pair<std::unique_ptr<Work>, std::shared_ptr<HandleState>>> under_way;
          const auto finish_one = [&] {
            engine.wait(*under_way.front().second);
            CHECK(under_way.front().first->is_right());
            under_way.pop_front();
          };
          for (int round = 0; round < (kSanitized ? 400 : 1000); ++round) {
            const auto kind = kKinds[common() % std::size(kKinds)];
            const auto letter = static_cast<char>('a' + common() % 3);
            const auto rows = static_cast<std::int64_t>(1 + (common() % 8 == 0 ? common() % 3 : 0));
            std::string name = common() % 4 == 0 ? "" : std::string(1, letter);
            if (common() % 16 == 0) name = "once " + std::to_string(round);
            const std::int64_t tensors = common() % 3 == 0 ? 2 + common() % 2 : 1;
            auto work = std::make_unique<Work>(kind, rank, size, round, name, rows, tensors);
            // An operation that is still under way under that name must end first, here and on all
            // ranks alike.
            const auto same = [&](const auto& other) {
              return !name.empty() && other.first->name == name && other.first->kind == kind;
            };
            while (std::any_of(under_way.begin(), under_way.end(), same)) finish_one();
            switch (own() % 4) {
              case 0: {
                auto pending = engine.submit(work->submission(), After::Return);
                under_way.emplace_back(std::move(work), std::move(pending));
                break;
              }
              case 1:
                engine.wait(*engine.submit(work->submission(), After::Wait));
                CHECK(work->is_right());
                break;
              default: work->run(engine); CHECK(work->is_right());
            }
            while (under_way.size() > 3) finish_one();
          }
          while (!under_way.empty()) finish_one();
        });
      }
    }
  }
}

TEST_CASE("lanes: who has fallen asleep is woken by the rank that does the work for it") {
  constexpr int kRounds = kSanitized ? 100 : 600;
  for (const int size : {2, 3}) {
    ThreadWorld world({.size = size, .config = {}, .cores = 4});
    world.run([&](int rank, Engine& engine) {
      std::mt19937 common(5);
      int overslept = 0;
      for (int round = 0; round < kRounds; ++round) {
        Work work(OpKind::Allreduce, rank, size, round, "again", 1);
        const auto late = static_cast<int>(common() % static_cast<unsigned>(size));
        // a waiting rank looks for about 100 us, then falls asleep
        const std::chrono::microseconds pause(common() % 400);
        if (rank == late) std::this_thread::sleep_for(pause);
        const auto begin = std::chrono::steady_clock::now();
        work.run(engine);
        // it wakes by itself after 100
        if (std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(90)) ++overslept;
        if (!work.is_right()) FAIL_CHECK("wrong values in round " << round);
      }
      CHECK(overslept <= 1 + kRounds / 100);  // where the machine did not stand still
    });
  }
}

TEST_CASE(
    "lanes: a rank that sends something else, joins, or calls shutdown() is noticed as ever") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 3, .domains = domains, .config = {}});
    world.run([&](int rank, Engine& engine) {
      const auto steady = [&](int rounds) {
        for (int round = 0; round < rounds; ++round) {
          Work work(OpKind::Allreduce, rank, 3, round, "a", 2);
          work.run(engine);
          CHECK(work.is_right());
        }
      };
      steady(5);
      Work odd(OpKind::Allreduce, rank, 3, 0, "a", rank == 1 ? 3 : 2);
      CHECK_THROWS_AS(odd.run(engine), Mismatch);
      steady(5);
      if (rank == 2) {
        Submission join;
        join.kind = OpKind::Join;
        join.name = kJoin;
        engine.wait(*engine.submit(join, After::Wait));
      } else {
        for (int round = 0; round < 20; ++round) {
          Work work(OpKind::Allreduce, rank, 3, round, "a", 2);
          work.run(engine);
          CHECK(work.is_right(2));
        }
        Submission join;
        join.kind = OpKind::Join;
        join.name = kJoin;
        engine.wait(*engine.submit(join, After::Wait));
      }
      steady(5);
      if (rank == 0) return;  // and calls shutdown()
      Work last(OpKind::Allreduce, rank, 3, 0, "a", 2);
      CHECK_THROWS_AS(last.run(engine), Shutdown);
    });
  }
}

TEST_CASE(
    "more submissions without a name than there are names wait their turn, in any order of "
    "waiting, and before a join") {
  for (const int domains : {1, 2}) {
    Config config;
    config.cache_capacity = 32;  // eight names
    ThreadWorld world({.size = 3, .domains = domains, .config = config});
    world.run([&](int rank, Engine& engine) {
      for (int phase = 0; phase < 3; ++phase) {
        constexpr int kMany = 50;
        std::deque<std::vector<float>> values;
        std::vector<std::shared_ptr<HandleState>> pending;
        for (int i = 0; i < kMany; ++i) {
          values.emplace_back(4, static_cast<float>(i + rank));
          pending.push_back(engine.submit(allreduce_of(values.back(), "", DataType::Float32)));
        }
        if (phase == 1) {
          Submission join;
          join.kind = OpKind::Join;
          join.name = kJoin;
          engine.wait(*engine.submit(join, After::Wait));
        }
        for (int i = 0; i < kMany; ++i) {
          const auto which = static_cast<std::size_t>(rank == 0 ? i : kMany - 1 - i);
          engine.wait(*pending[which]);
          CHECK(values[which] == std::vector<float>(4, static_cast<float>(3 * which + 3)));
        }
      }
    });
  }
}

}  // namespace hvd::test
