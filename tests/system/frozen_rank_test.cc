/// Ranks that die or are stopped where the others of their domain need them to go on, with all that
/// an engine holds at that moment: whoever needs them names them, and nobody waits for ever.

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "hvd/engine/engine.h"
#include "hvd/fast_path_memory.h"
#include "tests/support/engine_probe.h"
#include "tests/support/stderr_text.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

Config impatient() {
  Config config;
  config.stall_shutdown_time = 2s;  // more than it takes two ranks to come to the same submission
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

// ----------------------------------------------------------------- in the middle of ending a round

/// A world of one domain in which the engines of all ranks have a repeated operation "x". The
/// last rank is then played by the test: its board does what its engine would do, up to where it is
/// stopped.
struct RoundWorld {
  explicit RoundWorld(int size)
      : boards(static_cast<std::size_t>(size)),
        world({.size = size,
               .config = impatient(),
               .customize = [this](int rank, EngineParts& parts) {
                 boards[static_cast<std::size_t>(rank)] = parts.board.get();
               }}) {}
  void warm_up(int rank, Engine& engine) {
    std::vector<float> values(4, static_cast<float>(rank));
    for (int i = 0; i < 4; ++i) {
      const Submission submission = allreduce_of(values, "x", DataType::Float32);
      if (!engine.small_calls().try_run(call_of(submission)))
        engine.wait(*engine.submit(submission, After::Wait));
    }
  }
  /// What a rank has started, for the last one.
  void tell(const RepeatedOp& op) {
    unit = op.unit;
    started = true;
  }
  /// The last rank arrives at what all others have started, and claims the end of the round.
  /// Returns its board.
  Board& claim(bool dies) {
    const auto last = world.size() - 1;
    Board& board = *boards[static_cast<std::size_t>(last)];
    while (!started) std::this_thread::yield();
    while (!board.rounds().arrive_last(unit.id, unit.generation,
                                       static_cast<std::uint32_t>(world.size())))
      std::this_thread::yield();
    if (dies) EngineProbe::die(world.engine(last));
    return board;
  }

  UnitRef unit;
  std::atomic<bool> started{false};
  std::vector<Board*> boards;
  ThreadWorld world;
};

// ----------------------------------------------------------------------------- with the log unread

/// Runs allreduces of bytes, whose results are whatever was there, and stops the engine of a rank
/// where it asks for memory to repeat one: with its mutex held.
class FreezingBackend final : public Backend, private SlotMemory {
 public:
  struct Frost {
    std::atomic<bool> frozen{false};
    std::atomic<bool> thawed{false};
  };
  FreezingBackend(Frost& frost, bool freezes) : frost_(frost), freezes_(freezes) {}
  std::string_view name() const override { return "freezing"; }
  bool supports(const BatchTraits& traits) const override {
    return traits.dtype == DataType::UInt8;
  }
  std::unique_ptr<Execution> launch(Batch /*batch*/) override {
    struct Done final : Execution {
      Progress advance() override { return Progress::Done; }
    };
    return std::make_unique<Done>();
  }
  SlotMemory* slot_memory() override { return this; }

 private:
  std::optional<std::uint64_t> keep(const BatchTraits& /*traits*/, std::size_t /*bytes*/) override {
    if (freezes_) frost_.frozen = true;
    while (freezes_ && !frost_.thawed) std::this_thread::sleep_for(1ms);
    return std::nullopt;
  }
  void drop(std::uint64_t /*location*/) noexcept override {}
  bool is_free(std::uint64_t /*location*/) override { return true; }
  std::byte* kept(int /*index*/, std::uint64_t /*location*/) override { return nullptr; }
  // No block is kept, and small operations of this kind are never pulled.
  void run_for_all(const BatchTraits& /*traits*/, std::int64_t /*count*/,
                   std::span<std::byte* const> /*blocks*/,
                   std::span<const std::int64_t> /*parts*/) override {}
  std::optional<std::uint64_t> lend(std::size_t /*bytes*/) override { return std::nullopt; }
  bool is_lent(std::uint64_t /*location*/) override { return false; }
  void take_back(std::uint64_t /*location*/, std::uint32_t /*readers*/) noexcept override {}
  void trim() noexcept override {}
  void pull(const BatchTraits& /*traits*/, std::int64_t /*count*/,
            std::span<const std::byte* const> /*blocks*/, std::span<const std::int64_t> /*parts*/,
            void* /*output*/) override {}
  void finish_reading(std::span<const std::byte* const> /*blocks*/) noexcept override {}

  Frost& frost_;
  const bool freezes_;
};

/// A world of one domain, of four ranks, in which the engine of rank 1 is stopped. Ranks 0 and 3
/// have a process set of their own, number 2.
struct FrozenWorld {
  Config config = impatient();
  const Board* board = nullptr;  // of rank 0
  /// `work` is that of ranks 0 and 3, and rank 1 goes on after it.
  void run(const std::function<void(int, Engine&)>& work) {
    FreezingBackend::Frost frost;
    config.process_sets = {{1, 2}, {0, 3}};
    ThreadWorld world({.size = 4, .config = config, .customize = [&](int rank, EngineParts& parts) {
                         if (rank == 0) board = parts.board.get();
                         parts.backends.insert(parts.backends.begin(),
                                               std::make_unique<FreezingBackend>(frost, rank == 1));
                       }});
    std::atomic<int> at_work{2};
    world.run(
        [&](int rank, Engine& engine) {
          if (rank == 1 || rank == 2) {
            std::vector<std::uint8_t> values(4);
            for (int i = 0; i < 2; ++i) {
              Submission submission = allreduce_of(values, "freezes", DataType::UInt8);
              submission.process_set = 1;
              engine.wait(*engine.submit(submission, After::Wait));
            }
            return;
          }
          while (!frost.frozen) std::this_thread::yield();
          work(rank, engine);
          if (--at_work == 0) frost.thawed = true;
        },
        false);
  }
};

Submission of_own_set(std::vector<float>& values, std::string name) {
  Submission submission = allreduce_of(values, std::move(name), DataType::Float32);
  submission.process_set = 2;
  return submission;
}

}  // namespace

TEST_CASE(
    "frozen: a rank that dies or is stopped between giving results and the end of a round is named "
    "by who comes back") {
  for (const bool dies : {true, false}) {
    CAPTURE(dies);
    RoundWorld all(2);
    std::string text;
    all.world.run(
        [&](int rank, Engine& engine) {
          all.warm_up(rank, engine);
          const int both[] = {0, 1};
          // and does not end it
          if (rank == 1) return all.claim(dies).rounds().give_results(all.unit.id, both);
          std::vector<float> values(4);
          const Submission submission = allreduce_of(values, "x", DataType::Float32);
          const auto op = engine.small_calls().start(call_of(submission), After::Wait);
          REQUIRE(op);
          all.tell(*op);
          text = words_of_failure([&] {
            engine.small_calls().finish(*op, call_of(submission));
            engine.wait(*engine.submit(submission, After::Wait));
          });
        },
        false);
    CAPTURE(text);
    CHECK(text.starts_with(dies ? "rank 1 died"
                                : "rank 1 has kept the others of its host from going on for "));
  }
}

TEST_CASE("frozen: who came last and says nothing of it is not looked for on other hosts") {
  RoundWorld all(2);
  std::string text;
  all.world.run(
      [&](int rank, Engine& engine) {
        std::vector<float> values(8192);  // too many to be repeated by the fast path
        const Submission submission = allreduce_of(values, "large", DataType::Float32);
        for (int i = 0; i < 2; ++i) engine.wait(*engine.submit(submission, After::Wait));
        const UnitRef unit =
            engine.negotiator().find(UnitKey{0, OpKind::Allreduce, "large"})->ref();
        if (rank == 1) {
          while (!all.started) std::this_thread::yield();
          all.boards[1]->rounds().arrive(unit.id, unit.generation);  // and does not agree
          return;
        }
        const auto pending = engine.submit(submission, After::Wait);
        all.started = true;
        text = words_of_failure([&] { engine.wait(*pending); });
      },
      false);
  CAPTURE(text);
  CHECK(text.find("all its ranks have submitted it, but none says so") != std::string::npos);
}

TEST_CASE("frozen: a round that who came last does not end is ended by who waits for it") {
  RoundWorld all(2);
  all.world.run(
      [&](int rank, Engine& engine) {
        all.warm_up(rank, engine);
        if (rank == 1) {
          while (!all.started) std::this_thread::yield();
          all.boards[1]->rounds().arrive(all.unit.id, all.unit.generation);
          return;
        }
        std::vector<float> values(4);
        const Submission submission = allreduce_of(values, "x", DataType::Float32);
        const SmallCall call = call_of(submission);
        const auto op = engine.small_calls().start(call, After::Wait);
        REQUIRE(op);
        all.tell(*op);
        engine.small_calls().finish(*op, call);
        CHECK(op->pending->status.ok());
      },
      false);
}

TEST_CASE(
    "frozen: a rank that dies or is stopped while it ends a round is named by one that joins") {
  for (const bool dies : {true, false}) {
    CAPTURE(dies);
    RoundWorld all(3);
    std::string text;
    std::atomic<bool> claimed{false};
    all.world.run(
        [&](int rank, Engine& engine) {
          all.warm_up(rank, engine);
          std::vector<float> values(4);
          const Submission submission = allreduce_of(values, "x", DataType::Float32);
          const SmallCall call = call_of(submission);
          if (rank == 2) {
            all.claim(dies);
            claimed = true;
            return;
          }
          const auto op = engine.small_calls().start(call, After::Wait);
          REQUIRE(op);
          if (rank == 0) all.tell(*op);
          while (!claimed) std::this_thread::yield();
          if (rank == 1) {
            Submission join;
            join.kind = OpKind::Join;
            text = words_of_failure([&] { engine.wait(*engine.submit(join, After::Wait)); });
          }
          static_cast<void>(words_of_failure([&] { engine.small_calls().finish(*op, call); }));
        },
        false);
    CAPTURE(text);
    CHECK(text.find("rank 2") != std::string::npos);
    CHECK(text.find(dies ? "died" : "it is stopped") != std::string::npos);
  }
}

TEST_CASE(
    "frozen: a rank that leaves the log unread until it is full is named, by ranks of a set that "
    "it is not in, too") {
  FrozenWorld().run([](int /*rank*/, Engine& engine) {
    std::vector<float> values(4);
    int i = 0;
    const std::string text = words_of_failure([&] {
      engine.wait(*engine.submit(
          of_own_set(values, std::string(16 << 10, 'n') + std::to_string(i++)), After::Wait));
    });
    CAPTURE(text);
    CHECK(text.starts_with("rank 1 has kept the others of its host from going on for "));
    CHECK(text.find("without having read") != std::string::npos);
  });
}

TEST_CASE(
    "frozen: a rank that has left half of the log unread is warned of while all others go on") {
  FrozenWorld all;
  all.config.stall_shutdown_time = 0s;
  const StderrText said;
  all.run([&](int rank, Engine& engine) {
    std::vector<float> values(4);
    // Each name is in the log twice.
    for (int i = 0; i < 100; ++i)
      engine.wait(*engine.submit(of_own_set(values, std::string(16 << 10, 'n') + std::to_string(i)),
                                 After::Wait));
    for (int i = 0; rank == 0 && said.get().find("rank 1 has not read") == std::string::npos; ++i) {
      std::this_thread::sleep_for(100ms);
      Submission alone = of_own_set(values, "alone." + std::to_string(i));
      static_cast<void>(engine.submit(std::move(alone)));  // a record
    }
  });
}

TEST_CASE(
    "frozen: a rank that has not read what must be read before a submission is refused is named") {
  FrozenWorld all;
  std::atomic<int> done{0};
  std::atomic<std::uint64_t> said{0};
  all.run([&](int rank, Engine& engine) {
    std::vector<float> values(4);
    engine.wait(*engine.submit(of_own_set(values, "y"), After::Wait));
    ++done;
    while (done < 2) std::this_thread::yield();
    if (rank == 3) {
      said = all.board->log().tail();
      engine.shutdown();
      return;
    }
    while (said == 0 || all.board->log().tail() == said) std::this_thread::yield();  // it has left
    const std::string text = words_of_failure(
        [&] { engine.wait(*engine.submit(of_own_set(values, "y"), After::Wait)); });
    CAPTURE(text);
    CHECK(text.starts_with("rank 1 has kept the others of its host from going on for "));
  });
}

}  // namespace hvd::test
