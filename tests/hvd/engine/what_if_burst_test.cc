/// Many small operations in flight at once, as a training loop has a handle for each gradient: in
/// any order on each rank, waited for in any order, polled, dropped, by several threads, while a
/// rank dies.

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <random>
#include <thread>

#include "hvd/engine/engine.h"
#include "hvd/routes.h"
#include "tests/support/engine_probe.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

/// One allreduce of a burst, whose type, operation and size follow from its number.
struct Part {
  DataType dtype;
  ReduceOp op;
  std::size_t count;
  std::string name;
  std::vector<float> floats;
  std::vector<std::int32_t> integers;
  std::shared_ptr<HandleState> pending;

  explicit Part(int number, std::string prefix = "part.")
      : dtype(number % 3 == 0 ? DataType::Int32 : DataType::Float32),
        op(number % 4 == 1 ? ReduceOp::Max : ReduceOp::Sum),
        count(number % 7 == 0 ? 4096 : static_cast<std::size_t>(1 + 13 * number % 90)),
        name(std::move(prefix) + std::to_string(number)) {}

  /// Sums of floats depend on the order of the ranks: these are no round numbers.
  [[nodiscard]] static float value(int rank, int round, std::size_t i) {
    return 1.0F / static_cast<float>(3 + 17 * rank + 5 * round + static_cast<int>(i % 11));
  }
  [[nodiscard]] static std::int32_t integer(int rank, int round, std::size_t i) {
    return 1000 * rank + 7 * round + static_cast<std::int32_t>(i % 13);
  }

  Submission fill(int rank, int round) {
    if (dtype == DataType::Int32) {
      integers.resize(count);
      for (std::size_t i = 0; i < count; ++i) integers[i] = integer(rank, round, i);
      return allreduce_of(integers, name, dtype, op);
    }
    floats.resize(count);
    for (std::size_t i = 0; i < count; ++i) floats[i] = value(rank, round, i);
    return allreduce_of(floats, name, dtype, op);
  }
  /// `negotiated`: by the long way, whatever the other ranks do.
  void submit(Engine& engine, int rank, int round, bool negotiated = false) {
    Submission submission = fill(rank, round);
    submission.internal = negotiated;
    pending = engine.submit(std::move(submission));
  }

  template <class T, class Value>
  [[nodiscard]] bool are_right(const std::vector<T>& got, int size, int round,
                               Value value_of) const {
    for (std::size_t i = 0; i < count; ++i) {
      T wanted = value_of(0, round, i);
      for (int rank = 1; rank < size; ++rank) {
        const T next = value_of(rank, round, i);
        wanted = op == ReduceOp::Max ? std::max(wanted, next) : wanted + next;
      }
      if (got[i] != wanted) return false;
    }
    return true;
  }
  [[nodiscard]] bool is_right(int size, int round) const {
    return dtype == DataType::Int32 ? are_right(integers, size, round, integer)
                                    : are_right(floats, size, round, value);
  }
};

std::vector<Part> burst_of(int count, const std::string& prefix = "part.") {
  std::vector<Part> parts;
  for (int i = 0; i < count; ++i) parts.emplace_back(i, prefix);
  return parts;
}

std::vector<std::size_t> shuffled(std::size_t count, std::mt19937& random) {
  std::vector<std::size_t> order(count);
  for (std::size_t i = 0; i < count; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

/// How a rank gets its results.
enum class Manner : std::uint8_t { InOrder, LastFirst, AnyOrder, Polls };

void wait_for_all(Engine& engine, std::vector<Part>& parts, Manner manner, std::mt19937& random) {
  auto order = shuffled(parts.size(), random);
  if (manner != Manner::AnyOrder) std::sort(order.begin(), order.end());
  if (manner == Manner::LastFirst) std::reverse(order.begin(), order.end());
  for (const auto i : order) {
    while (manner == Manner::Polls && !engine.poll(*parts[i].pending)) std::this_thread::yield();
    engine.wait(*parts[i].pending);
  }
}

}  // namespace

TEST_CASE(
    "a burst: whatever the order on each rank and the manner of waiting, every result is right") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 3, .domains = domains, .config = {}});
    world.run([&](int rank, Engine& engine) {
      std::mt19937 random(static_cast<unsigned>(7 * rank + domains));
      auto parts = burst_of(60);
      std::size_t wrong = 0;
      for (int round = 0; round < 60; ++round) {
        for (const auto i : shuffled(parts.size(), random)) {
          parts[i].submit(engine, rank, round, random() % 30 == 0);
          if (random() % 40 == 0)
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        }
        const auto manner = static_cast<Manner>((rank + round) % 4);
        if (round % 6 == 0) {  // one that is waited for at once, with all others in flight
          Part one(3, "one.");
          const Submission submission = one.fill(rank, round);
          if (round % 12 == 0 || !engine.small_calls().try_run(call_of(submission)))
            engine.wait(*engine.submit(submission, After::Wait));
          wrong += one.is_right(3, round) ? 0 : 1;
        }
        wait_for_all(engine, parts, manner, random);
        for (const auto& part : parts) wrong += part.is_right(3, round) ? 0 : 1;
      }
      CHECK(wrong == 0);
    });
  }
}

TEST_CASE("a burst travels together: stats() says so on every rank") {
  constexpr int kParts = 100;
  constexpr int kRounds = 20;
  for (const int domains : {1, 2}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 4, .domains = domains, .config = {}});
    std::barrier all(4);
    world.run([&](int rank, Engine& engine) {
      auto parts = burst_of(kParts);
      const auto run = [&](int round) {
        for (auto& part : parts) part.submit(engine, rank, round);
        all.arrive_and_wait();
        for (auto& part : parts) engine.wait(*part.pending);
        all.arrive_and_wait();
      };
      for (int round = 0; round < 3; ++round) run(round);
      const Stats before = engine.stats();
      for (int round = 3; round < 3 + kRounds; ++round) run(round);
      const Stats after = engine.stats();
      CHECK(after.tensors_submitted - before.tensors_submitted == kParts * kRounds);
      CHECK(after.negotiation_rounds - before.negotiation_rounds == kParts * kRounds);
      CHECK(after.tensors_fused - before.tensors_fused > kParts * kRounds / 2);
      CHECK(after.batches_run - before.batches_run < kParts * kRounds / 2);
    });
  }
}

TEST_CASE("one that is small takes the short way, in place too, of whatever size it has") {
  constexpr int kRounds = 10;
  for (const int domains : {1, 2, 3}) {
    const Route way = domains == 1 ? Route::AtSlot : Route::Direct;
    // what a leader sends to all others together is limited: here the inputs of all ranks
    const auto most = domains == 1
                          ? limit(Limit::SlotBytes)
                          : limit(Limit::DirectBytes) / static_cast<std::size_t>(3 * (domains - 1));
    for (const std::size_t bytes : {std::size_t{8}, most / 2 / 4 * 4, most / 4 * 4, most + 64}) {
      CAPTURE(domains);
      CAPTURE(bytes);
      ThreadWorld world({.size = 3, .domains = domains, .config = {}});
      std::barrier all(3);
      world.run([&](int rank, Engine& engine) {
        const auto run = [&](int round) {
          std::vector<float> values(bytes / sizeof(float));
          for (std::size_t i = 0; i < values.size(); ++i) values[i] = Part::value(rank, round, i);
          Submission submission = allreduce_of(values, "padded", DataType::Float32, ReduceOp::Max);
          // on one host it is reduced where it is, if that is in shared memory
          submission.tensors.front().padded = domains > 1;
          engine.wait(*engine.submit(std::move(submission)));
          std::size_t wrong = 0;
          for (std::size_t i = 0; i < values.size(); ++i)
            wrong += values[i] == Part::value(0, round, i) ? 0 : 1;
          CHECK(wrong == 0);
          all.arrive_and_wait();
        };
        for (int round = 0; round < 3; ++round) run(round);
        const auto before = EngineProbe::taken(engine, {way});
        all.arrive_and_wait();
        for (int round = 0; round < kRounds; ++round) run(round);
        all.arrive_and_wait();
        // Where a rank is late, leaders negotiate some of them.
        CHECK((EngineProbe::taken(engine, {way}) > before) == (bytes <= most));
      });
    }
  }
}

TEST_CASE("a burst under names that are new travels together") {
  constexpr int kParts = 100;
  ThreadWorld world({.size = 4, .config = {}});
  std::barrier all(4);
  world.run([&](int rank, Engine& engine) {
    for (int round = 0; round < 4; ++round) {
      auto parts = burst_of(kParts, std::to_string(round) + ".");
      // One rank is last, and either waits or goes to compute.
      if (rank == round % 2) all.arrive_and_wait();
      for (auto& part : parts) part.submit(engine, rank, round);
      if (rank != round % 2) all.arrive_and_wait();
      if (round >= 2 && rank == round % 2) std::this_thread::sleep_for(20ms);
      for (auto& part : parts) engine.wait(*part.pending);
      for (auto& part : parts) CHECK(part.is_right(4, round));
      all.arrive_and_wait();
    }
    // Of 400. A busy machine cuts them into more batches; each alone, hardly any would be fused.
    CHECK(engine.stats().tensors_fused > kParts / 2);
  });
}

TEST_CASE("a burst without fusion: HVD_FUSION_THRESHOLD=0 keeps each alone") {
  Config config;
  config.fusion_threshold_bytes = 0;
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 3, .domains = domains, .config = config});
    world.run([&](int rank, Engine& engine) {
      auto parts = burst_of(40);
      for (int round = 0; round < 10; ++round) {
        for (auto& part : parts) part.submit(engine, rank, round);
        for (auto& part : parts) engine.wait(*part.pending);
        for (auto& part : parts) CHECK(part.is_right(3, round));
      }
      CHECK(engine.stats().batches_run == 400);
      for (auto& part : parts) part.count = 0;
      for (int round = 0; round < 10; ++round) {
        for (auto& part : parts) part.submit(engine, rank, round);
        for (auto& part : parts) engine.wait(*part.pending);
      }
      CHECK(engine.stats().tensors_fused == 0);
    });
  }
}

TEST_CASE("a burst whose last rank goes to compute: the others get their results without it") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 3, .domains = domains, .config = {}});
    std::barrier all(3);
    world.run([&](int rank, Engine& engine) {
      auto parts = burst_of(30);
      for (int round = 0; round < 20; ++round) {
        const int last = round % 3;
        // the others have submitted
        if (rank == last) all.arrive_and_wait();
        if (rank == last && round % 2 == 0) std::this_thread::sleep_for(2ms);  // and sleep
        const bool negotiated = round % 5 == 4;                                // by all of them
        for (auto& part : parts) part.submit(engine, rank, round, negotiated);
        if (rank != last) all.arrive_and_wait();
        // it neither waits nor polls before the others are done
        if (rank == last) all.arrive_and_wait();
        for (auto& part : parts) engine.wait(*part.pending);
        if (rank != last) all.arrive_and_wait();
        for (auto& part : parts) CHECK(part.is_right(3, round));
      }
    });
  }
}

TEST_CASE(
    "a burst whose last rank goes to compute, while another thread of it waits for something "
    "else") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 3, .domains = domains, .config = {}});
    std::barrier all(3);
    world.run([&](int rank, Engine& engine) {
      auto parts = burst_of(30);
      Part slow(2, "slow.");
      for (int round = 0; round < 12; ++round) {
        const int last = round % 3;
        std::thread waiting;
        if (rank == last) {
          slow.submit(engine, rank, round);
          waiting = std::thread([&] { engine.wait(*slow.pending); });  // has the turn
          if (round % 2 == 0) std::this_thread::sleep_for(2ms);        // and sleeps
          all.arrive_and_wait();                                       // the others have submitted
        }
        for (auto& part : parts) part.submit(engine, rank, round);
        if (rank != last) all.arrive_and_wait();
        // no thread of it calls before the others are done
        if (rank == last) all.arrive_and_wait();
        for (auto& part : parts) engine.wait(*part.pending);
        if (rank != last) {
          all.arrive_and_wait();
          slow.submit(engine, rank, round);
          engine.wait(*slow.pending);
        } else {
          waiting.join();
        }
        for (auto& part : parts) CHECK(part.is_right(3, round));
        CHECK(slow.is_right(3, round));
      }
    });
  }
}

TEST_CASE("a burst in which one rank takes the long way, and whose last rank goes to compute") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 3, .domains = domains, .config = {}});
    std::barrier all(3);
    world.run([&](int rank, Engine& engine) {
      auto parts = burst_of(30);
      for (int round = 0; round < 24; ++round) {
        const int last = round % 3;
        const int negotiates = (last + 1) % 3;
        // the others have submitted, and wait for the end of this one's
        if (rank == last) all.arrive_and_wait();
        for (auto& part : parts)
          part.submit(engine, rank, round, rank == negotiates && round > 2 && round % 2 == 0);
        if (rank != last) all.arrive_and_wait();
        all.arrive_and_wait();  // all have submitted
        // it neither waits nor polls before the others are done
        if (rank == last) all.arrive_and_wait();
        for (auto& part : parts) engine.wait(*part.pending);
        if (rank != last) all.arrive_and_wait();
        for (auto& part : parts) CHECK(part.is_right(3, round));
      }
    });
  }
}

TEST_CASE("a burst that nobody waits for lets go of its memory, and its names can be used again") {
  for (const int domains : {1, 2}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 2, .domains = domains, .config = {}});
    world.run([&](int rank, Engine& engine) {
      for (int round = 0; round < 8; ++round) {
        std::vector<std::weak_ptr<void>> owners;
        for (int i = 0; i < 20; ++i) {
          const auto part = std::make_shared<Part>(i);
          Submission submission = part->fill(rank, round);
          submission.keep_alive = part;
          static_cast<void>(engine.submit(std::move(submission)));
          owners.push_back(part);
        }
        for (const auto& owner : owners)
          while (!owner.expired()) std::this_thread::sleep_for(100us);
      }
    });
  }
}

TEST_CASE("handles of a burst stay done while its names are in flight again") {
  ThreadWorld world({.size = 2, .config = {}});
  std::barrier all(2);
  world.run([&](int rank, Engine& engine) {
    auto parts = burst_of(10);
    std::vector<std::shared_ptr<HandleState>> before;
    for (int round = 0; round < 6; ++round) {
      if (rank == 0) all.arrive_and_wait();
      for (auto& part : parts) part.submit(engine, rank, round);
      for (const auto& old : before) {
        CHECK(old->done);
        engine.wait(*old);
      }
      if (rank == 1) all.arrive_and_wait();
      before.clear();
      for (auto& part : parts) {
        engine.wait(*part.pending);
        before.push_back(part.pending);
      }
    }
  });
}

TEST_CASE("a burst that all have submitted is done at shutdown") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 3, .domains = domains, .config = {}});
    std::barrier all(3);
    world.run(
        [&](int rank, Engine& engine) {
          auto parts = burst_of(30);
          for (int round = 0; round < 4; ++round) {
            for (auto& part : parts) part.submit(engine, rank, round);
            if (round < 3)
              for (auto& part : parts) engine.wait(*part.pending);
          }
          all.arrive_and_wait();
          CHECK(engine.shutdown());
          for (auto& part : parts) {
            engine.wait(*part.pending);
            CHECK(part.is_right(3, 3));
          }
        },
        false);
  }
}

TEST_CASE("several threads of each rank submit bursts of their own") {
  for (const int domains : {1, 2}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 2, .domains = domains, .config = {}});
    world.run([&](int rank, Engine& engine) {
      std::atomic<int> wrong{0};
      std::vector<std::thread> threads;
      for (int thread = 0; thread < 3; ++thread)
        threads.emplace_back([&, thread] {
          auto parts = burst_of(25, std::to_string(thread) + ".");
          for (int round = 0; round < 40; ++round) {
            for (auto& part : parts) part.submit(engine, rank, round);
            for (auto& part : parts) engine.wait(*part.pending);
            for (auto& part : parts) wrong += part.is_right(2, round) ? 0 : 1;
          }
        });
      for (auto& thread : threads) thread.join();
      CHECK(wrong == 0);
    });
  }
}

TEST_CASE("a rank that dies in the middle of a burst is named to all that wait") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    // outlives the engine of the rank that dies
    std::vector<std::vector<Part>> memory(3, burst_of(40));
    ThreadWorld world(
        {.size = 3, .domains = domains, .config = {.host_timeout = std::chrono::seconds(10)}});
    world.run(
        [&](int rank, Engine& engine) {
          auto& parts = memory[static_cast<std::size_t>(rank)];
          std::string text;
          // the whole of it: a rank may die of what it has done while others still wait for the
          // round before
          try {
            for (int round = 0; round < 4; ++round) {
              for (auto& part : parts) part.submit(engine, rank, round);
              for (auto& part : parts) engine.wait(*part.pending);
            }
            for (std::size_t i = 0; i < parts.size(); ++i) {
              if (rank == 1 && i == parts.size() / 2) {
                EngineProbe::die(engine);
                return;
              }
              parts[i].submit(engine, rank, 4);
            }
            for (auto& part : parts) engine.wait(*part.pending);
          } catch (const RankFailed& error) {
            text = error.what();
          }
          CHECK(text.find("rank 1") != std::string::npos);
          engine.shutdown();
        },
        false);
  }
}

}  // namespace hvd::test
