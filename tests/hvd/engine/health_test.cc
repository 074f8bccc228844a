/// Deadlines: an operation that has not ended by its own ends the world, on all ranks, with words
/// that say who has not come. Threads as ranks.

#include "hvd/engine/health/health.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/engine/engine.h"
#include "tests/support/deadlocks.h"
#include "tests/support/endless_backend.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

const std::vector<std::pair<int, int>> kLateWorlds{{2, 1}, {4, 1}, {4, 2}, {3, 3}, {7, 3}, {5, 4}};

/// What the `Expected` says that `call` throws.
template <class Expected, class Call>
std::string said_by(const Call& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  }
  return "nothing was thrown";
}

Submission late_one(std::vector<float>& values, const std::string& name,
                    std::chrono::nanoseconds deadline) {
  Submission submission = allreduce_of(values, name, DataType::Float32);
  submission.deadline = deadline;
  return submission;
}

/// What the StallTimeout says with which the world ends. The rank polls: one that waits could be in
/// a deadlock.
std::string words_of_end(Engine& engine) {
  std::vector<float> values(1);
  const auto pending = engine.submit(late_one(values, "until the end", 0ns));
  while (!engine.poll(*pending)) std::this_thread::sleep_for(1ms);
  return said_by<StallTimeout>([&] { engine.wait(*pending); });
}

/// Runs a world in which `absent` does not submit what the others do, of which `late` has a
/// deadline. Returns the words that all have.
std::string words_without(ThreadWorld& world, int absent, int late, bool waits) {
  std::mutex mutex;
  std::set<std::string> all;
  world.run([&](int rank, Engine& engine) {
    // Ends in time, and has a way of its own from the third round on.
    for (int round = 0; round < 5; ++round)
      CHECK(sum_of(engine, "step", 1) == static_cast<float>(world.size()));
    std::vector<float> values{1};
    std::string words;
    if (rank == absent) {
      words = words_of_end(engine);
    } else {
      const auto pending = engine.submit(late_one(values, "step", rank == late ? 200ms : 0ms),
                                         waits ? After::Wait : After::Return);
      while (!waits && !pending->done) std::this_thread::sleep_for(1ms);  // by nobody's help
      try {
        engine.wait(*pending);
      } catch (const StallTimeout& error) {
        words = error.what();
      }
    }
    const std::lock_guard lock(mutex);
    all.insert(words);
  });
  CHECK(all.size() == 1);
  return *all.begin();
}

}  // namespace

TEST_CASE(
    "deadlines: whoever does not come is named on all ranks, whoever has the deadline, waited for "
    "or not") {
  for (const auto& [size, domains] : kLateWorlds) {
    for (const int absent : {0, size / 2, size - 1}) {
      const int late = absent == size - 1 ? 0 : size - 1;
      for (const bool waits : {true, false}) {
        CAPTURE(size);
        CAPTURE(domains);
        CAPTURE(absent);
        CAPTURE(waits);
        ThreadWorld world(
            {.size = size, .domains = domains, .config = {.log_level = LogLevel::Off}});
        const auto words = words_without(world, absent, late, waits);
        CAPTURE(words);
        const std::string begin = "allreduce 'step' of rank " + std::to_string(late) +
                                  " has not ended by its deadline of 200 ms: ";
        CHECK(words.starts_with(begin));
        const std::string who = words.substr(std::min(words.size(), begin.size()));
        const std::string exactly = "rank " + std::to_string(absent) + " has not submitted it";
        // Of another host, or part of the tree, with several ranks it is known that some have not.
        if (domains == 1 || domains == size) CHECK(who == exactly);
        if (domains > 1) CHECK((who == exactly || who.starts_with("some of ranks ")));
      }
    }
  }
}

TEST_CASE("deadlines: several that do not come, on several hosts") {
  ThreadWorld world({.size = 6, .domains = 3, .config = {.log_level = LogLevel::Off}});
  std::atomic<int> told{0};
  world.run([&](int rank, Engine& engine) {
    std::vector<float> values{1};
    std::string words;
    if (rank == 1 || rank == 2 || rank == 3) {
      words = words_of_end(engine);
    } else {
      words =
          said_by<StallTimeout>([&] { engine.wait(*engine.submit(late_one(values, "x", 100ms))); });
    }
    told +=
        words.ends_with(": rank 1 has not submitted it; some of ranks 2-3 have not submitted it")
            ? 1
            : 0;
    if (!told) MESSAGE(words);
  });
  CHECK(told == 6);
}

TEST_CASE("deadlines: within one host's process set, and of ranks that have joined") {
  for (const int domains : {1, 2}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 4,
                       .domains = domains,
                       .config = {.log_level = LogLevel::Off, .process_sets = {{2, 3}}}});
    std::atomic<int> told{0};
    world.run([&](int rank, Engine& engine) {
      std::vector<float> values{1};
      if (rank != 2) {
        told += words_of_end(engine).ends_with(": rank 3 has not submitted it") ? 1 : 0;
        return;
      }
      Submission submission = late_one(values, "of two", 100ms);
      submission.process_set = 1;
      const auto pending = engine.submit(std::move(submission));
      told += said_by<StallTimeout>([&] {
                engine.wait(*pending);
              }).ends_with(": rank 3 has not submitted it")
                  ? 1
                  : 0;
    });
    CHECK(told == 4);
  }
}

TEST_CASE("deadlines: what ends in time harms nobody later, and one that is far away is none") {
  for (const int domains : {1, 3}) {
    CAPTURE(domains);
    ThreadWorld world({.size = 3, .domains = domains, .config = {}});
    world.run([&](int, Engine& engine) {
      for (int round = 0; round < 6; ++round) {
        std::vector<float> first{1}, second{1};
        const auto pending = engine.submit(late_one(second, "async", 3s));
        engine.wait(*engine.submit(late_one(first, "waited", 3s), After::Wait));
        engine.wait(*pending);
        CHECK(first.front() + second.front() == 6);
      }
      std::vector<float> far{1};
      engine.wait(
          *engine.submit(late_one(far, "far", std::chrono::nanoseconds::max()), After::Wait));
      std::this_thread::sleep_for(3300ms);
      CHECK(sum_of(engine, "async", 1) == 3);  // the name's next round has none
      CHECK(sum_of(engine, "waited", 1) == 3);
    });
  }
}

TEST_CASE("deadlines: a batch that does not end, and a deadline that makes no sense") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    WorldOptions options{.size = 3, .domains = domains, .config = {.log_level = LogLevel::Off}};
    options.customize = [](int, EngineParts& parts) {
      parts.backends.insert(parts.backends.begin(), std::make_unique<EndlessBackend>());
    };
    ThreadWorld world(std::move(options));
    std::atomic<int> told{0};
    world.run([&](int rank, Engine& engine) {
      std::vector<float> refused{1};
      CHECK(said_by<InvalidArgument>([&] { engine.submit(late_one(refused, "refused", -1ns)); }) ==
            "allreduce 'refused': a deadline of -1 ns; it must be positive, or 0 for none");
      std::vector<std::int64_t> values(3), more(3);
      Submission group = allreduce_of(values, "endless", DataType::Int64);
      group.tensors.push_back(allreduce_of(more, "", DataType::Int64).tensors.front());
      group.tensors.front().name = "fc.weight";
      if (rank == 1) group.deadline = 150ms;
      const auto words =
          said_by<StallTimeout>([&] { engine.wait(*engine.submit(std::move(group))); });
      told += words.starts_with(
                  "allreduce 'endless' (fc.weight and 1 more) of rank 1 has not ended by its "
                  "deadline of 150 ms: all ranks have submitted it, but its batch does not end")
                  ? 1
                  : 0;
    });
    CHECK(told == 3);
  }
}

TEST_CASE("deadlines: the words of a report, and what is no report") {
  const auto text = [](std::chrono::nanoseconds deadline, std::vector<int> missing,
                       std::vector<std::vector<int>> some_of) {
    return late_status(
               {{0, OpKind::Broadcast, "b"}, 4, deadline, std::move(missing), std::move(some_of)})
        .text();
  };
  CHECK(
      text(5s, {3}, {}) ==
      "broadcast 'b' of rank 4 has not ended by its deadline of 5 s: rank 3 has not submitted it");
  CHECK(text(1500us, {5, 1, 2}, {{6, 7}}) ==
        "broadcast 'b' of rank 4 has not ended by its deadline of 1500 us: ranks 1-2, 5 have not "
        "submitted it; some of ranks 6-7 have not submitted it");
  const LateReport report{{3, OpKind::Alltoall, "a"}, 2, 1ns, {1}, {{4, 5}, {7}}};
  Writer writer;
  encode(writer, report);
  const Bytes bytes = writer.take();
  Reader reader(bytes);
  const LateReport read = decode_late_report(reader);
  CHECK(reader.at_end());
  CHECK((read.key == report.key && read.rank == 2 && read.deadline == 1ns &&
         read.missing == report.missing));
  CHECK(read.some_of == report.some_of);
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    Reader cut(std::span<const std::byte>(bytes).first(length));
    CHECK_THROWS_AS(decode_late_report(cut), WireError);
  }
}

}  // namespace hvd::test
