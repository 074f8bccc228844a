/// What goes beyond one operation, on raw buffers and with processes as ranks: functions that
/// follow operations, their deadlines, and the end of the world by one rank.

#include "hvd/hvd.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/mpi_world.h"
#include "tests/support/running.h"
#include "tests/support/sanitized.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

Buffer whole(std::vector<float>& values) {
  return {values.data(), DataType::Float32, {static_cast<std::int64_t>(values.size())}, {}};
}

void await(const std::atomic<int>& count, int expected) {
  while (count < expected) std::this_thread::sleep_for(1ms);
}

}  // namespace

TEST_CASE(
    "then: the functions of every operation are called while nobody waits, and may use its "
    "result") {
  in_both_worlds([] {
    const auto n = static_cast<std::size_t>(size());
    const float sum = static_cast<float>(n * (n + 1) / 2);
    for (int round = 0; round < 5; ++round) {
      std::atomic<int> called{0}, wrong{0};
      std::vector<float> in(4 * n, static_cast<float>(rank() + 1)), out(in.size()), sent(in),
          group(in), into(4 * n * n), part(4), rows(in);
      const auto check = [&](bool right) {
        wrong += right ? 0 : 1;
        ++called;
      };
      allreduce_async(whole(in), whole(out), {.name = "allreduce", .op = ReduceOp::Sum}).then([&] {
        check(out.back() == sum);
      });
      grouped_allreduce_async({whole(group)}, {whole(group)},
                              {.name = "group", .op = ReduceOp::Sum})
          .then([&](const auto& handle) {
            handle.wait();
            check(group.front() == sum);
          });
      broadcast_async(whole(sent), {.name = "broadcast"}).then([&] { check(sent.back() == 1); });
      allgather_async(whole(in), {.name = "allgather"}).then([&](const Handle<Gathered>& handle) {
        check(handle.wait().shape == Shape{static_cast<std::int64_t>(4 * n * n)});
      });
      alltoall_async(whole(in), {.name = "alltoall"}).then([&](const Handle<Exchanged>& handle) {
        check(handle.wait().received_splits == std::vector<std::int64_t>(n, 4));
      });
      reducescatter_async(whole(in), {.name = "reducescatter", .op = ReduceOp::Sum})
          .then([&](const Handle<Gathered>& handle) { check(handle.wait().shape == Shape{4}); });
      allgather_into_async(whole(into), whole(in), {.name = "allgather_into"}).then([&] {
        check(into.back() == static_cast<float>(n));
      });
      alltoall_into_async(whole(rows), whole(in), {.name = "alltoall_into"})
          .then([&](const auto& handle) {
            check(handle.wait() == std::vector<std::int64_t>(n, 4) &&
                  rows.back() == static_cast<float>(n));
          });
      reducescatter_into_async(whole(part), whole(in), {.name = "into", .op = ReduceOp::Sum})
          .then([&] { check(part.front() == sum); });
      await(called, 9);
      CHECK(wrong == 0);
    }
  });
}

TEST_CASE(
    "then: a function may wait for operations of its own, while the program's threads wait for "
    "others") {
  in_both_worlds([] {
    const float sum = static_cast<float>(size() * (size() + 1) / 2);
    std::atomic<int> called{0}, wrong{0};
    for (int round = 0; round < 20; ++round) {
      std::vector<float> first(100, static_cast<float>(rank() + 1)),
          second(round % 2 == 0 ? 3 : 50000, static_cast<float>(rank() + 1)), third(first);
      allreduce_async(whole(first), whole(first), {.name = "first", .op = ReduceOp::Sum}).then([&] {
        allreduce(whole(second), whole(second), {.name = "second", .op = ReduceOp::Sum});
        barrier();
        wrong += first.front() == sum && second.back() == sum ? 0 : 1;
        ++called;
      });
      allreduce(whole(third), whole(third), {.name = "third", .op = ReduceOp::Sum});
      CHECK(third.back() == sum);
      await(called, round + 1);
    }
    CHECK(wrong == 0);
  });
}

TEST_CASE("then: what is pending at shutdown() is called by then, and init() may follow") {
  for (int round = 0; round < 3; ++round) {
    std::vector<float> all(10, 1.0F), alone(10, 1.0F);
    int ended = 0, failed = 0;
    {
      const Running running;
      allreduce_async(whole(all), whole(all), {.name = "all"}).then([&] { ++ended; });
      if (rank() == 0 && size() > 1) {
        allreduce_async(whole(alone), whole(alone), {.name = "alone"})
            .then([&](const Handle<void>& handle) {
              try {
                handle.wait();
              } catch (const Shutdown&) {
                ++failed;
              }
            });
      }
      if (rank() != 0 || size() == 1) ++failed;
    }
    CHECK(ended == 1);
    CHECK(failed == 1);
  }
}

TEST_CASE("then: in a process that was forked nothing is called, and nothing can be given") {
  if (kSanitized) return;  // which do not like fork()
  const Running running;
  std::vector<float> values(10, 1.0F);
  std::atomic<int> called{0};
  const auto handle =
      allreduce_async(whole(values), whole(values), {.name = "forked", .op = ReduceOp::Max});
  handle.then([&] { ++called; });
  await(called, 1);
  std::vector<float> alone(10, 1.0F);
  const auto pending =
      allreduce_async(whole(alone), whole(alone), {.name = "rank " + std::to_string(rank())});
  pending.then([&] { ++called; });
  if (size() == 1) await(called, 2);
  const int before = called;
  const pid_t child = ::fork();
  if (child == 0) {
    bool refused = false;
    try {
      handle.then([&] { ++called; });
    } catch (const NotInitialized&) {
      refused = true;
    }
    std::this_thread::sleep_for(100ms);
    ::_exit(refused && called == before ? 0 : 1);
  }
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  shutdown();
  CHECK(called == 2);
}

TEST_CASE(
    "deadlines: each operation may have one, each start of a persistent operation anew, and the "
    "one that is not met is told of") {
  for (const bool shares_memory : {true, false}) {
    CAPTURE(shares_memory);
    Config config;
    config.log_level = LogLevel::Off;
    if (!shares_memory) config.shared_memory = SharedMemory::Off;
    init(config);
    const auto n = static_cast<std::size_t>(size());
    const bool is_last = rank() == size() - 1;
    std::vector<float> in(4 * n, 1.0F), out(in), all(4 * n * n), part(4);
    for (int round = 0; round < 4; ++round) {
      // the first rounds make the fast path that the others do not take
      const auto time = round < 2 ? 0min : 10min;
      allreduce(whole(in), whole(out), {.name = "a", .op = ReduceOp::Sum, .deadline = time});
      CHECK(out.front() == static_cast<float>(n));
      broadcast(whole(in), {.name = "b", .deadline = is_last ? time : 0min});
      CHECK(allgather(whole(in), {.name = "g", .deadline = time}).shape.front() ==
            static_cast<std::int64_t>(4 * n * n));
      CHECK(alltoall(whole(in), {.name = "t", .deadline = time}).received_splits.back() == 4);
      CHECK(reducescatter(whole(in), {.name = "r", .deadline = time}).shape.front() == 4);
      allgather_into(whole(all), whole(in), {.name = "gi", .deadline = time});
      reducescatter_into(whole(part), whole(in), {.name = "ri", .deadline = time});
    }
    std::vector<float> kept(8, 1.0F);
    auto persistent = allreduce_init(
        whole(kept), {.name = "p", .op = ReduceOp::Max, .deadline = is_last ? 1s : 10min});
    for (int start = 0; start < 5; ++start) {
      persistent.start();
      persistent.wait();
      CHECK(kept.front() == 1);
      // the deadline of a start is over with it
      if (start == 2) std::this_thread::sleep_for(1200ms);
    }
    CHECK_THROWS_AS(allreduce(whole(in), whole(out), {.name = "negative", .deadline = -1s}),
                    InvalidArgument);
    if (size() > 1) {
      barrier();
      if (rank() != 0) persistent.start();
      const std::string words =
          "allreduce 'p' of rank " + std::to_string(size() - 1) +
          " has not ended by its deadline of 1 s: rank 0 has not submitted it";
      if (rank() != 0) CHECK_THROWS_WITH_AS(persistent.wait(), words.c_str(), StallTimeout);
      if (rank() == 0) {
        const auto other = allreduce_async(whole(in), whole(out), {.name = "other"});
        // one that waits could be in a deadlock
        while (!other.done()) std::this_thread::sleep_for(1ms);
        CHECK_THROWS_WITH_AS(other.wait(), words.c_str(), StallTimeout);
      }
    }
    persistent = {};
    shutdown();
  }
}

TEST_CASE("a process set ends with its world") {
  init();
  const ProcessSet before = add_process_set({0}), all = process_set(0);
  shutdown();
  init();
  std::vector<int> ranks(static_cast<std::size_t>(size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const ProcessSet now = add_process_set(ranks);
  CHECK(now.id() == before.id());
  CHECK(now != before);
  CHECK_THROWS_AS(static_cast<void>(before.size()), NotInitialized);
  std::vector<float> values(3, 1);
  CHECK_THROWS_AS(allreduce(whole(values), whole(values), {.process_set = before}),
                  InvalidArgument);
  allreduce(whole(values), whole(values), {.op = ReduceOp::Sum, .process_set = now});
  CHECK(values.front() == static_cast<float>(size()));
  CHECK(all.size() == size());
  shutdown();
  CHECK_THROWS_AS(allreduce(whole(values), whole(values), {.process_set = now}), NotInitialized);
}

TEST_CASE("barrier_async, join_async: return at once, and are done when all have called") {
  init();
  for (int round = 0; round < 5; ++round) {
    // Ranks may take either form.
    if ((rank() + round) % 2 == 0) {
      barrier();
    } else {
      barrier_async().wait();
    }
  }
  const bool is_late = rank() > 0 && rank() + 1 == size();
  Handle<void> met = is_late ? Handle<void>() : barrier_async();
  if (rank() == 0 && size() > 1) CHECK(!met.wait_for(std::chrono::milliseconds(20)));
  MPI_Barrier(MPI_COMM_WORLD);
  if (is_late) met = barrier_async();
  met.wait();
  std::vector<float> values(3, 1);
  const bool joins = rank() == 0;
  Handle<int> joined = joins ? join_async() : Handle<int>();
  if (joins) {
    if (size() > 1) CHECK_THROWS_AS(allreduce(whole(values), whole(values)), Joined);
    MPI_Barrier(MPI_COMM_WORLD);  // the others join after this
  } else {
    allreduce(whole(values), whole(values), {.op = ReduceOp::Sum});
    CHECK(values.front() == static_cast<float>(size() - 1));
    MPI_Barrier(MPI_COMM_WORLD);
    joined = join_async();
  }
  const int last = joined.wait();
  CHECK((size() == 1 ? last == 0 : last > 0));
  shutdown();
}

TEST_CASE("join: a second one meanwhile is told so, and so is who has joined what never ends") {
  init();
  std::vector<float> values(3, 1);
  if (rank() == 0 && size() > 1) {
    std::atomic<int> told{0};
    const auto joins = [&] {
      try {
        join();
      } catch (const Joined&) {
        ++told;
      }
    };
    std::thread one(joins), other(joins);
    await(told, 1);
    MPI_Barrier(MPI_COMM_WORLD);
    one.join();
    other.join();
    CHECK(told == 1);
  } else {
    MPI_Barrier(MPI_COMM_WORLD);
    join();
  }
  if (rank() + 1 < size()) {
    CHECK_THROWS_AS(join(), Shutdown);
    CHECK_THROWS_AS(allreduce(whole(values), whole(values), {.name = "later"}), Shutdown);
    CHECK_THROWS_AS(barrier(), Shutdown);
    CHECK_THROWS_AS(join(), Shutdown);
  }
  shutdown();
}

TEST_CASE("allreduce: scales that are no numbers are those of all; results lie nowhere else") {
  in_both_worlds([] {
    std::vector<float> a(300, 1), b(300, 2), c(300);
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    for (int round = 0; round < 4; ++round) {
      allreduce(whole(a), whole(c), {.name = "nan", .op = ReduceOp::Sum, .prescale_factor = kNan});
      CHECK(std::isnan(c.back()));
    }
    const AllreduceOptions sum{.name = "group", .op = ReduceOp::Sum};
    AllreduceOptions compressed = sum;
    compressed.compression = Compression::fp16();
    for (const auto& options : {sum, compressed}) {
      CHECK_THROWS_AS(grouped_allreduce({whole(a), whole(b)}, {whole(b), whole(c)}, options),
                      InvalidArgument);
      CHECK_THROWS_AS(grouped_allreduce({whole(a), whole(b)}, {whole(c), whole(c)}, options),
                      InvalidArgument);
    }
    grouped_allreduce({whole(a), whole(a)}, {whole(b), whole(c)}, sum);
    CHECK(b == c);
    grouped_allreduce({whole(a), whole(b)}, {whole(a), whole(b)}, sum);
    CHECK(a.front() == static_cast<float>(size()));
    CHECK(b.front() == static_cast<float>(size() * size()));
    std::vector<float> shifted(1001), expected(1000);
    for (std::size_t i = 0; i < 1000; ++i) {
      shifted[i] = static_cast<float>(i) + static_cast<float>(rank());
      expected[i] = static_cast<float>(size()) * static_cast<float>(i) +
                    static_cast<float>(size() * (size() - 1) / 2);
    }
    allreduce({shifted.data(), DataType::Float32, {1000}, {}},
              {shifted.data() + 1, DataType::Float32, {1000}, {}},
              {.name = "shifted", .op = ReduceOp::Sum});
    CHECK(std::equal(expected.begin(), expected.end(), shifted.begin() + 1));
  });
}

TEST_CASE("what one rank can see is refused there, and the world goes on") {
  in_both_worlds([] {
    std::vector<float> values(4, 1.0F);
    if (rank() == size() - 1) {
      Buffer wrong = whole(values);
      wrong.dtype = static_cast<DataType>(200);
      CHECK_THROWS_AS(allreduce(wrong, wrong, {.name = "x"}), InvalidArgument);
      Buffer elsewhere = whole(values);
      elsewhere.device = {static_cast<DeviceKind>(9), 0};
      CHECK_THROWS_AS(allreduce(elsewhere, elsewhere, {.name = "x"}), InvalidArgument);
      CHECK_THROWS_AS(
          allreduce(whole(values), whole(values), {.name = "x", .op = static_cast<ReduceOp>(77)}),
          InvalidArgument);
      for (const Compression compression : {Compression::none(), Compression::fp16()}) {
        for (const Shape& shape : {Shape{-1}, Shape{std::int64_t{1} << 62, 8}}) {
          Buffer impossible = whole(values);
          impossible.shape = shape;
          const AllreduceOptions options{.name = "x", .compression = compression};
          CHECK_THROWS_AS(allreduce(impossible, impossible, options), InvalidArgument);
          CHECK_THROWS_AS(allreduce_async(impossible, impossible, options), InvalidArgument);
          CHECK_THROWS_AS(allreduce_init(impossible, impossible, options), InvalidArgument);
        }
      }
      for (const char* const name : {"x\n", "x\n\n", "allreduce.noname.1\n"})
        CHECK_THROWS_AS(allreduce(whole(values), whole(values), {.name = name}), InvalidArgument);
    }
    allreduce(whole(values), whole(values), {.name = "x", .op = ReduceOp::Sum});
    CHECK(values.back() == static_cast<float>(size()));
  });
}

TEST_CASE("start_timeline: paths that differ are a Mismatch on all ranks, and leave no file") {
  in_both_worlds([] {
    if (size() == 1) return;
    const std::string path =
        rank() == 0 ? "hvd_timeline_that_differs.json" : "/nonexistent/timeline.json";
    CHECK_THROWS_AS(start_timeline(path), Mismatch);
    CHECK(::access(path.c_str(), F_OK) != 0);
  });
}

TEST_CASE("abort: one rank ends the world for all, and another world may follow") {
  CHECK_THROWS_AS(abort("before init()"), NotInitialized);
  for (const bool shares_memory : {true, false}) {
    for (int who = 0; who < std::min(mpi_size(), 3); ++who) {
      CAPTURE(shares_memory);
      CAPTURE(who);
      Config config;
      config.log_level = LogLevel::Off;
      if (!shares_memory) config.shared_memory = SharedMemory::Off;
      init(config);
      std::vector<float> values(1000, 1.0F), more(1000, 1.0F);
      allreduce(whole(values), whole(values), {.name = "before"});
      const std::string words =
          "rank " + std::to_string(who) + " called hvd::abort(): the loss is not a number";
      const auto handle = allreduce_async(whole(values), whole(values),
                                          {.name = rank() == who ? "own" : "others'"});
      // else another rank may still be in 'before', or before its own one
      MPI_Barrier(MPI_COMM_WORLD);
      if (rank() == who) std::thread([] { abort("the loss is not a number"); }).join();
      if (size() > 1) CHECK_THROWS_WITH_AS(handle.wait(), words.c_str(), RankFailed);
      CHECK_THROWS_WITH_AS(allreduce(whole(more), whole(more), {.name = "later"}), words.c_str(),
                           RankFailed);
      CHECK_THROWS_WITH_AS(barrier(), words.c_str(), RankFailed);
      shutdown();
    }
  }
}

}  // namespace hvd::test
