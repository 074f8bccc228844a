// A leader passes on what other hosts' ranks wait for, also while its own ranks have nothing to do.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "tests/support/thread_world.h"

namespace hvd::test {

TEST_CASE("leaders: operations of ranks on other hosts do not wait for a leader that has nothing to do itself") {
  constexpr int kOperations = 100;
  for (const int domains : {3, 4, 6}) {
    CAPTURE(domains);
    // The set's ranks are on hosts whose messages pass through hosts that have none of them.
    WorldOptions options{.size = domains, .domains = domains, .config = {}};
    options.config.process_sets = {{1, domains - 1}};
    ThreadWorld world(options);
    std::atomic<int> done{0};
    const auto start = std::chrono::steady_clock::now();
    world.run([&](int rank, Engine& engine) {
      if (rank == 1 || rank == domains - 1) {
        for (int i = 0; i < kOperations; ++i) {
          std::vector<float> values(3, static_cast<float>(rank + i));
          Submission submission = allreduce_of(values, "between two", DataType::Float32);
          submission.process_set = 1;
          engine.wait(*engine.submit(std::move(submission), After::Wait));
          CHECK(values == std::vector<float>(3, static_cast<float>(domains + 2 * i)));
        }
        ++done;
      }
      while (done < 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // this rank computes
    });
    // With a look every 100 ms these take 10 s and more.
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  }
}

}  // namespace hvd::test
