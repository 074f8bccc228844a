/// Ranks that die or are stopped where the others of their domain need them to go on, with all that an engine holds at that moment: whoever
/// needs them names them, and nobody waits for ever.

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "hvd/engine/engine.h"
#include "tests/support/small_call.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

Config impatient() {
  Config config;
  config.stall_shutdown_time = 1s;
  config.log_level = LogLevel::Off;
  return config;
}

/// Returns what ended the world, once `work` has met it.
template <class Work>
std::string words_of_failure(const Work& work) {
  try {
    while (true) work();
  } catch (const Error& error) {
    return error.what();
  }
}

// ------------------------------------------------------------------------------------------------ in the middle of ending a round

/// A world of one domain in which the engines of all ranks have a persistent operation "x". The last rank is then played by the test: its
/// board does what its engine would do, up to where it is stopped.
struct RoundWorld {
  explicit RoundWorld(int size)
      : boards(static_cast<std::size_t>(size)),
        world({.size = size, .config = impatient(), .customize = [this](int rank, EngineParts& parts) {
                 boards[static_cast<std::size_t>(rank)] = parts.board.get();
               }}) {}
  void warm_up(int rank, Engine& engine) {
    std::vector<float> values(4, static_cast<float>(rank));
    for (int i = 0; i < 4; ++i) {
      const Submission submission = allreduce_of(values, "x", DataType::Float32);
      if (!engine.try_fast_path(small_call_of(submission))) engine.wait(*engine.submit(submission, After::Wait));
    }
  }
  /// The last rank arrives at what all others have started, claims the end of the round and gives the results, but does not end it.
  void stay_in_round(const PersistentOp& op, bool dies) {
    const auto last = world.size() - 1;
    Board& board = *boards[static_cast<std::size_t>(last)];
    while (!board.arrive_last(op.unit.id, op.unit.generation, static_cast<std::uint32_t>(world.size()))) std::this_thread::yield();
    if (dies) world.engine(last).die_for_test();
    board.give_results(op.unit.id, op.indices);
  }

  std::vector<Board*> boards;
  ThreadWorld world;
};

}  // namespace

TEST_CASE("frozen: a rank that dies or is stopped between giving results and the end of a round is named by who comes back") {
  for (const bool dies : {true, false}) {
    CAPTURE(dies);
    RoundWorld all(2);
    std::string text;
    std::atomic<const PersistentOp*> started{nullptr};
    all.world.run(
        [&](int rank, Engine& engine) {
          all.warm_up(rank, engine);
          if (rank == 1) {
            while (started == nullptr) std::this_thread::yield();
            return all.stay_in_round(*started, dies);
          }
          std::vector<float> values(4);
          const Submission submission = allreduce_of(values, "x", DataType::Float32);
          const auto op = engine.start_fast_path(small_call_of(submission), After::Wait);
          REQUIRE(op);
          started = op.get();
          text = words_of_failure([&] {
            engine.finish_fast_path(*op, small_call_of(submission));
            engine.wait(*engine.submit(submission, After::Wait));
          });
        },
        false);
    CAPTURE(text);
    CHECK(text.starts_with(dies ? "rank 1 died" : "rank 1 has kept the others of its host from going on for 1 s"));
  }
}

TEST_CASE("frozen: a rank that dies or is stopped while it ends a round is named by one that joins") {
  for (const bool dies : {true, false}) {
    CAPTURE(dies);
    RoundWorld all(3);
    std::string text;
    std::atomic<const PersistentOp*> started{nullptr};
    std::atomic<bool> claimed{false};
    all.world.run(
        [&](int rank, Engine& engine) {
          all.warm_up(rank, engine);
          std::vector<float> values(4);
          const Submission submission = allreduce_of(values, "x", DataType::Float32);
          const SmallCall call = small_call_of(submission);
          if (rank == 2) {
            while (started == nullptr) std::this_thread::yield();
            Board& board = *all.boards[2];
            while (!board.arrive_last(started.load()->unit.id, started.load()->unit.generation, 3)) std::this_thread::yield();
            claimed = true;
            if (dies) engine.die_for_test();
            return;
          }
          const auto op = engine.start_fast_path(call, After::Wait);
          REQUIRE(op);
          if (rank == 0) started = op.get();
          while (!claimed) std::this_thread::yield();
          if (rank == 1) {
            Submission join;
            join.kind = OpKind::Join;
            text = words_of_failure([&] { engine.wait(*engine.submit(join, After::Wait)); });
          }
          static_cast<void>(words_of_failure([&] { engine.finish_fast_path(*op, call); }));
        },
        false);
    CAPTURE(text);
    CHECK(text.find("rank 2") != std::string::npos);
    CHECK(text.find(dies ? "died" : "it is stopped") != std::string::npos);
  }
}

}  // namespace hvd::test
