// Worlds whose members are processes, one of which is killed: the others are told who it was, drop
// the world, and make the next one in the same process. Nothing of a world that has failed stays.
// Or one leaves, and ends later.
// HVD_TEST_ROUNDS: how often (20).
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "hvd/base/text.h"
#include "hvd/hvd.h"
#include "tests/support/random.h"
#include "tests/support/thread_world.h"
#include "tests/support/worlds/file_store.h"
#include "tests/support/worlds/process_stock.h"

namespace hvd::test::world_deaths {
namespace {

using namespace std::chrono_literals;
using hvd::World;  // of the worlds of other tests

constexpr int kRanks = 3;

int rounds() { return static_cast<int>(number_from("HVD_TEST_ROUNDS", 20)); }

Config config_of(bool shared) {
  Config config;
  config.arena_bytes = std::uint64_t{64} << 20;
  config.cache_capacity = 1024;
  config.log_level = LogLevel::Error;
  config.shared_memory = shared ? SharedMemory::Auto : SharedMemory::Off;
  return config;
}

float sum_once(const World& world, std::size_t count, const std::string& name) {
  std::vector<float> values(count, static_cast<float>(world.rank() + 1));
  const Buffer buffer{values.data(), DataType::Float32, {static_cast<std::int64_t>(count)}, {}};
  world.allreduce(buffer, buffer, {.name = name, .op = ReduceOp::Sum});
  return values.back();
}

/// Works in a world of three until one of them has died, then in one of the two that are left.
/// Returns what is wrong.
std::string survive_once(const std::shared_ptr<FileStore>& store, int round, int place,
                         bool shared) {
  const int victim = round % kRanks;
  const int rank = place < victim ? place : place + 1;
  std::string said;
  {
    const World world(rendezvous_of(store, rank, kRanks, formatted("three {}", round)),
                      config_of(shared));
    try {
      for (int step = 0;; ++step)
        if (sum_once(world, step % 2 == 0 ? 10 : 200'000, step % 2 == 0 ? "small" : "large") != 6)
          return "a wrong sum of three";
    } catch (const Error& error) {
      said = error.what();
    }
  }
  if (said.find(formatted("rank {}", victim)) == std::string::npos)
    return formatted("rank {} died, and it was said: {}", victim, said);
  const World world(rendezvous_of(store, place, 2, formatted("two {}", round)), config_of(shared));
  return sum_once(world, 1000, "after") == 3 ? "" : "a wrong sum of two";
}

[[noreturn]] void survive(const std::shared_ptr<FileStore>& store, int place, bool shared) {
  std::string wrong;
  ProcessStock first;
  try {
    constexpr int kUntilSteady = 6;
    const int count = std::max(rounds(), kUntilSteady + 1);
    for (int round = 0; round < count && wrong.empty(); ++round) {
      wrong = survive_once(store, round, place, shared);
      if (round + 1 == kUntilSteady) first = take_stock();
    }
    const ProcessStock last = take_stock();
    const bool grows = last.mappings > first.mappings + 10 ||
                       last.resident_kib > first.resident_kib + 4096 + 8 * count;
    if (wrong.empty() &&
        (last.descriptors > first.descriptors || last.threads > first.threads || grows))
      wrong = formatted(
          "kept after round {}: {} descriptors, {} threads, {} mappings, {} KiB; after round {}: "
          "{}, {}, {}, {}",
          kUntilSteady, first.descriptors, first.threads, first.mappings, first.resident_kib, count,
          last.descriptors, last.threads, last.mappings, last.resident_kib);
  } catch (const std::exception& error) {
    wrong = error.what();
  }
  store->set(formatted("wrong {}", place), Rendezvous::Value(wrong.begin(), wrong.end()));
  ::_exit(0);
}

[[noreturn]] void die_once(const std::shared_ptr<FileStore>& store, int round, bool shared) {
  const World world(rendezvous_of(store, round % kRanks, kRanks, formatted("three {}", round)),
                    config_of(shared));
  std::thread([round] {
    std::this_thread::sleep_for(1ms * (round % 7));
    ::kill(::getpid(), SIGKILL);
  }).detach();
  // Over UCX it dies between operations: UCX 1.13 may end a process whose peer dies in the middle
  // of a long message (tcp_ep.c:939).
  if (!shared) std::this_thread::sleep_for(1h);
  for (int step = 0;; ++step)
    static_cast<void>(
        sum_once(world, step % 2 == 0 ? 10 : 200'000, step % 2 == 0 ? "small" : "large"));
}

template <class Work>
pid_t in_child(Work work) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  try {
    work();
  } catch (const std::exception& error) {
    // what the parent sees is its status alone
    static_cast<void>(std::fprintf(stderr, "a member: %s\n", error.what()));
    ::_exit(1);
  }
  ::_exit(0);
}

}  // namespace

TEST_CASE(
    "world: members that are killed are named, and the survivors go on in the next world, again "
    "and again" *
    doctest::timeout(7200)) {
  for (const bool shared : {true, false}) {
    CAPTURE(shared);
    std::string folder = "/tmp/hvd-deaths-XXXXXX";
    REQUIRE(::mkdtemp(folder.data()) != nullptr);
    const auto store = std::make_shared<FileStore>(folder);
    std::vector<pid_t> survivors;
    for (int place = 0; place < kRanks - 1; ++place)
      survivors.push_back(in_child([&] { survive(store, place, shared); }));
    const auto over = [&] {
      for (const pid_t survivor : survivors)
        if (::waitpid(survivor, nullptr, WNOHANG) == 0) return false;
      return true;
    };
    for (int round = 0; round < std::max(rounds(), 7); ++round) {
      const pid_t victim = in_child([&] { die_once(store, round, shared); });
      ::waitpid(victim, nullptr, 0);
    }
    const auto deadline = std::chrono::steady_clock::now() + 60s;
    while (!over() && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(1ms);
    for (int place = 0; place < kRanks - 1; ++place) {
      const auto wrong = store->get(formatted("wrong {}", place), 0ms);
      REQUIRE(wrong);
      CHECK(std::string(wrong->begin(), wrong->end()) == "");
    }
    for (const pid_t survivor : survivors) ::kill(survivor, SIGKILL);
    std::filesystem::remove_all(folder);
  }
}

TEST_CASE(
    "world: when a member that has left ends, those that go on are told that it has left, not that "
    "it died") {
  for (const bool shared : {true, false})
    for (const int leaver : {0, kRanks - 1})
      for (const bool exits : {true, false}) {
        CAPTURE(shared);
        CAPTURE(leaver);
        CAPTURE(exits);
        std::string folder = "/tmp/hvd-deaths-XXXXXX";
        REQUIRE(::mkdtemp(folder.data()) != nullptr);
        const auto store = std::make_shared<FileStore>(folder);
        const auto work = [&](int rank) {
          World world(rendezvous_of(store, rank, kRanks, "left"), config_of(shared));
          std::vector<int> others{0, 1, 2};
          std::erase(others, leaver);
          const ProcessSet set = world.add_process_set(others);
          sum_once(world, 1000, "all");
          if (rank == leaver) {
            world.leave();
            static_cast<void>(store->get("go on", 20s));
            if (!exits) ::_exit(0);
            std::exit(0);  // NOLINT(concurrency-mt-unsafe): the process's other threads go on
          }
          std::string said;
          try {
            for (int round = 0;; ++round) {
              std::vector<float> values(1000, 1);
              const Buffer buffer{values.data(), DataType::Float32, {1000}, {}};
              world.allreduce(buffer, buffer, {.op = ReduceOp::Sum, .process_set = set});
              if (values.back() != 2) said = "a wrong sum";
              if (round == 20 && rank == others.front()) store->set("go on", {});
              std::this_thread::sleep_for(20ms);
            }
          } catch (const RankFailed& error) {
            said += error.what();
          } catch (const Error& error) {
            said = std::string("another error: ") + error.what();
          }
          store->set(formatted("said {}", rank), Rendezvous::Value(said.begin(), said.end()));
          world.leave();
        };
        std::vector<pid_t> members;
        for (int rank = 0; rank < kRanks; ++rank) members.push_back(in_child([&] { work(rank); }));
        for (const pid_t member : members) {
          int status = -1;
          ::waitpid(member, &status, 0);
          CHECK(status == 0);
        }
        for (int rank = 0; rank < kRanks; ++rank) {
          if (rank == leaver) continue;
          const auto text = store->get(formatted("said {}", rank), 0ms);
          REQUIRE(text);
          const std::string said(text->begin(), text->end());
          CAPTURE(said);
          CHECK(said.find(formatted("rank {} has left the world 'left'", leaver)) !=
                std::string::npos);
          if (exits) CHECK(said.find("died") == std::string::npos);
        }
        std::filesystem::remove_all(folder);
      }
}

}  // namespace hvd::test::world_deaths
