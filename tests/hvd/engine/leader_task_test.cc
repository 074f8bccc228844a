// Leaders of several hosts with engines around them: what passes through those that have nothing to
// do themselves, and what is said of names after other names were decided.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/thread_world.h"

namespace hvd::test {

TEST_CASE(
    "leaders: operations of ranks on other hosts do not wait for a leader that has nothing to do "
    "itself") {
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
      // this rank computes
      while (done < 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    });
    // With a look every 100 ms these take 10 s and more.
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  }
}

TEST_CASE(
    "leaders: different operations under one name are told of, also when other names were decided "
    "or refused before") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    WorldOptions options{.size = 4, .domains = domains, .config = {}};
    options.config.process_sets = {{0, 1, 2}};
    ThreadWorld world(options);
    world.run([](int rank, Engine& engine) {
      for (int i = 0; i < 3; ++i) {
        std::vector<float> values(1);
        engine.wait(*engine.submit(
            allreduce_of(values, "before " + std::to_string(i), DataType::Float32), After::Wait));
      }
      if (rank == 3) return;  // and leaves
      std::vector<float> values(1);
      CHECK_THROWS_AS(engine.wait(*engine.submit(allreduce_of(values, "refused", DataType::Float32),
                                                 After::Wait)),
                      Shutdown);
      for (int round = 0; round < 2; ++round) {
        Submission submission = allreduce_of(values, "disputed", DataType::Float32);
        if (rank == 1) submission.kind = OpKind::Allgather;
        submission.process_set = 1;
        CHECK_THROWS_AS(engine.wait(*engine.submit(std::move(submission), After::Wait)), Mismatch);
      }
    });
  }
}

}  // namespace hvd::test
