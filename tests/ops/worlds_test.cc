// Worlds as values, whose members are threads of this process that meet in a store of its own: what
// they reduce, that they do not wait for one another, how they end, and what is refused.
// HVD_TEST_ROUNDS: how often one is made, used and left (20).
#include "hvd/world.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/api/host_memory.h"
#include "hvd/api/world_life.h"
#include "hvd/base/process.h"
#include "hvd/base/text.h"
#include "hvd/hvd.h"
#include "tests/support/random.h"
#include "tests/support/sanitized.h"
#include "tests/support/stderr_text.h"
#include "tests/support/thread_world.h"
#include "tests/support/worlds/memory_store.h"
#include "tests/support/worlds/process_stock.h"

namespace hvd::test::worlds {
namespace {

using namespace std::chrono_literals;
using hvd::rank;   // other tests have theirs
using hvd::World;  // likewise
using Clock = std::chrono::steady_clock;

Config small_config() {
  Config config;
  config.arena_bytes = std::uint64_t{64} << 20;
  config.cache_capacity = 1024;
  config.start_timeout = 20s;
  return config;
}

/// Each member in a thread of its own makes the world and does `work`; returns, by rank, what it
/// threw.
using Work = std::function<void(World& world)>;
std::vector<std::string> in_world(
    int size, const std::string& name, const Work& work, const Config& config = small_config(),
    const std::shared_ptr<MemoryStore>& store = std::make_shared<MemoryStore>()) {
  const Watchdog watchdog("the world " + name, 120s);
  std::vector<std::string> said(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        World world(rendezvous_of(store, rank, size, name), config);
        work(world);
      } catch (const Error& error) {
        said[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  for (auto& thread : threads) thread.join();
  return said;
}

void check_all_well(const std::vector<std::string>& said) {
  for (const auto& text : said) CHECK(text == "");
}

Buffer buffer_of(std::vector<float>& values) {
  return {values.data(), DataType::Float32, {static_cast<std::int64_t>(values.size())}, {}};
}

/// What each rank has: other values on each, in each world.
std::vector<float> values_of(int rank, std::size_t count, int salt = 0) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<float>((rank + 1) * (static_cast<int>(i % 97) + 1) + salt);
  return values;
}
std::vector<float> sum_of(int size, std::size_t count, int salt = 0) {
  std::vector<float> sum(count, 0);
  for (int rank = 0; rank < size; ++rank) {
    const auto values = values_of(rank, count, salt);
    for (std::size_t i = 0; i < count; ++i) sum[i] += values[i];
  }
  return sum;
}

/// Each collective once, as a member, by an option, and in a scope.
void use(const World& world, int salt = 0) {
  const int rank = world.rank(), size = world.size();
  for (const std::size_t count :
       {std::size_t{1}, std::size_t{1000}, std::size_t{kSanitized ? 20'000 : 300'000}}) {
    auto values = values_of(rank, count, salt);
    world.allreduce(buffer_of(values), buffer_of(values), {.op = ReduceOp::Sum});
    CHECK(values == sum_of(size, count, salt));
    values = values_of(rank, count, salt);
    allreduce(buffer_of(values), buffer_of(values), {.op = ReduceOp::Sum, .world = world});
    CHECK(values == sum_of(size, count, salt));
    values = values_of(rank, count, salt);
    world.run([&] { allreduce(buffer_of(values), buffer_of(values), {.op = ReduceOp::Sum}); });
    CHECK(values == sum_of(size, count, salt));
    values = values_of(rank, count, salt);
    const auto handle = world.allreduce_async(buffer_of(values), buffer_of(values),
                                              {.name = "later", .op = ReduceOp::Sum});
    handle.wait();
    CHECK(values == sum_of(size, count, salt));
    values = values_of(rank, count, salt);
    world.broadcast(buffer_of(values), {.root_rank = size - 1});
    CHECK(values == values_of(size - 1, count, salt));
  }
  auto mine = values_of(rank, static_cast<std::size_t>(rank) + 1, salt);
  const Gathered all = world.allgather(buffer_of(mine));
  CHECK(all.shape == Shape{size * (size + 1) / 2});
  const auto* gathered = reinterpret_cast<const float*>(all.data.data());
  for (int from = 0; from < size; ++from)
    for (const float value : values_of(from, static_cast<std::size_t>(from) + 1, salt))
      CHECK(*gathered++ == value);
  std::vector<float> to_all(static_cast<std::size_t>(size), static_cast<float>(rank + salt));
  const Exchanged exchanged = world.alltoall(buffer_of(to_all));
  for (int from = 0; from < size; ++from)
    CHECK(reinterpret_cast<const float*>(exchanged.data.data())[from] ==
          static_cast<float>(from + salt));
  auto rows = values_of(rank, static_cast<std::size_t>(size) * 2, salt);
  const Gathered share = world.reducescatter(buffer_of(rows), {.op = ReduceOp::Sum});
  const auto sum = sum_of(size, static_cast<std::size_t>(size) * 2, salt);
  CHECK(reinterpret_cast<const float*>(share.data.data())[1] ==
        sum[static_cast<std::size_t>(rank) * 2 + 1]);
  auto repeated = values_of(rank, 10, salt);
  auto op = world.allreduce_init(buffer_of(repeated), {.op = ReduceOp::Max});
  for (int round = 0; round < 3; ++round) {
    op.start();
    op.wait();
  }
  CHECK(repeated == values_of(size - 1, 10, salt));
  // To the next rank, by the world's numbers.
  auto sent = values_of(rank, 500, salt), received = std::vector<float>(500);
  const auto sending = world.send_async(buffer_of(sent), {.peer = (rank + 1) % size, .tag = 3});
  CHECK(world.recv(buffer_of(received), {.tag = 3}) == (rank + size - 1) % size);
  sending.wait();
  CHECK(received == values_of((rank + size - 1) % size, 500, salt));
  CHECK(world.barrier_until(20s).empty());
  CHECK(world.barrier_until(std::chrono::steady_clock::now() + 20s).empty());
  world.barrier();
  world.barrier_async().wait();
}

std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("world: a world beside no global one does what the global one does") {
  for (const int size : {1, 2, 3}) {
    CAPTURE(size);
    check_all_well(in_world(size, "beside", [](World& world) {
      use(world);
      CHECK(world.name() == "beside");
      CHECK(world.is_running());
      CHECK(world.stats().tensors_submitted > 0);
      CHECK_THROWS_AS(static_cast<void>(rank()), NotInitialized);
      const auto failed = error_of([&] { add_process_set({0}); });
      CHECK(failed.find("init()") != std::string::npos);
      world.leave();
      CHECK_FALSE(world.is_running());
      CHECK(error_of([&] { world.barrier(); }).find("has left the world 'beside'") !=
            std::string::npos);
      world.leave();  // does nothing
    }));
  }
}

TEST_CASE("world: without a global one, the log is as loud as the world made last wants it") {
  for (const bool loud : {true, false}) {
    CAPTURE(loud);
    Config config = small_config();
    config.log_level = loud ? LogLevel::Debug : LogLevel::Error;
    const StderrText text;
    check_all_well(in_world(
        2, "heard",
        [](World& world) {
          auto values = values_of(world.rank(), 10);
          world.allreduce(buffer_of(values), buffer_of(values), {.name = "said once"});
        },
        config));
    CHECK((text.get().find("said once") != std::string::npos) == loud);
  }
}

TEST_CASE("world: ranks that share no memory talk through UCX") {
  if (kSanitized) return;  // UCX watches the same functions of memory as sanitizers do
  Config config = small_config();
  config.shared_memory = SharedMemory::Off;
  check_all_well(in_world(
      3, "apart",
      [](World& world) {
        use(world);
        CHECK(world.shutdown());
      },
      config));
}

TEST_CASE("world: several at once, of different members, wait for nobody else") {
  constexpr int kRanks = 5, kWorlds = 8;
  const Watchdog watchdog("several worlds", 120s);
  const auto store = std::make_shared<MemoryStore>();
  Random random(5);
  std::vector<std::vector<int>> members(kWorlds);
  for (auto& ranks : members)
    for (int rank = 0; rank < kRanks; ++rank)
      if (random.below(2) == 0 || ranks.empty()) ranks.push_back(rank);
  // One thread for each member of each world: no world may need another one's progress.
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int world = 0; world < kWorlds; ++world)
    for (std::size_t place = 0; place < members[static_cast<std::size_t>(world)].size(); ++place)
      threads.emplace_back([&, world, place] {
        const auto size = static_cast<int>(members[static_cast<std::size_t>(world)].size());
        try {
          const World mine(
              rendezvous_of(store, static_cast<int>(place), size, formatted("world {}", world)),
              small_config());
          for (int round = 0; round < (kSanitized ? 1 : 5); ++round) use(mine, world * 10 + round);
        } catch (const Error& error) {
          MESSAGE(error.what());
          ++wrong;
        }
      });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE(
    "world: one thread works in two worlds in turn, and a set or scope of one means nothing in the "
    "other") {
  const auto first = std::make_shared<MemoryStore>(), second = std::make_shared<MemoryStore>();
  check_all_well(in_world(
      2, "first",
      [&](World& outer) {
        const World inner(rendezvous_of(second, 1 - outer.rank(), 2, "second"), small_config());
        CHECK(inner.rank() == 1 - outer.rank());
        for (int round = 0; round < (kSanitized ? 2 : 20); ++round) {
          use(outer, round);
          use(inner, round + 1000);
        }
        outer.run([&] {
          CHECK(World::current() == outer);
          CHECK(rank() == outer.rank());
          inner.run([&] { CHECK(rank() == inner.rank()); });
          CHECK(rank() == outer.rank());
        });
        CHECK(World::current() == World());
        const ProcessSet set = outer.add_process_set({0});
        const auto check_set = [&] {  // it tells of its own world, wherever it is asked
          CHECK(set.size() == 1);
          CHECK(set.rank() == (outer.rank() == 0 ? 0 : -1));
          CHECK(set.included() == (outer.rank() == 0));
          CHECK(set.ranks() == std::vector{0});
        };
        check_set();
        inner.run(check_set);
        outer.run(check_set);
        std::vector<float> values(3, 1);
        if (outer.rank() == 0) {
          outer.barrier(set);
          CHECK(outer.join(set) == 0);
        }
        if (outer.rank() == 0)
          outer.allreduce(buffer_of(values), buffer_of(values), {.process_set = set});
        const auto said = error_of(
            [&] { inner.allreduce(buffer_of(values), buffer_of(values), {.process_set = set}); });
        CHECK(said.find("another world") != std::string::npos);
        const auto removed = error_of([&] { inner.remove_process_set(set); });
        CHECK(removed.find("another world") != std::string::npos);
        outer.barrier();
        inner.barrier();
        outer.leave();
        CHECK_THROWS_AS(static_cast<void>(set.size()), NotInitialized);
      },
      small_config(), first));
}

TEST_CASE(
    "world: who leaves is named to those who need it, within a second, and waits for nobody") {
  for (const bool shared : {true, false}) {
    // UCX watches the same functions of memory as sanitizers do
    if (!shared && kSanitized) continue;
    CAPTURE(shared);
    Config config = small_config();
    config.shared_memory = shared ? SharedMemory::Auto : SharedMemory::Off;
    for (const int leaver : {0, 1, 2}) {
      CAPTURE(leaver);
      std::promise<void> has_left;
      const auto left = has_left.get_future().share();
      const auto said = in_world(
          3, "left",
          [&](World& world) {
            use(world);
            std::vector<float> values(5, 1);
            if (world.rank() == leaver) {
              const auto begin = Clock::now();
              world.leave();
              CHECK(Clock::now() - begin < 5s);  // 300 ms for the others, and a busy machine
              has_left.set_value();
              return;
            }
            const auto pending =
                world.allreduce_async(buffer_of(values), buffer_of(values), {.name = "pending"});
            const auto text = error_of([&] { pending.wait(); });
            CHECK(text.find(formatted("rank {}", leaver)) != std::string::npos);
            left.wait();
            const auto later =
                error_of([&] { world.allreduce(buffer_of(values), buffer_of(values)); });
            CHECK(later.find(formatted("rank {}", leaver)) != std::string::npos);
          },
          config);
      check_all_well(said);
    }
  }
}

/// What the members but `leaver` do of whom one has left: all that needs it fails, and says so, and
/// all else goes on.
void go_on_without(const World& world, int leaver, const ProcessSet& others,
                   const std::function<void()>& until_left) {
  const int rank = world.rank(), other = 3 - leaver - rank;
  const auto is_told = [&](const std::function<void()>& work) {
    std::string said;
    const auto begin = Clock::now();
    try {
      work();
    } catch (const RankFailed& error) {
      said = error.what();
    }
    CAPTURE(said);
    CHECK(said.find(formatted("rank {} has left the world 'left'", leaver)) != std::string::npos);
    CHECK(Clock::now() - begin < 5s);
  };
  auto values = values_of(rank, 100), from_leaver = values, large = values_of(rank, 100'000);
  const auto pending = world.allreduce_async(buffer_of(values), buffer_of(values));
  const auto received = world.recv_async(buffer_of(from_leaver), {.peer = leaver, .tag = 9});
  const auto sent = world.send_async(buffer_of(large), {.peer = leaver, .tag = 9});
  until_left();
  is_told([&] { pending.wait(); });
  is_told([&] { received.wait(); });
  is_told([&] { sent.wait(); });
  for (int round = 0; round < 30; ++round) {
    std::this_thread::sleep_for(10ms);  // together for longer than anybody waits for the others
    auto sum = values_of(rank, 1000, round);
    world.allreduce(buffer_of(sum), buffer_of(sum), {.op = ReduceOp::Sum, .process_set = others});
    auto expected = values_of(rank, 1000, round);
    const auto of_other = values_of(other, 1000, round);
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += of_other[i];
    CHECK(sum == expected);
    auto mine = values_of(rank, 30'000, round), theirs = std::vector<float>(30'000);
    const auto sending = world.send_async(buffer_of(mine), {.peer = other});
    CHECK(world.recv(buffer_of(theirs), {.peer = other}) == other);
    sending.wait();
    CHECK(theirs == values_of(other, 30'000, round));
  }
  CHECK(world.is_running());
  is_told([&] { world.barrier(); });
  is_told([&] { world.allreduce(buffer_of(values), buffer_of(values), {.name = "later"}); });
  is_told([&] { static_cast<void>(world.add_process_set({0})); });
  is_told([&] { world.send(buffer_of(large), {.peer = leaver}); });
  is_told([&] { static_cast<void>(world.recv(buffer_of(values), {.peer = leaver})); });
  CHECK(world.barrier_until(20s) == std::vector{leaver});
  is_told([&] { static_cast<void>(world.join()); });
  is_told([&] { static_cast<void>(world.join_async().wait()); });
  is_told([&] { world.allreduce(buffer_of(values), buffer_of(values)); });
  world.barrier(others);
  CHECK(world.is_running());
}

TEST_CASE(
    "world: what does not need who has left goes on, also beside a new world, and ends in order") {
  for (const bool shared : {true, false}) {
    // UCX watches the same functions of memory as sanitizers do
    if (!shared && kSanitized) continue;
    CAPTURE(shared);
    Config config = small_config();
    config.shared_memory = shared ? SharedMemory::Auto : SharedMemory::Off;
    for (const int leaver : {0, 1, 2}) {
      CAPTURE(leaver);
      std::promise<void> has_left;
      const auto left = has_left.get_future().share();
      const auto store = std::make_shared<MemoryStore>();
      const auto work = [&](World& world) {
        const int rank = world.rank();
        std::vector<int> others{0, 1, 2};
        std::erase(others, leaver);
        const ProcessSet set = world.add_process_set(others);
        use(world);
        if (rank == leaver) {
          for (const auto limit : {5s, 1s}) {  // 300 ms for the others; again, which does nothing
            const auto begin = Clock::now();
            world.leave();
            CHECK(Clock::now() - begin < limit);
          }
          has_left.set_value();
          CHECK_FALSE(world.is_running());
          CHECK_THROWS_AS(world.barrier(), NotInitialized);
          CHECK_THROWS_AS(world.abort("what others need"), NotInitialized);
        }
        if (rank != leaver) go_on_without(world, leaver, set, [&] { left.wait(); });
        const World next(rendezvous_of(store, rank, 3, "next"), config);
        use(next);
        if (rank == leaver) return;
        auto values = values_of(rank, 10);
        world.broadcast(buffer_of(values), {.root_rank = others[1], .process_set = set});
        CHECK(values == values_of(others[1], 10));
        CHECK(world.shutdown());
      };
      check_all_well(in_world(3, "left", work, config, store));
    }
  }
}

TEST_CASE("world: members that leave one long after the other end in order, and nothing stays") {
  const auto round = [](const std::string& name) {
    check_all_well(in_world(3, name, [](World& world) {
      use(world);
      std::this_thread::sleep_for(world.rank() * 600ms);
      CHECK(world.is_running());
      world.leave();
    }));
  };
  const auto stock = [] {
    std::this_thread::sleep_for(1s);  // those that last hear of the end a moment later
    return take_stock();
  };
  round("first");
  const ProcessStock before = stock();
  for (const char* name : {"second", "third", "fourth"}) round(name);
  const ProcessStock after = stock();
  CHECK(after.threads <= before.threads);
  CHECK(after.descriptors <= before.descriptors);
  CHECK(after.mappings <= before.mappings + 10);  // the heap's own
}

TEST_CASE("world: one member aborts it, with a reason that all hear, and another world goes on") {
  const auto other = std::make_shared<MemoryStore>();
  check_all_well(in_world(3, "aborted", [&](World& world) {
    const World beside(rendezvous_of(other, world.rank(), 3, "beside"), small_config());
    use(world);
    std::vector<float> values(5, 1);
    std::string said;
    if (world.rank() == 1) world.abort("out of data");
    said = error_of([&] {
      for (;;) world.allreduce(buffer_of(values), buffer_of(values));
    });
    CHECK(said.find("rank 1") != std::string::npos);
    CHECK(said.find("out of data") != std::string::npos);
    CHECK_FALSE(world.is_running());
    use(beside);
  }));
}

TEST_CASE("world: a shutdown() that waits for others in vain is ended by abort()") {
  std::promise<void> over;
  const auto is_over = over.get_future().share();
  check_all_well(in_world(2, "waits", [&](World& world) {
    if (world.rank() == 1) return is_over.wait();  // it does not come
    auto clean = std::async(std::launch::async, [&] { return world.shutdown(); });
    while (world.is_running()) std::this_thread::yield();
    CHECK(error_of([&] { world.abort("nobody comes"); }) == "");
    CHECK_FALSE(clean.get());
    CHECK_THROWS_AS(world.abort("again"), NotInitialized);
    over.set_value();
  }));
}

TEST_CASE("world: what follows an operation, and its deadline, are of its world") {
  Config config = small_config();
  check_all_well(in_world(
      2, "late",
      [](World& world) {
        auto values = values_of(world.rank(), 100);
        std::promise<void> followed;
        world.allreduce_async(buffer_of(values), buffer_of(values), {.op = ReduceOp::Sum})
            .then([&] { followed.set_value(); });
        followed.get_future().wait();
        CHECK(values == sum_of(2, 100));
        if (world.rank() == 1) {
          CHECK(error_of([&] {
                  for (;;) world.barrier();
                }).find("alone") != std::string::npos);
          return;
        }
        const auto said = error_of([&] {
          world.allreduce(buffer_of(values), buffer_of(values),
                          {.name = "alone", .deadline = std::chrono::milliseconds(200)});
        });
        CHECK(said.find("alone") != std::string::npos);
      },
      config));
}

TEST_CASE("world: the last value goes with an operation that nobody holds any more") {
  for (int round = 0; round < 10; ++round) {
    CAPTURE(round);
    std::promise<void> begun;
    const auto has_begun = begun.get_future().share();
    check_all_well(in_world(2, "given away", [&](World& world) {
      if (world.rank() == 0) {
        has_begun.wait();
        auto values = values_of(0, 1000);
        world.allreduce(buffer_of(values), buffer_of(values),
                        {.name = "last", .op = ReduceOp::Sum});
        CHECK(values == sum_of(2, 1000));
        return;
      }
      auto values = std::make_shared<std::vector<float>>(values_of(1, 1000));
      Submission submission;
      submission.name = "last";
      submission.op = ReduceOp::Sum;
      submission.tensors.push_back({values->data(), values->data(), DataType::Float32, {1000}});
      submission.keep_alive =
          std::make_shared<std::pair<World, std::shared_ptr<void>>>(world, values);
      world.run([&] { static_cast<void>(engine()->submit(std::move(submission))); });
      world = World();  // the operation has the last one now
      begun.set_value();
    }));
  }
}

/// Waits for what never comes, as `rank` 0 of two does not submit it, or leaves.
Submission pending_alone(const std::shared_ptr<std::vector<float>>& values,
                         std::shared_ptr<void> owner) {
  Submission submission;
  submission.name = "alone";
  submission.op = ReduceOp::Sum;
  submission.tensors.push_back({values->data(),
                                values->data(),
                                DataType::Float32,
                                {static_cast<std::int64_t>(values->size())}});
  submission.keep_alive = std::move(owner);
  return submission;
}

TEST_CASE(
    "world: at the end of the process the last value may be that of an operation that is pending") {
  std::promise<void> begun;
  const auto has_begun = begun.get_future().share();
  check_all_well(in_world(2, "at the end", [&](World& world) {
    if (world.rank() == 0) {
      const auto said = error_of([&] { world.barrier(); });
      CHECK(said != "");  // both members are of this process: whichever has left first
      return;
    }
    const auto values = std::make_shared<std::vector<float>>(values_of(1, 1000));
    auto owner = std::make_shared<std::pair<World, std::shared_ptr<void>>>(world, values);
    world.run(
        [&] { static_cast<void>(engine()->submit(pending_alone(values, std::move(owner)))); });
    world = World();
    WorldLife::leave_all();
  }));
}

TEST_CASE(
    "world: a member leaves while its own threads wait, poll and submit, or by a function that "
    "follows an operation") {
  for (const bool follows : {false, true}) {
    CAPTURE(follows);
    check_all_well(in_world(2, "busy", [&](World& world) {
      if (world.rank() == 0) {
        std::vector<float> values(10, 1);
        if (follows) world.allreduce(buffer_of(values), buffer_of(values), {.name = "first"});
        const auto said = error_of(
            [&] { world.allreduce(buffer_of(values), buffer_of(values), {.name = "never"}); });
        CHECK(said.find("rank 1") != std::string::npos);
        return;
      }
      std::atomic<int> begun{0}, ended{0};
      const auto until_error = [&](const std::function<void()>& work) {
        return std::thread([&, work] {
          ++begun;
          const auto said = error_of([&] {
            for (;;) work();
          });
          CHECK(said != "");  // that this rank has left, or what the other has ended by
          ++ended;
        });
      };
      std::vector<float> one(10, 1), two(10, 1);
      std::atomic<int> names{0};
      std::vector<std::thread> threads;
      threads.push_back(
          until_error([&] { world.allreduce(buffer_of(one), buffer_of(one), {.name = "waits"}); }));
      threads.push_back(until_error([&] {
        const auto handle =
            world.allreduce_async(buffer_of(two), buffer_of(two), {.name = "polls"});
        while (!handle.done()) std::this_thread::yield();
        handle.wait();
      }));
      threads.push_back(until_error([&] {
        auto mine = std::make_shared<std::vector<float>>(10, 1.0F);
        auto submission = pending_alone(mine, mine);
        submission.name = formatted("more {}", ++names);
        world.run([&] { static_cast<void>(engine()->submit(std::move(submission))); });
        if (names > 500) std::this_thread::sleep_for(1ms);
      }));
      threads.push_back(until_error([&] { static_cast<void>(world.rank()); }));
      while (begun < 4) std::this_thread::yield();
      if (follows) {
        std::vector<float> values(10, 1);
        std::promise<void> left;
        world.allreduce_async(buffer_of(values), buffer_of(values), {.name = "first"}).then([&] {
          world.leave();
          left.set_value();
        });
        left.get_future().wait();
      } else {
        world.leave();
      }
      for (auto& thread : threads) thread.join();
      CHECK(ended == 4);
      CHECK_FALSE(world.is_running());
    }));
  }
}

TEST_CASE("world: memory and results of a world outlive it") {
  std::shared_ptr<void> memory;
  std::optional<Gathered> result;
  check_all_well(in_world(2, "outlived", [&](World& world) {
    auto values = values_of(world.rank(), 300'000);
    const Gathered all = world.allgather(buffer_of(values));
    const auto shared = world.run([] { return allocate_shared(1 << 20); });
    if (world.rank() == 1) return;
    result = all;
    memory = shared;
  }));
  REQUIRE(memory);
  std::fill_n(static_cast<char*>(memory.get()), 1 << 20, 'x');
  const auto expected = values_of(1, 300'000);
  CHECK(std::equal(expected.begin(), expected.end(),
                   reinterpret_cast<const float*>(result->data.data()) + 300'000));
  memory = nullptr;
  result.reset();
}

TEST_CASE("world: the value of the global world means that also inside of a scope") {
  check_all_well(in_world(2, "around", [](World& world) {
    CHECK_FALSE(is_initialized());
    world.run([&] {
      CHECK(is_initialized());
      CHECK_FALSE(World().run([] { return is_initialized(); }));
      CHECK_FALSE(World().is_running());
      CHECK_THROWS_AS(static_cast<void>(World().rank()), NotInitialized);
      World().run([&] {
        CHECK(World::current() == World());
        CHECK_THROWS_AS(barrier(), NotInitialized);
        CHECK(world.run([] { return rank(); }) == world.rank());
        CHECK(World::current() == World());
      });
      CHECK(World::current() == world);
      std::vector<float> values(3, 1);
      CHECK_THROWS_AS(World().allreduce(buffer_of(values), buffer_of(values)), NotInitialized);
      const WorldScope nothing{World()};  // as an option that is not given
      CHECK(World::current() == world);
      try {
        World().run([] { throw std::runtime_error("out of two scopes"); });
      } catch (const std::runtime_error&) {
      }
      CHECK(World::current() == world);
      barrier();
    });
  }));
}

TEST_CASE("world: a value that was moved from stands for the same world") {
  check_all_well(in_world(2, "moved", [](World& world) {
    World pair = world;
    std::vector<World> all;
    all.push_back(std::move(pair));
    CHECK(pair == world);
    std::vector<float> values(3, static_cast<float>(pair.rank() + 1));
    pair.allreduce(buffer_of(values), buffer_of(values), {.op = ReduceOp::Sum});
    CHECK(values == std::vector<float>(3, 3));
    World other;
    other = std::move(pair);
    CHECK((other == world && pair == world));
    const WorldScope scope(all.front());
    CHECK(World::current() == pair);
  }));
}

TEST_CASE("world: what is on its way as all members end it comes whole") {
  check_all_well(in_world(3, "whole", [](World& world) {
    const int next = (world.rank() + 1) % 3, before = (world.rank() + 2) % 3;
    std::vector<float> in(5'000'000), out(in.size(), static_cast<float>(world.rank()));
    const auto received = world.recv_async(buffer_of(in), {.peer = before});
    const auto sent = world.send_async(buffer_of(out), {.peer = next});
    CHECK(world.shutdown());
    sent.wait();
    std::fill(out.begin(), out.end(), -1.0F);
    CHECK(received.wait() == before);
    CHECK(in == std::vector<float>(in.size(), static_cast<float>(before)));
  }));
}

TEST_CASE(
    "world: a process that is forked from a member is none, also where there is no global world "
    "any more") {
  if (kSanitized) return;
  check_all_well(in_world(2, "parents", [](World& world) {
    if (world.rank() == 0) return world.barrier();
    cease_to_be_rank();  // as the end of a global world without others does
    const pid_t child = ::fork();
    if (child == 0) {
      int status = is_forked_from_rank() ? 0 : 1;
      if (status == 0) try {
          status = world.is_running() ? 2 : 0;
        } catch (...) {
          status = 3;
        }
      ::_exit(status);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    CHECK(WEXITSTATUS(status) == 0);
    world.barrier();
  }));
}

TEST_CASE("world: made, used and left again and again, nothing of it stays" *
          doctest::timeout(7200)) {
  const int rounds = kSanitized ? 6 : static_cast<int>(number_from("HVD_TEST_ROUNDS", 20));
  for (const bool shared : {true, false}) {
    // UCX watches the same functions of memory as sanitizers do
    if (!shared && kSanitized) continue;
    CAPTURE(shared);
    Config config = small_config();
    if (!shared) config.shared_memory = SharedMemory::Off;
    const auto round = [&](int number) {
      const auto work = [](World& world) {
        use(world);
        // for one that never opens it, nor lets it go
        world.run([] { static_cast<void>(allocate_for_host(1000, 1)); });
      };
      check_all_well(in_world(2, formatted("again {}", number), work, config));
    };
    const int until_steady = std::max(3, rounds / 5);
    for (int number = 0; number < until_steady; ++number) round(number);
    const ProcessStock before = take_stock();
    for (int number = until_steady; number < rounds; ++number) round(number);
    const ProcessStock after = take_stock();
    CHECK(after.descriptors <= before.descriptors);
    CHECK(after.threads <= before.threads);
    CHECK(after.mappings <= before.mappings + 10);  // the heap's own
    // what the C library's arenas cannot give back
    if (!kSanitized) CHECK(after.resident_kib <= before.resident_kib + 32768);
  }
}

TEST_CASE("world: what is wrong is refused, with names") {
  const auto store = std::make_shared<MemoryStore>();
  const auto refused = [&](const Rendezvous& rendezvous, const std::string& words) {
    const auto said = error_of([&] { const World world(rendezvous, small_config()); });
    CAPTURE(said);
    CHECK(said.find(words) != std::string::npos);
  };
  refused(rendezvous_of(store, 2, 2, "x"), "rank 2 of 2 members");
  refused(rendezvous_of(store, 0, 0, "x"), "a size of 0");
  refused(rendezvous_of(store, 0, 1, ""), "needs a name");
  Rendezvous lacking = rendezvous_of(store, 0, 1, "x");
  lacking.add = nullptr;
  refused(lacking, "lacks set, get or add");
  Rendezvous broken = rendezvous_of(store, 0, 1, "broken");
  broken.add = [](const std::string&, std::int64_t) -> std::int64_t {
    throw std::runtime_error("the store is gone");
  };
  refused(broken, "the store is gone");

  check_all_well(in_world(
      2, "taken", [](World& world) { use(world); }, small_config(), store));
  for (const auto& said : in_world(
           2, "taken", [](World& world) { use(world); }, small_config(), store))
    CHECK(said.find("two worlds have one name") != std::string::npos);

  // One brings another size, one another knob; one does not come at all.
  Config impatient = small_config();
  impatient.start_timeout = 1s;
  const auto meet = [&](const std::string& name, std::vector<std::pair<int, int>> ranks_and_sizes,
                        const std::function<Config(int)>& config) {
    std::vector<std::thread> threads;
    std::vector<std::string> said(ranks_and_sizes.size());
    for (std::size_t i = 0; i < ranks_and_sizes.size(); ++i)
      threads.emplace_back([&, i] {
        const auto [rank, size] = ranks_and_sizes[i];
        said[i] = error_of([&, rank = rank, size = size] {
          const World world(rendezvous_of(store, rank, size, name), config(rank));
        });
      });
    for (auto& thread : threads) thread.join();
    return said;
  };
  for (const auto& said : meet("sizes", {{0, 2}, {1, 3}}, [&](int) { return impatient; })) {
    CAPTURE(said);
    CHECK(said.find("size must be equal") != std::string::npos);
  }
  for (const auto& said : meet("knobs", {{0, 2}, {1, 2}}, [&](int rank) {
         Config config = impatient;
         config.fusion_threshold_bytes = rank == 0 ? 1000 : 2000;
         return config;
       })) {
    CAPTURE(said);
    CHECK(said.find("HVD_FUSION_THRESHOLD") != std::string::npos);
  }
  for (const auto& said : meet("absent", {{0, 3}, {2, 3}}, [&](int) { return impatient; })) {
    CAPTURE(said);
    CHECK(said.find("rank 1 has not come") != std::string::npos);
  }
  for (const auto& said : meet("headless", {{1, 3}, {2, 3}}, [&](int) { return impatient; })) {
    CAPTURE(said);
    CHECK(said.find("rank 0") != std::string::npos);
  }
}

TEST_CASE(
    "world: of the environment's knobs those that go by the global world's ranks do not count") {
  ::setenv("HVD_THREAD_AFFINITY", "1", 1);  // where each process is bound to a core, another rank's
  const auto config = World::default_config();
  ::unsetenv("HVD_THREAD_AFFINITY");
  CHECK(config.thread_affinity.empty());
}

TEST_CASE("world: a store sees a few requests per member, and no more with more members") {
  const auto requests_per_member = [](int size) {
    const auto store = std::make_shared<MemoryStore>();
    check_all_well(in_world(
        size, "few", [](World& world) { world.barrier(); }, small_config(), store));
    return store->requests() / size;
  };
  CHECK(requests_per_member(6) < requests_per_member(2) + 30);
}

}  // namespace hvd::test::worlds
