// The current world: threads that end it at the same time.
#include "hvd/api/world.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "hvd/hvd.h"
#include "tests/support/thread_world.h"

namespace hvd::test {

TEST_CASE("shutdown() by several threads: one closes the world, and all return when it is closed") {
  ThreadWorld ranks({.size = 2, .domains = 1, .config = {}});
  std::atomic<int> closed{0};
  std::atomic<int> clean_ends{0};
  RunningWorld world;
  world.engine = {&ranks.engine(0), [](Engine*) {}};
  world.close = [&](bool clean) {
    clean_ends += clean ? 1 : 0;
    ++closed;
  };
  install_world(std::move(world));
  ranks.run(
      [&](int rank, Engine& engine) {
        if (rank == 1) {
          // all threads of rank 0 have begun, most likely
          std::this_thread::sleep_for(std::chrono::milliseconds(200));
          engine.shutdown();
          return;
        }
        std::atomic<int> early{0};
        std::vector<std::thread> threads;
        for (int i = 0; i < 4; ++i)
          threads.emplace_back([&, i] {
            if (i == 3) {
              leave_world();
            } else {
              shutdown();
            }
            if (closed != 1) ++early;
          });
        for (auto& thread : threads) thread.join();
        CHECK(early == 0);
      },
      false);
  CHECK(closed == 1);
  CHECK(clean_ends == 1);
  CHECK(!has_world());
}

}  // namespace hvd::test
