// A rank that calls shutdown() while others wait for it: they are told, all alike, and what does
// not need it goes on.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "hvd/base/text.h"
#include "tests/support/late_transport.h"
#include "tests/support/leaving.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

struct Size {
  int ranks, domains;
};
constexpr Size kSizes[] = {{2, 1}, {2, 2}, {3, 1}, {3, 2}, {3, 3}, {4, 2}, {6, 1}, {6, 2}, {6, 3}};

}  // namespace

TEST_CASE(
    "leaving: who waits for a rank that has left is told, again and again, and the others go on") {
  for (const auto& [ranks, domains] : kSizes) {
    for (const int leaver : {0, ranks - 1}) {
      CAPTURE(ranks);
      CAPTURE(domains);
      CAPTURE(leaver);
      WorldOptions options{.size = ranks, .domains = domains, .config = {}};
      std::vector<int> others;
      for (int rank = 0; rank < ranks; ++rank)
        if (rank != leaver) others.push_back(rank);
      options.config.process_sets = {others};
      ThreadWorld world(options);
      world.run([&](int rank, Engine& engine) {
        std::vector<float> values(3, 1.0F);
        engine.wait(*engine.submit(sum_of(values, "before"), After::Wait));
        if (rank == leaver) return;  // straight to shutdown()
        for (int round = 0; round < 5; ++round) {
          CHECK(is_told(words_of(engine, "x"), leaver, "x"));
          CHECK(is_told(words_of(engine, "before"), leaver, "before"));
          for (int i = 0; i < 10; ++i) {
            std::vector<float> own(5, static_cast<float>(rank + i));
            engine.wait(
                *engine.submit(sum_of(own, formatted("of the others {}", i % 3), 1), After::Wait));
            float sum = 0;
            for (const int other : others) sum += static_cast<float>(other + i);
            CHECK(own == std::vector<float>(5, sum));
          }
        }
      });
    }
  }
}

TEST_CASE(
    "leaving: one of a host waits, another of it does not, and the one that left is elsewhere") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 6, .domains = domains, .config = {}});
    std::atomic<int> told{0};
    world.run([&](int rank, Engine& engine) {
      if (rank == 5) return;
      // Ranks 1 and 3 submit nothing until the others have been told.
      while (rank % 2 == 1 && told < 3) std::this_thread::yield();
      // By then others have left too: of them the first is named.
      const std::string words = words_of(engine, "half");
      CHECK(words.find("has ended, or called hvd::shutdown(), without submitting it") !=
            std::string::npos);
      if (rank % 2 == 0) CHECK(is_told(words, 5, "half"));
      ++told;
      while (told < 3) std::this_thread::yield();
    });
  }
}

TEST_CASE(
    "leaving: what a rank has submitted before it leaves takes place, also what waits for its "
    "name") {
  constexpr int kUnnamed = 600;  // more than there are names for at once
  for (const auto& [ranks, domains] : kSizes) {
    CAPTURE(ranks);
    CAPTURE(domains);
    ThreadWorld world({.size = ranks, .domains = domains, .config = {}});
    std::vector<std::vector<std::vector<float>>> all(static_cast<std::size_t>(ranks));
    std::vector<std::vector<std::shared_ptr<HandleState>>> pending(static_cast<std::size_t>(ranks));
    std::atomic<int> left{0};
    world.run(
        [&](int rank, Engine& engine) {
          auto& mine = all[static_cast<std::size_t>(rank)];
          mine.assign(kUnnamed, std::vector<float>(2, static_cast<float>(rank + 1)));
          // The last rank comes when all others are about to leave, or have left.
          while (rank == ranks - 1 && left < ranks - 1) std::this_thread::yield();
          for (auto& values : mine)
            pending[static_cast<std::size_t>(rank)].push_back(engine.submit(sum_of(values, "")));
          ++left;
          if (rank == ranks - 1)
            for (const auto& each : pending.back()) engine.wait(*each);
          engine.shutdown();
        },
        false);
    const auto sum = static_cast<float>(ranks * (ranks + 1) / 2);
    for (const auto& of_rank : pending)
      for (const auto& each : of_rank) CHECK(each->status.text() == "");
    for (const auto& of_rank : all)
      for (const auto& values : of_rank) CHECK(values == std::vector<float>(2, sum));
  }
}

TEST_CASE(
    "leaving: a name that all have submitted is reduced, any other fails on all that have, whoever "
    "leaves when") {
  constexpr int kNames = 12;
  std::mt19937 random(7);
  for (int program = 0; program < 60; ++program) {
    const auto [ranks, domains] = kSizes[static_cast<std::size_t>(program) % std::size(kSizes)];
    CAPTURE(program);
    CAPTURE(ranks);
    CAPTURE(domains);
    WorldOptions options{.size = ranks, .domains = domains, .config = {}};
    if (ranks > 2) options.config.process_sets = {{0, ranks - 1}, {1, ranks - 1}};
    std::vector<int> set_of(kNames);
    for (auto& set : set_of) set = ranks > 2 ? static_cast<int>(random() % 3) : 0;
    std::vector<std::vector<bool>> submits(static_cast<std::size_t>(ranks),
                                           std::vector<bool>(kNames));
    std::vector<std::vector<int>> pauses(static_cast<std::size_t>(ranks), std::vector<int>(kNames));
    for (auto& of_rank : submits)
      for (int name = 0; name < kNames; ++name)
        of_rank[static_cast<std::size_t>(name)] = random() % 10 < 8;
    for (auto& of_rank : pauses)
      for (auto& pause : of_rank) pause = static_cast<int>(random() % 20);
    const auto has_rank = [&](int name, int rank) {
      const int set = set_of[static_cast<std::size_t>(name)];
      return set == 0 || rank == ranks - 1 || rank == set - 1;
    };
    ThreadWorld world(options);
    std::vector<std::vector<std::shared_ptr<HandleState>>> pending(static_cast<std::size_t>(ranks));
    std::vector<std::vector<std::vector<float>>> all(static_cast<std::size_t>(ranks));
    world.run([&](int rank, Engine& engine) {
      const auto r = static_cast<std::size_t>(rank);
      pending[r].resize(kNames);
      all[r].assign(kNames, std::vector<float>(2, static_cast<float>(rank + 1)));
      for (int name = 0; name < kNames; ++name) {
        const auto n = static_cast<std::size_t>(name);
        for (int i = 0; i < pauses[r][n]; ++i) std::this_thread::yield();
        if (submits[r][n] && has_rank(name, rank))
          pending[r][n] = engine.submit(sum_of(all[r][n], formatted("n{}", name), set_of[n]));
      }
    });
    for (int name = 0; name < kNames; ++name) {
      CAPTURE(name);
      const auto n = static_cast<std::size_t>(name);
      bool everybody = true;
      float sum = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        everybody =
            everybody && (!has_rank(name, rank) || submits[static_cast<std::size_t>(rank)][n]);
        if (has_rank(name, rank)) sum += static_cast<float>(rank + 1);
      }
      for (int rank = 0; rank < ranks; ++rank) {
        const auto& handle = pending[static_cast<std::size_t>(rank)][n];
        if (!handle) continue;
        CAPTURE(rank);
        CAPTURE(handle->status.text());
        CHECK(handle->done.load());
        CHECK(handle->status.code() == (everybody ? Status::Code::Ok : Status::Code::Shutdown));
        if (everybody) CHECK(all[static_cast<std::size_t>(rank)][n] == std::vector<float>(2, sum));
      }
    }
  }
}

TEST_CASE(
    "leaving: a rank that has joined is missed by nobody when it leaves, and one that has not by "
    "all who join") {
  for (const auto& [ranks, domains] : kSizes) {
    CAPTURE(ranks);
    CAPTURE(domains);
    ThreadWorld world({.size = ranks, .domains = domains, .config = {}});
    world.run([&](int rank, Engine& engine) {
      if (rank == ranks - 1) return;
      for (int attempt = 0; attempt < 2; ++attempt) {
        Submission join;
        join.kind = OpKind::Join;
        join.name = std::string(kJoin);
        CHECK_THROWS_AS(engine.wait(*engine.submit(std::move(join), After::Wait)), Shutdown);
      }
    });
  }
}

namespace {

/// What is said where `work` fails because a rank has left.
std::string told(const std::function<void()>& work) {
  try {
    work();
  } catch (const RankFailed& error) {
    return error.what();
  }
  return "no RankFailed";
}

/// Worlds with a name, of which `leaver` leaves while the others go on in set 1.
void with_named_worlds(const std::function<void(int leaver, int rank, Engine& engine,
                                                const std::string& says)>& body) {
  for (const auto& [ranks, domains] : kSizes) {
    for (const int leaver : {0, ranks - 1}) {
      CAPTURE(ranks);
      CAPTURE(domains);
      CAPTURE(leaver);
      WorldOptions options{.size = ranks, .domains = domains, .config = {}};
      options.customize = [](int /*rank*/, EngineParts& parts) { parts.world = "named"; };
      std::vector<int> others;
      for (int rank = 0; rank < ranks; ++rank)
        if (rank != leaver) others.push_back(rank);
      options.config.process_sets = {others};
      ThreadWorld world(options);
      const std::string says = formatted("rank {} has left the world 'named'", leaver);
      world.run([&](int rank, Engine& engine) { body(leaver, rank, engine, says); }, false);
    }
  }
}

}  // namespace

TEST_CASE("leaving: of a world with a name, what needs who has left fails as it is called there") {
  std::atomic<bool> has_left{false};
  with_named_worlds([&](int leaver, int rank, Engine& engine, const std::string& says) {
    std::vector<float> values(3, 1.0F);
    engine.wait(*engine.submit(sum_of(values, "before"), After::Wait));
    if (rank == leaver) {
      CHECK(!engine.leave(20ms));
      has_left = true;
      CHECK(engine.shutdown());  // once the others have, as another thread would
      has_left = false;
      return;
    }
    const auto needs = [&](const char* name) {
      const auto said =
          told([&] { engine.wait(*engine.submit(sum_of(values, name), After::Wait)); });
      CHECK(said.starts_with(formatted("allreduce '{}': {} without submitting it. ", name, says)));
    };
    for (int round = 0; round < 20; ++round) {
      needs("x");
      needs("before");
      std::vector<float> own(5, 1.0F);
      engine.wait(*engine.submit(sum_of(own, "of the others", 1), After::Wait));
      CHECK(own.front() == static_cast<float>(engine.topology().size - 1));
      std::this_thread::sleep_for(2ms);
    }
    PeerCall call{values.data(), values.data(), DataType::Float32, 3, leaver, 0, {}};
    CHECK(told([&] { engine.peer_calls().send(PeerCall(call)); }).find(says) != std::string::npos);
    CHECK(told([&] { engine.peer_calls().receive(std::move(call)); }).find(says) !=
          std::string::npos);
    CHECK(!engine.has_failed());
    while (!has_left) std::this_thread::sleep_for(1ms);
    CHECK(engine.leave(1h));
    CHECK(engine.shutdown());
  });
}

TEST_CASE(
    "leaving: a world with a name is abandoned by who leaves it with something pending, and by who "
    "has left it") {
  for (const bool pends : {true, false}) {
    CAPTURE(pends);
    with_named_worlds([&](int leaver, int rank, Engine& engine, const std::string& says) {
      std::vector<float> values(3, 1.0F);
      engine.wait(*engine.submit(sum_of(values, "before"), After::Wait));
      if (rank != leaver) {
        std::string said = "no RankFailed";
        while (said == "no RankFailed")  // what comes first may still be done
          said = told([&] {
            engine.wait(*engine.submit(sum_of(values, "of the others", 1), After::Wait));
          });
        CHECK(said == says);
        CHECK(engine.has_failed());
      } else if (pends) {
        const auto pending = engine.submit(sum_of(values, "alone"));
        const auto begin = Clock::now();
        CHECK(engine.leave(20ms));
        CHECK(Clock::now() - begin < 5s);
        CHECK(pending->status.text() == says);
      } else {
        CHECK(!engine.leave(20ms));
        engine.abort();
      }
      CHECK(!engine.shutdown());
    });
  }
}

namespace {

constexpr Size kSpanning[] = {{2, 2}, {3, 3}, {3, 2}, {4, 2}, {6, 3}};

/// Calls `body(world, leaver, rounds)` for worlds of several domains, between which messages come
/// at once, or late.
void with_leavers(const std::function<void(ThreadWorld& world, int leaver, int rounds)>& body) {
  constexpr int kCycles = 20;  // of each size
  for (const auto& [ranks, domains] : kSpanning) {
    for (int cycle = 0; cycle < kCycles; ++cycle) {
      CAPTURE(ranks);
      CAPTURE(domains);
      CAPTURE(cycle);
      WorldOptions options{.size = ranks, .domains = domains, .config = {}};
      if (cycle % 4 == 3)
        options.customize = [cycle](int rank, EngineParts& parts) {
          const auto seed = static_cast<unsigned>(100 * cycle + rank);
          if (parts.transport)
            parts.transport =
                std::make_unique<LateTransport>(std::move(parts.transport), seed, 300us);
        };
      ThreadWorld world(options);
      body(world, cycle % ranks, cycle % 20);
    }
  }
}

}  // namespace

TEST_CASE(
    "leaving: what is decided and not yet read where the rank leaves does not hold up the others") {
  with_leavers([](ThreadWorld& world, int leaver, int rounds) {
    LastSubmission program(world.size(), leaver, rounds);
    world.run([&](int rank, Engine& engine) { program.run(rank, engine); });
    program.check();
  });
}

TEST_CASE("leaving: a thread goes on submitting while another one shuts down") {
  with_leavers([](ThreadWorld& world, int leaver, int rounds) {
    SubmitsDuringShutdown program(leaver, rounds);
    world.run([&](int rank, Engine& engine) { program.run(rank, engine); });
  });
}

}  // namespace hvd::test
