// A failure reaches the ranks of all domains, whoever dies; what is under way and does not end is
// reported.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "hvd/backend.h"
#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "tests/support/endless_backend.h"
#include "tests/support/engine_probe.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

/// Runs `names` one after the other until the world fails; returns the text.
template <class Failure>
std::string text_of_failure(Engine& engine, int rank, std::initializer_list<const char*> names) {
  try {
    for (const char* operation : names) {
      auto values = std::vector<float>(10, static_cast<float>(rank));
      engine.wait(*engine.submit(allreduce_of(values, operation, DataType::Float32), After::Wait));
    }
  } catch (const Failure& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// Loses what comes and goes while `cut` says so.
class CutLine final : public Transport {
 public:
  CutLine(std::unique_ptr<Transport> wire, const std::atomic<bool>& cut)
      : wire_(std::move(wire)), cut_(cut) {}
  [[nodiscard]] int domain() const override { return wire_->domain(); }
  [[nodiscard]] int domains() const override { return wire_->domains(); }
  void send(int to, SharedBytes message) override {
    if (!cut_.load()) wire_->send(to, std::move(message));
  }
  std::optional<Message> receive() override {
    auto message = wire_->receive();
    return cut_.load() ? std::nullopt : message;
  }

 private:
  std::unique_ptr<Transport> wire_;
  const std::atomic<bool>& cut_;
};

/// Lets nothing come while `held` says so, and all of it afterwards.
class HeldLine final : public Transport {
 public:
  HeldLine(std::unique_ptr<Transport> wire, const std::atomic<bool>& held)
      : wire_(std::move(wire)), held_(held) {}
  [[nodiscard]] int domain() const override { return wire_->domain(); }
  [[nodiscard]] int domains() const override { return wire_->domains(); }
  void send(int to, SharedBytes message) override { wire_->send(to, std::move(message)); }
  std::optional<Message> receive() override {
    return held_.load() ? std::nullopt : wire_->receive();
  }

 private:
  std::unique_ptr<Transport> wire_;
  const std::atomic<bool>& held_;
};

/// Keeps who asks for what has come, and with it all that drives the rank, while `stopped` says so.
class StoppedLine final : public Transport {
 public:
  StoppedLine(std::unique_ptr<Transport> wire, const std::atomic<bool>& stopped)
      : wire_(std::move(wire)), stopped_(stopped) {}
  [[nodiscard]] int domain() const override { return wire_->domain(); }
  [[nodiscard]] int domains() const override { return wire_->domains(); }
  void send(int to, SharedBytes message) override { wire_->send(to, std::move(message)); }
  std::optional<Message> receive() override {
    while (stopped_.load()) std::this_thread::sleep_for(1ms);
    return wire_->receive();
  }

 private:
  std::unique_ptr<Transport> wire_;
  const std::atomic<bool>& stopped_;
};

/// A world of two hosts whose limits are as long as a beat, and in which nothing comes for longer
/// than that while its ranks compute. Returns whether it ends in order, or nothing where it took so
/// long that the other host may well have been silent.
std::optional<bool> quiet_world_ends_in_order() {
  std::atomic<bool> held{false};
  WorldOptions options{
      .size = 2,
      .domains = 2,
      .config = {.stall_check_time = 1s, .stall_shutdown_time = 1s, .log_level = LogLevel::Off}};
  options.customize = [&](int rank, EngineParts& parts) {
    if (rank == 1) parts.transport = std::make_unique<HeldLine>(std::move(parts.transport), held);
  };
  ThreadWorld world(std::move(options));
  const auto begin = std::chrono::steady_clock::now();
  std::atomic<int> in_order{0};
  world.run(
      [&](int rank, Engine& engine) {
        if (rank == 1) {
          held = true;
          std::this_thread::sleep_for(1600ms);
          held = false;
        }
        in_order += engine.shutdown() ? 1 : 0;
      },
      false);
  if (std::chrono::steady_clock::now() - begin > 2500ms) return std::nullopt;
  return in_order == 2;
}

}  // namespace

TEST_CASE("whichever rank dies is named on the ranks of all domains") {
  for (const auto& [size, domains] : {std::pair{4, 1}, {4, 2}, {6, 3}, {9, 3}}) {
    for (int victim = 0; victim < size; ++victim) {
      CAPTURE(size);
      CAPTURE(domains);
      CAPTURE(victim);
      ThreadWorld world({.size = size, .domains = domains, .config = {}});
      const std::string name = "rank " + std::to_string(victim) + " ";
      std::atomic<int> named{0};
      world.run(
          [&](int rank, Engine& engine) {
            if (rank == victim) {
              auto values = std::vector<float>(10, 1.0F);
              engine.wait(
                  *engine.submit(allreduce_of(values, "before", DataType::Float32), After::Wait));
              return EngineProbe::die(engine);
            }
            // The victim may die when it has its result of "before" and others do not have theirs
            // yet.
            named += text_of_failure<RankFailed>(engine, rank, {"before", "after"}).find(name) !=
                             std::string::npos
                         ? 1
                         : 0;
            engine.shutdown();
          },
          false);
      CHECK(named == size - 1);
    }
  }
}

TEST_CASE(
    "whichever rank ends the world, all ranks of all domains have its words, whatever they wait "
    "for, and can end") {
  for (const auto& [size, domains] : {std::pair{2, 1}, {4, 2}, {3, 3}, {7, 3}}) {
    for (int who = 0; who < size; ++who) {
      CAPTURE(size);
      CAPTURE(domains);
      CAPTURE(who);
      ThreadWorld world({.size = size, .domains = domains, .config = {.log_level = LogLevel::Off}});
      std::atomic<int> pending{0}, told{0}, told_later{0};
      const std::string words = "rank " + std::to_string(who) + " ends it";
      const int others = size - 1;
      world.run([&](int rank, Engine& engine) {
        for (int round = 0; round < 3; ++round)
          CHECK(text_of_failure<RankFailed>(engine, rank, {"before"}) == "nothing was thrown");
        if (rank == who) {
          while (pending < others) std::this_thread::sleep_for(1ms);
          auto values = std::vector<float>(10, 1.0F);
          const auto handle = engine.submit(allreduce_of(values, "own", DataType::Float32));
          std::thread([&] { engine.abort({Status::Code::RankFailed, words}); }).join();
          engine.abort({Status::Code::RankFailed, "too late"});
          CHECK_THROWS_AS(engine.wait(*handle), RankFailed);
        } else {
          // Some are inside wait(), some have something pending and compute, some have nothing.
          auto values = std::vector<float>(10, 1.0F);
          std::shared_ptr<HandleState> handle;
          if (rank % 3 == 1)
            handle = engine.submit(allreduce_of(values, "before", DataType::Float32));
          ++pending;
          if (rank % 3 != 2)
            told += text_of_failure<RankFailed>(engine, rank, {"other"}) == words ? 1 : 0;
          if (rank % 3 == 2) ++told;
          if (handle) CHECK_THROWS_WITH_AS(engine.wait(*handle), words.c_str(), RankFailed);
        }
        std::string later = "nothing was thrown";
        while (later == "nothing was thrown")
          later = text_of_failure<RankFailed>(engine, rank, {"later"});
        told_later += later == words ? 1 : 0;
        CHECK(!engine.shutdown());
        engine.abort({Status::Code::RankFailed, "after its end"});
      });
      CHECK(told == others);
      CHECK(told_later == size);
    }
  }
}

namespace {

/// Is under way until the other rank has told why it ends the world, then lets that come and is
/// lost.
class LostBackend final : public Backend {
 public:
  LostBackend(std::atomic<bool>& held, std::atomic<int>& launched, const std::atomic<bool>& told)
      : held_(held), launched_(launched), told_(told) {}
  [[nodiscard]] std::string_view name() const override { return "lost"; }
  [[nodiscard]] bool supports(const BatchTraits& traits) const override {
    return traits.dtype == DataType::Int64;
  }
  std::unique_ptr<Execution> launch(Batch /*batch*/) override {
    struct Lost final : Execution {
      explicit Lost(LostBackend& backend) : backend_(backend) {}
      Progress advance() override {
        if (!backend_.told_) return Progress::Idle;
        backend_.held_ = false;
        throw RankFailed("a connection is lost");
      }
      LostBackend& backend_;
    };
    ++launched_;
    return std::make_unique<Lost>(*this);
  }

 private:
  std::atomic<bool>& held_;
  std::atomic<int>& launched_;
  const std::atomic<bool>& told_;
};

}  // namespace

TEST_CASE(
    "who loses a connection has the words of the rank that ends the world, if they are there") {
  for (const int who : {0, 1}) {
    CAPTURE(who);
    std::atomic<bool> held{false}, told{false};
    std::atomic<int> launched{0};
    WorldOptions options{.size = 2, .domains = 2, .config = {.log_level = LogLevel::Off}};
    options.customize = [&](int rank, EngineParts& parts) {
      if (rank != who)
        parts.transport = std::make_unique<HeldLine>(std::move(parts.transport), held);
      parts.backends.insert(parts.backends.begin(),
                            std::make_unique<LostBackend>(held, launched, told));
    };
    ThreadWorld world(std::move(options));
    std::atomic<int> heard{0};
    world.run([&](int rank, Engine& engine) {
      std::vector<std::int64_t> values(3);
      const auto handle = engine.submit(allreduce_of(values, "lost", DataType::Int64), After::Wait);
      std::thread ender([&] {
        if (rank != who) return;
        while (launched < 2) std::this_thread::sleep_for(1ms);
        held = true;
        engine.abort({Status::Code::RankFailed, "the reason"});
      });
      CHECK_THROWS_WITH_AS(engine.wait(*handle), "the reason", RankFailed);
      ++heard;
      if (rank == who) told = true;  // it was said before its own operations ended
      ender.join();
    });
    CHECK(heard == 2);
  }
}

TEST_CASE("the world may be ended while another thread of the rank keeps the engine's mutex") {
  for (const int domains : {1, 2}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 2, .domains = domains, .config = {.log_level = LogLevel::Off}});
    std::atomic<int> told{0};
    world.run([&](int rank, Engine& engine) {
      if (rank == 1)
        EngineProbe::hold_mutex(engine, [&] {
          std::thread([&] { engine.abort({Status::Code::RankFailed, "rank 1 ends it"}); }).join();
        });
      told += text_of_failure<RankFailed>(engine, rank, {"pending"}) == "rank 1 ends it" ? 1 : 0;
    });
    CHECK(told == 2);
  }
}

TEST_CASE("the world may be ended while all but one wait for its end, and not once it has ended") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 3, .domains = domains, .config = {.log_level = LogLevel::Off}});
    std::atomic<int> leaving{0}, in_order{0};
    world.run(
        [&](int rank, Engine& engine) {
          if (rank > 0) ++leaving;
          while (leaving < 2) std::this_thread::sleep_for(1ms);
          if (rank == 0) engine.abort({Status::Code::RankFailed, "rank 0 ends it"});
          in_order += engine.shutdown() ? 1 : 0;
        },
        false);
    CHECK(in_order == 0);
    ThreadWorld other({.size = 3, .domains = domains, .config = {}});
    other.run(
        [&](int rank, Engine& engine) {
          in_order += engine.shutdown() ? 1 : 0;
          if (rank == 1) engine.abort({Status::Code::RankFailed, "too late"});
        },
        false);
    CHECK(in_order == 3);
  }
}

TEST_CASE("a batch that is under way and does not end is a stall like one that never begins") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    Config config;
    config.stall_check_time = 1s;
    config.stall_shutdown_time = 2s;
    WorldOptions options{.size = 3, .domains = domains, .config = config};
    options.customize = [](int, EngineParts& parts) {
      parts.backends.insert(parts.backends.begin(), std::make_unique<EndlessBackend>());
    };
    ThreadWorld world(std::move(options));
    std::atomic<int> told{0};
    world.run([&](int, Engine& engine) {
      std::vector<std::int64_t> values(3);
      try {
        engine.wait(*engine.submit(allreduce_of(values, "endless", DataType::Int64), After::Wait));
      } catch (const StallTimeout& error) {
        told += std::string(error.what()).find("'endless'") != std::string::npos ? 1 : 0;
      }
    });
    CHECK(told == 3);
  }
}

namespace {

/// The second of three hosts is cut off, and the others go on among themselves. Returns how many
/// get a Failure that says `who`.
template <class Failure>
int told_of_silence(Config config, const std::string& who) {
  std::atomic<bool> cut{false};
  config.process_sets = {{0, 2}};
  config.log_level = LogLevel::Off;
  WorldOptions options{.size = 3, .domains = 3, .config = config};
  options.customize = [&](int rank, EngineParts& parts) {
    if (rank == 1) parts.transport = std::make_unique<CutLine>(std::move(parts.transport), cut);
  };
  ThreadWorld world(std::move(options));
  std::atomic<int> told{0};
  world.run([&](int rank, Engine& engine) {
    auto values = std::vector<float>(10, 1.0F);
    engine.wait(*engine.submit(allreduce_of(values, "before", DataType::Float32), After::Wait));
    if (rank == 1) {
      cut = true;
      return;
    }
    try {
      while (true) {
        Submission submission = allreduce_of(values, "without", DataType::Float32, ReduceOp::Max);
        submission.process_set = 1;
        engine.wait(*engine.submit(std::move(submission), After::Wait));
        std::this_thread::sleep_for(1ms);
      }
    } catch (const Failure& error) {
      told += std::string(error.what()).find(who) != std::string::npos ? 1 : 0;
    }
  });
  return told;
}

}  // namespace

TEST_CASE("a host that is silent is a stall on the others, also while they do without it") {
  CHECK(told_of_silence<StallTimeout>({.stall_check_time = 1s, .stall_shutdown_time = 3s},
                                      "rank 1 ") == 2);
}

TEST_CASE(
    "a host that is silent for longer than hosts may be ends the world, whatever is said of "
    "stalls") {
  const std::string who =
      "nothing has come from rank 1 for 3 s: their host may be frozen, without power or cut off "
      "(HVD_HOST_TIMEOUT_SECONDS=1)";
  CHECK(told_of_silence<RankFailed>({.stall_check_disable = true, .host_timeout = 1s}, who) == 2);
}

TEST_CASE(
    "a leader that is stopped is lost to its own host as its host is to the others, whether a rank "
    "waits for it or not") {
  for (const int leader : {0, 2}) {
    CAPTURE(leader);
    std::atomic<bool> stopped{false};
    std::atomic<int> told{0};
    WorldOptions options{
        .size = 4,
        .domains = 2,
        .config = {.stall_check_disable = true, .host_timeout = 1s, .log_level = LogLevel::Off}};
    options.customize = [&](int rank, EngineParts& parts) {
      if (rank == leader)
        parts.transport = std::make_unique<StoppedLine>(std::move(parts.transport), stopped);
    };
    ThreadWorld world(std::move(options));
    world.run([&](int rank, Engine& engine) {
      CHECK(text_of_failure<RankFailed>(engine, rank, {"before"}) == "nothing was thrown");
      if (rank == leader) {
        stopped = true;
        while (told < 3) std::this_thread::sleep_for(1ms);
        stopped = false;
        return;
      }
      const bool is_idle = leader == 2;
      while (is_idle && !engine.has_failed()) std::this_thread::sleep_for(1ms);
      const std::string text = text_of_failure<RankFailed>(engine, rank, {"after"});
      ++told;
      CAPTURE(text);
      const auto expected =
          rank / 2 == leader / 2
              ? formatted("nothing has come from rank {}, which speaks for its host, for ", leader)
              : formatted("nothing has come from ranks {}-{} for ", leader, leader + 1);
      CHECK(text.starts_with(expected));
      CHECK(text.ends_with("(HVD_HOST_TIMEOUT_SECONDS=1)"));
    });
  }
}

TEST_CASE("a leader that has ended in order is not lost to a rank of its host that lasts longer") {
  ThreadWorld world({.size = 4, .domains = 2, .config = {.host_timeout = 1s}});
  std::atomic<int> in_order{0};
  world.run(
      [&](int rank, Engine& engine) {
        if (rank == 1) {
          engine.leave(0ms);
          std::this_thread::sleep_for(3500ms);
        }
        in_order += engine.shutdown() ? 1 : 0;
      },
      false);
  CHECK(in_order == 4);
}

TEST_CASE("a host is not silent before some of its beats are missing, whatever the limits") {
  std::optional<bool> in_order;
  for (int attempt = 0; attempt < 10 && !in_order; ++attempt)
    in_order = quiet_world_ends_in_order();
  CHECK(in_order.value_or(true));
}

}  // namespace hvd::test
