// Small operations that come back on all ranks of several domains: that the leaders end them among
// themselves, and that whatever a rank does instead is noticed as ever, also where messages between
// some hosts take longer than between others.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "hvd/negotiation/leaders/direct_rounds.h"
#include "tests/support/engine_probe.h"
#include "tests/support/late_transport.h"
#include "tests/support/sanitized.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;
using TestClock = std::chrono::steady_clock;

struct Seen {
  std::atomic<int> contributions{0}, slow{0}, asked{0};
};

WorldOptions options_of(int size, int domains, Seen& seen, std::chrono::microseconds latest = 0us,
                        unsigned seed = 1) {
  WorldOptions options{.size = size, .domains = domains, .config = {}};
  options.customize = [&seen, latest, seed](int rank, EngineParts& parts) {
    if (!parts.transport) return;
    const auto count = [&seen](const Message& message) {
      if (!DirectRounds::is_direct(message)) return;
      Reader reader(std::span(message.bytes).subspan(16));
      const auto what = reader.get<std::uint64_t>();
      ++(what == 0 ? seen.contributions : what == 1 ? seen.slow : seen.asked);
    };
    parts.transport = std::make_unique<LateTransport>(
        std::move(parts.transport), seed * 100 + static_cast<unsigned>(rank), latest, count);
  };
  return options;
}

/// A sum whose output is its input, lies beside it, or overlaps it, by turns.
struct Sum {
  static constexpr std::size_t kCount = 3;
  std::vector<std::int32_t> values;  // the input, and then room
  std::size_t output_at;
  std::string name;
  Shape shape{kCount};
  int set = 0;
  /// `places`: 2 for sums that do not overlap their input, which alone are direct.
  Sum(int rank, int round, std::string called, int of = 0, int places = 3)
      : values(2 * kCount, -1),
        output_at(std::array{std::size_t{0}, kCount, std::size_t{1}}[round % places]),
        name(std::move(called)),
        set(of) {
    std::fill_n(values.begin(), kCount, rank + 10 * round + 1);
  }
  [[nodiscard]] SmallCall call() {
    SmallCall call;
    call.name = name;
    call.process_set = set;
    call.dtype = DataType::Int32;
    call.shape = shape;
    call.input = values.data();
    call.output = values.data() + output_at;
    call.op = ReduceOp::Sum;
    return call;
  }
  [[nodiscard]] Submission submission() {
    Submission submission = allreduce_of(values, name, DataType::Int32);
    submission.process_set = set;
    submission.tensors.front().shape = shape;
    submission.tensors.front().output = values.data() + output_at;
    return submission;
  }
  /// Returns whether the fast path was taken, at first.
  bool run(Engine& engine) {
    if (engine.small_calls().try_run(call())) return true;
    engine.wait(*engine.submit(submission(), After::Wait));
    return false;
  }
  [[nodiscard]] bool is_right(int size, int round) const {
    const auto output = std::span(values).subspan(output_at, kCount);
    return std::ranges::all_of(output, [&](std::int32_t value) {
      return value == size * (size - 1) / 2 + size * (10 * round + 1);
    });
  }
  /// Returns whether what is not the output is as it was on that rank.
  [[nodiscard]] bool is_intact(int rank, int round) const {
    for (std::size_t i = 0; i < values.size(); ++i)
      if (!(i >= output_at && i < output_at + kCount) &&
          values[i] != (i < kCount ? rank + 10 * round + 1 : -1))
        return false;
    return true;
  }
};

struct Size {
  int ranks, domains;
};
constexpr Size kSizes[] = {{2, 2}, {3, 2}, {3, 3}, {4, 2}, {6, 3}, {8, 8}};

}  // namespace

TEST_CASE("direct path: one contribution to each other domain a round, and nothing else") {
  for (const auto& [ranks, domains] : kSizes) {
    CAPTURE(ranks);
    CAPTURE(domains);
    Seen seen;
    constexpr int kRounds = 60;
    std::atomic<int> fast{0};
    ThreadWorld world(options_of(ranks, domains, seen));
    world.run([&](int rank, Engine& engine) {
      for (int round = 0; round < kRounds; ++round) {
        Sum sum(rank, round, "loss", 0, 2);
        fast += sum.run(engine) ? 1 : 0;
        if (!sum.is_right(engine.topology().size, round) || !sum.is_intact(rank, round))
          FAIL_CHECK("wrong values in round " << round);
      }
    });
    CHECK(fast == ranks * (kRounds - 2));  // it is a repeated operation from its third call on
    CHECK(seen.contributions > 0);
    CHECK(seen.contributions <= (kRounds - 2) * domains * (domains - 1));
    // A thread that the machine holds up for long sends others the long way, for a while.
    if (seen.slow == 0) CHECK(seen.contributions == (kRounds - 2) * domains * (domains - 1));
  }
}

TEST_CASE("direct path: more than eight domains go by way of the tree") {
  Seen seen;
  ThreadWorld world(options_of(9, 9, seen));
  world.run([&](int rank, Engine& engine) {
    for (int round = 0; round < 10; ++round) {
      Sum sum(rank, round, "loss");
      CHECK_FALSE(sum.run(engine));
      CHECK(sum.is_right(9, round));
    }
  });
  CHECK(seen.contributions == 0);
}

TEST_CASE(
    "direct path: ranks that are late, that take the long way, or that do other things first") {
  for (const auto& [ranks, domains] : kSizes) {
    if (ranks == 8) continue;
    CAPTURE(ranks);
    CAPTURE(domains);
    for (unsigned seed = 1; seed <= (kSanitized ? 1 : 3); ++seed) {
      Seen seen;
      ThreadWorld world(options_of(ranks, domains, seen, seed == 1 ? 0us : 300us, seed));
      world.run([&](int rank, Engine& engine) {
        std::mt19937 common(seed), own(seed * 1000 + static_cast<unsigned>(rank));
        for (int round = 0; round < 60; ++round) {
          const std::string name = common() % 3 == 0 ? "a" : "b";
          const bool is_late = common() % 20 == 0;
          if (is_late &&
              rank == static_cast<int>(common() % static_cast<unsigned>(engine.topology().size)))
            std::this_thread::sleep_for(30ms);
          Sum sum(rank, round, name);
          if (own() % 16 == 0) {
            Submission submission = sum.submission();
            submission.internal = true;  // takes the long way
            engine.wait(*engine.submit(std::move(submission), After::Return));
          } else {
            sum.run(engine);
          }
          if (!sum.is_right(engine.topology().size, round) || !sum.is_intact(rank, round))
            FAIL_CHECK("wrong values in round " << round);
        }
      });
      CHECK(seen.contributions > 0);
      CHECK(seen.slow > 0);
    }
  }
}

// The last round may be over on one host, whose ranks then leave, while its contribution is still
// on its way to another.
TEST_CASE("direct path: a rank that leaves after the last round does nobody harm") {
  for (unsigned seed = 1; seed <= (kSanitized ? 10 : 40); ++seed) {
    CAPTURE(seed);
    std::mt19937 dice(seed);
    const auto& [ranks, domains] = kSizes[dice() % 5];
    Seen seen;
    ThreadWorld world(options_of(ranks, domains, seen, 800us, seed));
    const int rounds = 4 + static_cast<int>(dice() % 4);
    world.run([&](int rank, Engine& engine) {
      for (int round = 0; round < rounds; ++round) {
        Sum sum(rank, round, "loss");
        sum.run(engine);
        CHECK(sum.is_right(engine.topology().size, round));
      }
    });  // and calls shutdown()
  }
}

TEST_CASE("direct path: who waits for a rank that has left is told") {
  for (const auto& [ranks, domains] : kSizes) {
    if (ranks == 8) continue;
    for (const int leaver : {0, ranks - 1}) {
      CAPTURE(ranks);
      CAPTURE(domains);
      CAPTURE(leaver);
      Seen seen;
      ThreadWorld world(options_of(ranks, domains, seen, 200us));
      world.run([&, who = leaver](int rank, Engine& engine) {
        const int size = engine.topology().size;
        for (int round = 0; round < 6; ++round) {
          Sum sum(rank, round, "loss");
          sum.run(engine);
          CHECK(sum.is_right(size, round));
        }
        if (rank == who) return;
        for (int round = 0; round < 3; ++round) {
          Sum sum(rank, round, "loss");
          try {
            sum.run(engine);
            FAIL_CHECK("no error");
          } catch (const Shutdown& error) {
            // Others leave too, as soon as they have been told.
            CHECK(std::string(error.what())
                      .find("has ended, or called hvd::shutdown(), without submitting it") !=
                  std::string::npos);
          }
        }
      });
    }
  }
}

TEST_CASE("direct path: a rank that joins, while another thread of it waits or not") {
  for (const auto& [ranks, domains] : kSizes) {
    if (ranks == 8) continue;
    CAPTURE(ranks);
    CAPTURE(domains);
    for (unsigned seed = 1; seed <= 3; ++seed) {
      Seen seen;
      ThreadWorld world(options_of(ranks, domains, seen, 300us, seed));
      std::atomic<bool> other_is_over{false};
      world.run([&](int rank, Engine& engine) {
        const int size = engine.topology().size;
        const auto steady = [&](int rounds) {
          for (int round = 0; round < rounds; ++round) {
            Sum sum(rank, round, "loss");
            sum.run(engine);
            CHECK(sum.is_right(size, round));
          }
        };
        const auto join = [&] {
          Submission submission;
          submission.kind = OpKind::Join;
          submission.name = kJoin;
          engine.wait(*engine.submit(submission, After::Wait));
        };
        steady(6);
        if (rank == size - 1) {
          Sum last(rank, 6, "loss");
          bool refused = false;
          std::thread other([&] {
            try {
              last.run(engine);
            } catch (const Joined&) {
              refused = true;
            }
            other_is_over = true;
          });
          std::this_thread::sleep_for(std::chrono::microseconds(100 * seed));
          join();  // before or after the other thread's operation, which waits for nothing but it
          other.join();
          CHECK(refused != last.is_right(size, 6));
        } else {
          Sum sum(rank, 6, "loss");
          sum.run(engine);
          for (int round = 0; round < 5; ++round) {
            Sum without(rank, round, "loss");
            without.run(engine);
            CHECK(without.values[without.output_at] ==
                  (size - 1) * (size - 2) / 2 + (size - 1) * (10 * round + 1));
          }
          // a thread that starts after all have joined would begin the next round
          while (!other_is_over) std::this_thread::yield();
          join();
        }
        steady(10);
      });
    }
  }
}

TEST_CASE(
    "direct path: a set that is removed while another thread uses it has done the same rounds on "
    "all ranks") {
  const auto control = [](std::string_view name, const Shape& ranks, int set) {
    Submission submission;
    submission.kind = OpKind::Control;
    submission.name = std::string(name);
    submission.root = set;
    submission.tensors.push_back({nullptr, nullptr, DataType::Int64, ranks, nullptr, true});
    return submission;
  };
  for (const auto& [ranks, domains] : kSizes) {
    if (ranks == 8) continue;
    CAPTURE(ranks);
    CAPTURE(domains);
    Seen seen;
    ThreadWorld world(options_of(ranks, domains, seen, 100us));
    constexpr int kRemovals = 12;
    std::vector<std::vector<int>> done(static_cast<std::size_t>(ranks),
                                       std::vector<int>(kRemovals));
    world.run([&](int rank, Engine& engine) {
      const int size = engine.topology().size;
      Shape all(static_cast<std::size_t>(size));
      std::iota(all.begin(), all.end(), 0);
      for (int removal = 0; removal < kRemovals; ++removal) {
        const auto made = engine.submit(control(kAddProcessSet, all, 0), After::Wait);
        engine.wait(*made);
        int& rounds = done[static_cast<std::size_t>(rank)][static_cast<std::size_t>(removal)];
        std::thread other([&, set = static_cast<int>(made->value)] {
          try {
            for (;; ++rounds) {
              Sum sum(rank, rounds, "loss", set);
              sum.run(engine);
              CHECK(sum.is_right(size, rounds));
            }
          } catch (const InvalidArgument&) {
          }
        });
        std::this_thread::sleep_for(
            std::chrono::microseconds(500 + 300 * (removal % 8) + 100 * rank));
        engine.wait(*engine.submit(control(kRemoveProcessSet, all, static_cast<int>(made->value)),
                                   After::Wait));
        other.join();
      }
    });
    for (const auto& of_rank : done) CHECK(of_rank == done.front());
  }
}

TEST_CASE("direct path: different operations under one name are told of on all ranks") {
  for (const auto& [ranks, domains] : {Size{2, 2}, Size{4, 2}, Size{3, 3}}) {
    CAPTURE(ranks);
    CAPTURE(domains);
    Seen seen;
    ThreadWorld world(options_of(ranks, domains, seen, 200us));
    world.run([&](int rank, Engine& engine) {
      const int size = engine.topology().size;
      for (int round = 0; round < 6; ++round) {
        Sum sum(rank, round, "x");
        sum.run(engine);
        CHECK(sum.is_right(size, round));
      }
      Sum sum(rank, 0, "x");
      if (rank == size - 1) {
        Submission barrier;
        barrier.kind = OpKind::Barrier;
        barrier.name = "x";
        CHECK_THROWS_AS(engine.wait(*engine.submit(barrier, After::Wait)), Mismatch);
      } else {
        CHECK_THROWS_AS(sum.run(engine), Mismatch);
      }
      for (int round = 0; round < 20; ++round) {
        Sum again(rank, round, "x");
        again.run(engine);
        CHECK(again.is_right(size, round));
      }
    });
  }
}

TEST_CASE("direct path: a rank that dies in a round is named on all others") {
  for (const auto& [ranks, domains] : {Size{2, 2}, Size{4, 2}, Size{3, 3}}) {
    CAPTURE(ranks);
    CAPTURE(domains);
    Seen seen;
    ThreadWorld world(options_of(ranks, domains, seen));
    world.run(
        [&](int rank, Engine& engine) {
          const int size = engine.topology().size;
          for (int round = 0; round < 6; ++round) {
            Sum sum(rank, round, "x");
            sum.run(engine);
            CHECK(sum.is_right(size, round));
          }
          if (rank == size - 1 && size > domains) return EngineProbe::die(engine);
          Sum sum(rank, 0, "x");
          if (size > domains) CHECK_THROWS_AS(sum.run(engine), RankFailed);
        },
        false);
  }
}

}  // namespace hvd::test
