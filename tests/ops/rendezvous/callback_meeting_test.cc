// Ranks that meet through a store handed in: rounds, gifts, and stores that lose keys, answer late
// or hold those of another job.
#include "ops/rendezvous/callback_meeting.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "hvd/base/text.h"
#include "tests/ops/rendezvous/meeting_rounds.h"
#include "tests/support/worlds/file_store.h"
#include "tests/support/worlds/memory_store.h"

namespace hvd::test::callback_meeting {
namespace {

using namespace std::chrono_literals;

std::vector<std::string> meet(const std::vector<Rendezvous>& ranks,
                              const std::function<void(CallbackMeeting&)>& work,
                              std::chrono::milliseconds patience = 20s) {
  std::vector<std::string> said(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    threads.emplace_back([&, i] {
      try {
        CallbackMeeting meeting(ranks[i], patience);
        work(meeting);
      } catch (const Error& error) {
        said[i] = error.what();
      }
    });
  for (auto& thread : threads) thread.join();
  return said;
}

std::vector<Rendezvous> all_of(const std::shared_ptr<MemoryStore>& store, int size,
                               const std::string& name) {
  std::vector<Rendezvous> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rendezvous_of(store, rank, size, name));
  return ranks;
}

}  // namespace

TEST_CASE("callback meeting: rounds and gifts, for worlds of several sizes in one store") {
  const auto store = std::make_shared<MemoryStore>();
  for (const int size : {1, 2, 3, 7})
    for (const auto& said : meet(all_of(store, size, formatted("of {}", size)), use))
      CHECK(said == "");
}

TEST_CASE("callback meeting: a gift that never comes is given up") {
  const auto store = std::make_shared<MemoryStore>();
  const auto said = meet(all_of(store, 2, "gift"), [](CallbackMeeting& meeting) {
    std::atomic<int> asked{0};
    if (meeting.rank() == 1)
      static_cast<void>(meeting.give_from_first({0, 1}, {}, 1, [&] { return ++asked > 3; }));
  });
  CHECK(said[0] == "");
  CHECK(said[1].find("waited in vain for what rank 0") != std::string::npos);
}

TEST_CASE("callback meeting: a store that loses keys, or answers late") {
  const auto store = std::make_shared<MemoryStore>();
  auto ranks = all_of(store, 2, "lossy");
  ranks[1].set = [](const std::string&, const Rendezvous::Value&) {};
  for (const auto& said : meet(ranks, use, 1s))
    CHECK(said.find("rank 1 has not come") != std::string::npos);

  ranks = all_of(store, 2, "late");
  for (auto& rank : ranks)
    rank.get = [get = rank.get](const std::string& key, std::chrono::milliseconds time) {
      std::this_thread::sleep_for(time / 2);
      return get(key, time);
    };
  for (const auto& said : meet(ranks, [](CallbackMeeting& meeting) { meeting.barrier(); }))
    CHECK(said == "");

  // What it returns is not what was set.
  ranks = all_of(store, 2, "garbled");
  ranks[1].get = [](const std::string&, std::chrono::milliseconds) {
    return Rendezvous::Value{1, 2, 3};
  };
  const auto said = meet(ranks, use, 1s);
  CHECK(said[1].find("cannot be read") != std::string::npos);
}

TEST_CASE("callback meeting: all name who has not come, also where rank 0 comes late") {
  const auto store = std::make_shared<MemoryStore>();
  auto ranks = all_of(store, 3, "late first");
  ranks.pop_back();
  ranks[0].add = [add = ranks[0].add](const std::string& key, std::int64_t amount) {
    std::this_thread::sleep_for(700ms);  // most of the others' patience
    return add(key, amount);
  };
  for (const auto& said : meet(ranks, use, 1s))
    CHECK(said.find("rank 2 has not come") != std::string::npos);
}

TEST_CASE("callback meeting: what a function of the store throws ends it, whatever it is") {
  for (const bool of_first : {true, false}) {
    CAPTURE(of_first);
    const auto store = std::make_shared<MemoryStore>();
    auto ranks = all_of(store, 2, "throws");
    auto& thrower = ranks[of_first ? 0 : 1];
    thrower.get = [get = thrower.get, calls = std::make_shared<int>()](
                      const std::string& key, std::chrono::milliseconds time) {
      if (++*calls == 5) throw 5;
      return get(key, time);
    };
    const auto said = meet(ranks, use, 1s);
    CHECK(said[of_first ? 0 : 1].find("the store does not answer rank") != std::string::npos);
    CHECK(said[of_first ? 1 : 0] != "");
  }
}

TEST_CASE("callback meeting: one that dies is named, where another has died before") {
  std::string folder = "/tmp/hvd-callbacks-XXXXXX";
  REQUIRE(::mkdtemp(folder.data()) != nullptr);
  const auto store = std::make_shared<FileStore>(folder);
  std::vector<pid_t> children;
  for (const int rank : {1, 2}) {
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        bool is_made = false;
        Rendezvous mine = rendezvous_of(store, rank, 3, "two");
        mine.set = [&is_made, set = mine.set](const std::string& key,
                                              const Rendezvous::Value& value) {
          set(key, value);
          if (is_made) ::_exit(0);  // it has said its part of the round, and rank 2 has not
        };
        CallbackMeeting meeting(std::move(mine), 20s);
        is_made = true;
        if (rank == 1) static_cast<void>(meeting.allgather(part_of(1, 1)));
      } catch (...) {
        ::_exit(1);
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  CallbackMeeting meeting(rendezvous_of(store, 0, 3, "two"), 20s);
  std::string said;
  try {
    static_cast<void>(meeting.allgather({}));
  } catch (const RankFailed& error) {
    said = error.what();
  } catch (const BackendError& error) {  // after all its patience
    said = formatted("too late: {}", error.what());
  }
  CHECK(said.find("rank 2 has ended") != std::string::npos);
  for (const pid_t child : children) ::waitpid(child, nullptr, 0);
  std::filesystem::remove_all(folder);
}

TEST_CASE(
    "callback meeting: a rank that dies while others wait for it is named, and what it said before "
    "counts") {
  // The store lies in files: the rank that dies is a process of its own.
  std::string folder = "/tmp/hvd-callbacks-XXXXXX";
  REQUIRE(::mkdtemp(folder.data()) != nullptr);
  const auto store = std::make_shared<FileStore>(folder);
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      CallbackMeeting meeting(rendezvous_of(store, 1, 2, "files"), 20s);
      static_cast<void>(meeting.allgather(part_of(1, 1)));
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);  // the second round sees it gone
  }
  CallbackMeeting meeting(rendezvous_of(store, 0, 2, "files"), 20s);
  CHECK(meeting.allgather(part_of(0, 1)).at(1) == part_of(1, 1));
  std::string said;
  try {
    static_cast<void>(meeting.allgather({}));
  } catch (const RankFailed& error) {
    said = error.what();
  }
  CHECK(said.find("rank 1") != std::string::npos);
  CHECK_THROWS_AS(meeting.barrier(), BackendError);  // it stays failed
  ::waitpid(child, nullptr, 0);
  std::filesystem::remove_all(folder);
}

}  // namespace hvd::test::callback_meeting
