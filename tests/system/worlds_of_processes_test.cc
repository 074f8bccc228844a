// Many worlds at once as in tests/ops/worlds_by_seed_test.cc, whose members are processes; one of
// them may be killed, which ends its worlds and no other. HVD_TEST_SEEDS: how many programs (4).
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "hvd/base/text.h"
#include "tests/support/random.h"
#include "tests/support/thread_world.h"
#include "tests/support/worlds/file_store.h"
#include "tests/support/worlds/worlds_by_seed.h"

namespace hvd::test::worlds_of_processes {
namespace {

using namespace std::chrono_literals;
using namespace worlds_by_seed;

constexpr int kRanks = 6;

/// A rank: a thread for each world that it is a member of. Returns what was wrong.
std::string run_rank(const ProgramPlan& plan, int rank, const std::shared_ptr<FileStore>& store) {
  std::mutex mutex;
  std::string wrong;
  std::atomic<int> unmade{0};
  RankHooks hooks;
  hooks.made = [&] { --unmade; };
  hooks.die = [&] {
    while (unmade > 0) std::this_thread::sleep_for(1ms);
    ::kill(::getpid(), SIGKILL);
  };
  std::vector<std::pair<const WorldPlan*, int>> parts;
  for (const WorldPlan& world : plan.worlds) {
    const auto place = std::ranges::find(world.members, rank);
    if (place != world.members.end())
      parts.emplace_back(&world, static_cast<int>(place - world.members.begin()));
  }
  unmade = static_cast<int>(parts.size());
  std::vector<std::thread> threads;
  for (const auto& [world, place] : parts)
    threads.emplace_back([&, world = world, place = place] {
      const auto rendezvous =
          rendezvous_of(store, place, static_cast<int>(world->members.size()), world->name);
      const std::string said = take_part(*world, place, rendezvous, hooks);
      const std::lock_guard lock(mutex);
      if (wrong.empty()) wrong = said;
    });
  for (auto& thread : threads) thread.join();
  return wrong;
}

[[noreturn]] void be_rank(const ProgramPlan& plan, int rank,
                          const std::shared_ptr<FileStore>& store) {
  std::string wrong = "an exception";
  try {
    wrong = run_rank(plan, rank, store);
  } catch (...) {
  }
  store->set(formatted("wrong {}", rank), hvd::Rendezvous::Value(wrong.begin(), wrong.end()));
  ::_exit(0);
}

}  // namespace

TEST_CASE(
    "world: twenty at once over random members that are processes, one of which is killed; from "
    "seeds" *
    doctest::timeout(7200)) {
  const std::uint64_t begin = number_from("HVD_TEST_SEED", 1),
                      end = begin + number_from("HVD_TEST_SEEDS", 4);
  for (std::uint64_t seed = begin; seed < end; ++seed) {
    CAPTURE(seed);
    const ProgramPlan plan = plan_of(seed, {.ranks = kRanks, .kills = true});
    std::string folder = "/tmp/hvd-worlds-XXXXXX";
    REQUIRE(::mkdtemp(folder.data()) != nullptr);
    const auto store = std::make_shared<FileStore>(folder);
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      const pid_t child = ::fork();
      if (child == 0) be_rank(plan, rank, store);
      ranks.push_back(child);
    }
    const auto deadline = std::chrono::steady_clock::now() + 90s;
    std::vector<bool> over(kRanks);
    while (std::ranges::count(over, false) > 0 && std::chrono::steady_clock::now() < deadline) {
      for (std::size_t rank = 0; rank < kRanks; ++rank)
        if (!over[rank]) over[rank] = ::waitpid(ranks[rank], nullptr, WNOHANG) == ranks[rank];
      std::this_thread::sleep_for(1ms);
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      CAPTURE(rank);
      CHECK(over[static_cast<std::size_t>(rank)]);
      if (!over[static_cast<std::size_t>(rank)]) {
        ::kill(ranks[static_cast<std::size_t>(rank)], SIGKILL);
        ::waitpid(ranks[static_cast<std::size_t>(rank)], nullptr, 0);
        continue;
      }
      const auto wrong = store->get(formatted("wrong {}", rank), 0ms);
      CHECK(wrong.has_value() == (rank != plan.victim));
      if (wrong) CHECK(std::string(wrong->begin(), wrong->end()) == "");
    }
    std::filesystem::remove_all(folder);
  }
}

}  // namespace hvd::test::worlds_of_processes
