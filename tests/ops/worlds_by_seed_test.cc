// Many worlds at once over random members, with random operations and ends: what one does is right
// whatever happens to the others, and waits for none of them. Members are threads of this process;
// in tests/system/worlds_of_processes_test.cc processes. HVD_TEST_SEEDS: how many programs (4).
#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "hvd/base/text.h"
#include "tests/support/random.h"
#include "tests/support/sanitized.h"
#include "tests/support/thread_world.h"
#include "tests/support/worlds/memory_store.h"
#include "tests/support/worlds/worlds_by_seed.h"

namespace hvd::test::worlds_by_seed {

namespace {

void run_seeds(std::uint64_t seeds, const ProgramShape& shape) {
  const std::uint64_t begin = number_from("HVD_TEST_SEED", 1),
                      end = begin + number_from("HVD_TEST_SEEDS", seeds);
  for (std::uint64_t seed = begin; seed < end; ++seed) {
    CAPTURE(seed);
    const Watchdog watchdog(formatted("seed {} of many worlds", seed),
                            std::chrono::seconds(kSanitized ? 300 : 100));
    const ProgramPlan plan = plan_of(seed, shape);
    const auto store = std::make_shared<MemoryStore>();
    std::vector<std::thread> members;
    for (const WorldPlan& world : plan.worlds)
      for (int place = 0; place < static_cast<int>(world.members.size()); ++place)
        members.emplace_back([&world, place, &store] {
          const auto size = static_cast<int>(world.members.size());
          CHECK(take_part(world, place, rendezvous_of(store, place, size, world.name), {}) == "");
        });
    for (auto& member : members) member.join();
  }
}

}  // namespace

TEST_CASE("world: twenty at once over random members, some of which fail; from seeds" *
          doctest::timeout(7200)) {
  run_seeds(kSanitized ? 1 : 4, {});
}

TEST_CASE(
    "world: several at once over random members that share no memory, some of which fail; from "
    "seeds" *
    doctest::timeout(7200)) {
  if (kSanitized) return;  // UCX watches the same functions of memory as sanitizers do
  run_seeds(2, {.worlds = 6, .shares_memory = false});
}

}  // namespace hvd::test::worlds_by_seed
