// barrier_until: who comes, who is missed, and that the world lives on.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/support/engine_probe.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

void on_worlds(const std::function<void(int, int, Engine&)>& body, bool shut_down = true) {
  for (const auto& [size, domains] : {std::pair{2, 1}, {4, 1}, {2, 2}, {3, 3}, {5, 2}}) {
    CAPTURE(size);
    CAPTURE(domains);
    WorldOptions options{.size = size, .domains = domains};
    options.config.log_level = LogLevel::Off;
    ThreadWorld world(options);
    world.run([&, size = size](int rank, Engine& engine) { body(rank, size, engine); }, shut_down);
  }
}

TEST_CASE("all come: nobody is missed, however often") {
  on_worlds([](int rank, int, Engine& engine) {
    for (int time = 0; time < 20; ++time) {
      if (time % 5 == rank) std::this_thread::sleep_for(2ms);
      CHECK(engine.peer_calls().meet(1h).empty());
    }
  });
}

TEST_CASE("who does not come is named, and may come later; the world lives on") {
  std::atomic<int> missed{0};
  on_worlds([&](int rank, int size, Engine& engine) {
    const int late = size - 1;
    std::vector<float> values(3, 1);
    if (rank != late) {
      // The others may come late too, where a core is busy: but they come.
      const auto missing = engine.peer_calls().meet(300ms);
      REQUIRE(!missing.empty());
      CHECK(missing.back() == late);
      ++missed;
    }
    engine.wait(*engine.submit(allreduce_of(values, "go on", DataType::Float32), After::Wait));
    CHECK(values.front() == static_cast<float>(size));
    if (rank == late) CHECK(engine.peer_calls().meet(1h).empty());  // the others' first is over
    CHECK(engine.peer_calls().meet(1h).empty());
  });
  CHECK(missed.load() == 1 + 3 + 1 + 2 + 4);
}

TEST_CASE("ranks that have left are missed at once") {
  on_worlds(
      [&](int rank, int size, Engine& engine) {
        if (rank == 0)
          CHECK(engine.peer_calls().meet(1h).size() == static_cast<std::size_t>(size - 1));
        engine.shutdown();
      },
      false);
}

TEST_CASE("a world that has failed says so") {
  for (const int size : {2, 4}) {
    WorldOptions options{.size = size};
    options.config.log_level = LogLevel::Off;
    ThreadWorld world(options);
    world.run(
        [&](int rank, Engine& engine) {
          if (rank == 1) return EngineProbe::die(engine);
          if (rank == 0) CHECK_THROWS_AS(engine.peer_calls().meet(1h), RankFailed);
        },
        false);
  }
}

}  // namespace
}  // namespace hvd::test
