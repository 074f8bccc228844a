// send and recv among ranks that are threads, of one to three domains, with direct copies and
// without.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/engine_probe.h"
#include "tests/support/sanitized.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;
using Values = std::vector<std::int32_t>;

/// The elements of a message, which differ by sender, tag and number.
Values values_of(int from, int tag, int number, std::size_t count) {
  Values values(count);
  std::iota(values.begin(), values.end(), from * 1'000'003 + tag * 10'007 + number * 101);
  return values;
}

PeerCall call_of(Values& values, int peer, int tag = 0) {
  return {values.data(),
          values.data(),
          DataType::Int32,
          static_cast<std::int64_t>(values.size()),
          peer,
          tag,
          {}};
}

/// One rank's way to the others.
struct Post {
  Engine& engine;
  int rank, size;

  [[nodiscard]] int next(int by = 1) const { return (rank + by) % size; }
  [[nodiscard]] int before(int by = 1) const { return (rank + size - by % size) % size; }
  void send(Values values, int to, int tag = 0) const {
    engine.peer_calls().send(call_of(values, to, tag));
  }
  [[nodiscard]] Values recv(std::size_t count, int from, int tag = 0) const {
    Values values(count, -1);
    const int came = engine.peer_calls().receive(call_of(values, from, tag));
    if (from != kAnyPeer) CHECK(came == from);
    return values;
  }
  [[nodiscard]] std::shared_ptr<HandleState> start_send(Values& values, int to, int tag = 0) const {
    return engine.peer_calls().start_send(call_of(values, to, tag));
  }
  [[nodiscard]] std::shared_ptr<HandleState> start_recv(Values& values, int from,
                                                        int tag = 0) const {
    return engine.peer_calls().start_receive(call_of(values, from, tag));
  }
  void wait(const std::shared_ptr<HandleState>& pending) const { engine.wait(*pending); }
  void barrier() const {
    Submission submission;
    submission.kind = OpKind::Barrier;
    engine.wait(*engine.submit(std::move(submission), After::Wait));
  }
};

struct Layout {
  int size, domains;
  DirectCopies copies;
};
const Layout kLayouts[] = {
    {1, 1, DirectCopies::On}, {2, 1, DirectCopies::On},  {2, 1, DirectCopies::Off},
    {4, 1, DirectCopies::On}, {2, 2, DirectCopies::On},  {3, 3, DirectCopies::On},
    {4, 2, DirectCopies::On}, {4, 2, DirectCopies::Off}, {5, 3, DirectCopies::On}};

std::string text_of(const Layout& layout) {
  return std::to_string(layout.size) + " ranks, " + std::to_string(layout.domains) + " domains" +
         (layout.copies == DirectCopies::Off ? ", no direct copies" : "");
}

void on_layouts(const std::function<void(const Post&)>& body, bool shut_down = true,
                int least = 1) {
  for (const Layout& layout : kLayouts) {
    if (layout.size < least) continue;
    CAPTURE(text_of(layout));
    WorldOptions options{.size = layout.size, .domains = layout.domains};
    options.config.direct_copies = layout.copies;
    options.config.log_level = LogLevel::Off;
    ThreadWorld world(options);
    world.run([&](int rank, Engine& engine) { body({engine, rank, layout.size}); }, shut_down);
  }
}

template <class Failure, class Call>
std::string text_of_failure(const Call& call) {
  try {
    call();
  } catch (const Failure& error) {
    return error.what();
  }
  return "nothing was thrown";
}
bool has(const std::string& text, const std::string& word) {
  return text.find(word) != std::string::npos;
}

// ThreadSanitizer writes shadow memory for each word, whose pages the kernel takes one by one.
constexpr std::size_t kMost = kThreadSanitizer ? 300'002 : 3'000'000;
constexpr std::size_t kCounts[] = {0,    1,    3,    6,    7,      16,      17,   1000,
                                   2047, 2048, 2049, 5000, 20'000, 300'001, kMost};

TEST_CASE("messages of every size go round") {
  on_layouts([](const Post& post) {
    for (const std::size_t count : kCounts)
      for (int by = 0; by < post.size; ++by) {
        Values out = values_of(post.rank, by, 1, count);
        const auto sent = post.start_send(out, post.next(by), by);
        CHECK(post.recv(count, post.before(by), by) == values_of(post.before(by), by, 1, count));
        post.wait(sent);
      }
  });
}

TEST_CASE("messages of every size go round by sends that wait") {
  on_layouts(
      [](const Post& post) {
        for (const std::size_t count : kCounts) {
          const Values out = values_of(post.rank, 2, 1, count);
          if (post.rank == 0) post.send(out, post.next(), 2);
          CHECK(post.recv(count, post.before(), 2) == values_of(post.before(), 2, 1, count));
          if (post.rank != 0) post.send(out, post.next(), 2);
        }
      },
      true, 2);
}

TEST_CASE("both send first, and both receive first") {
  on_layouts([](const Post& post) {
    for (const std::size_t count : {std::size_t{1}, std::size_t{4096}, kMost}) {
      Values in(count), out = values_of(post.rank, 0, 2, count);
      const auto received = post.start_recv(in, post.before(), 5);
      post.send(out, post.next(), 5);  // a recv is pending there: it need not be waited for
      post.wait(received);
      CHECK(in == values_of(post.before(), 0, 2, count));
      CHECK(received->value == post.before());
    }
  });
}

TEST_CASE("order holds for each pair and tag, tags do not hold each other up") {
  on_layouts([](const Post& post) {
    constexpr int kMessages = 60;
    std::vector<Values> out;
    std::vector<std::shared_ptr<HandleState>> sent;
    for (int number = 0; number < kMessages; ++number)
      for (int tag = 0; tag < 3; ++tag)
        out.push_back(values_of(post.rank, tag, number, number % 7 == 3 ? 30'000 : 5));
    for (int i = 0; i < kMessages * 3; ++i)
      sent.push_back(post.start_send(out[static_cast<std::size_t>(i)], post.next(), i % 3));
    for (int tag = 2; tag >= 0; --tag)
      for (int number = 0; number < kMessages; ++number)
        CHECK(post.recv(number % 7 == 3 ? 30'000 : 5, post.before(), tag) ==
              values_of(post.before(), tag, number, number % 7 == 3 ? 30'000 : 5));
    for (const auto& one : sent) post.wait(one);
  });
}

TEST_CASE("a recv from any rank says from whom, and each rank's messages stay in order") {
  on_layouts([](const Post& post) {
    constexpr int kEach = 40;
    for (const std::size_t count : {std::size_t{2}, std::size_t{9000}}) {
      post.barrier();  // the messages of one size at a time
      if (post.rank != 0) {
        for (int number = 0; number < kEach; ++number)
          post.send(values_of(post.rank, 1, number, count), 0, 1);
        continue;
      }
      std::vector<int> seen(static_cast<std::size_t>(post.size));
      for (int i = 0; i < kEach * (post.size - 1); ++i) {
        Values values(count, -1);
        int from = -1;
        if (i % 2 == 0) {
          from = post.engine.peer_calls().receive(call_of(values, kAnyPeer, 1));
        } else {
          const auto pending = post.start_recv(values, kAnyPeer, 1);
          post.wait(pending);
          from = static_cast<int>(pending->value);
        }
        CHECK(values == values_of(from, 1, seen.at(static_cast<std::size_t>(from))++, count));
      }
    }
  });
}

TEST_CASE("many are in flight, more than what is sent before it is asked for") {
  on_layouts([](const Post& post) {
    constexpr int kMessages = 3000;
    constexpr std::size_t kCount = 200;  // 2.4 MB in all
    std::vector<Values> out(kMessages), in(kMessages, Values(kCount));
    std::vector<std::shared_ptr<HandleState>> pending;
    for (int number = 0; number < kMessages; ++number) {
      out[static_cast<std::size_t>(number)] = values_of(post.rank, 7, number, kCount);
      pending.push_back(post.start_send(out[static_cast<std::size_t>(number)], post.next(), 7));
    }
    post.barrier();  // nobody has received any
    CHECK(std::any_of(pending.begin(), pending.end(),
                      [](const auto& one) { return !one->done.load(); }));
    CHECK(pending.front()->done.load());
    post.barrier();  // all have looked
    for (int number = 0; number < kMessages; ++number)
      pending.push_back(post.start_recv(in[static_cast<std::size_t>(number)], post.before(), 7));
    for (const auto& one : pending) post.wait(one);
    for (int number = 0; number < kMessages; ++number)
      CHECK(in[static_cast<std::size_t>(number)] == values_of(post.before(), 7, number, kCount));
  });
}

TEST_CASE("a message that the recv does not fit is a Mismatch, and gone") {
  on_layouts([](const Post& post) {
    for (const std::size_t count : {std::size_t{10}, std::size_t{50'000}}) {
      Values out = values_of(post.rank, 0, 0, count), good = values_of(post.rank, 0, 1, count);
      const auto bad_sent = post.start_send(out, post.next(), 2);
      const auto good_sent = post.start_send(good, post.next(), 2);
      Values small(count - 1, -7);
      const std::string text = text_of_failure<Mismatch>(
          [&] { post.engine.peer_calls().receive(call_of(small, post.before(), 2)); });
      CHECK(has(text, "from rank " + std::to_string(post.before())));
      CHECK(has(text, std::to_string(count)));
      CHECK(small == Values(count - 1, -7));
      CHECK(post.recv(count, post.before(), 2) == values_of(post.before(), 0, 1, count));
      post.wait(good_sent);
      if (count > 4096) {
        CHECK(has(text_of_failure<Mismatch>([&] { post.wait(bad_sent); }), "to be received"));
      } else {
        post.wait(bad_sent);  // it had been sent before anybody looked
      }
      // Of another type, and a recv that came first.
      std::vector<float> other(count);
      const auto pending = post.engine.peer_calls().start_receive({nullptr,
                                                                   other.data(),
                                                                   DataType::Float32,
                                                                   static_cast<std::int64_t>(count),
                                                                   post.before(),
                                                                   3,
                                                                   {}});
      static_cast<void>(text_of_failure<Mismatch>([&] { post.send(out, post.next(), 3); }));
      CHECK(has(text_of_failure<Mismatch>([&] { post.wait(pending); }), "float32"));
      post.barrier();
    }
  });
}

TEST_CASE("what is wrong with a call is said at once") {
  on_layouts([](const Post& post) {
    Values values(4);
    auto& calls = post.engine.peer_calls();
    CHECK_THROWS_AS(calls.send(call_of(values, kAnyPeer)), InvalidArgument);
    CHECK_THROWS_AS(calls.send(call_of(values, post.size)), InvalidArgument);
    CHECK_THROWS_AS(calls.start_send(call_of(values, -2)), InvalidArgument);
    CHECK_THROWS_AS(calls.receive(call_of(values, post.size)), InvalidArgument);
    CHECK_THROWS_AS(calls.start_receive(call_of(values, 0, -1)), InvalidArgument);
    CHECK_THROWS_AS(calls.send({nullptr, nullptr, DataType::Int32, 4, 0, 0, {}}), InvalidArgument);
  });
}

TEST_CASE("several threads of each rank send and receive at once, beside collectives") {
  on_layouts([](const Post& post) {
    constexpr int kThreads = 3, kRounds = 40;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread)
      threads.emplace_back([&, thread] {
        for (int round = 0; round < kRounds; ++round) {
          const std::size_t count = round % 4 == 0 ? 40'000 : 9;
          Values out = values_of(post.rank, thread, round, count);
          const auto sent = post.start_send(out, post.next(), thread);
          CHECK(post.recv(count, post.before(), thread) ==
                values_of(post.before(), thread, round, count));
          post.wait(sent);
        }
      });
    for (int round = 0; round < kRounds; ++round) {
      std::vector<float> values(100, 1);
      post.engine.wait(
          *post.engine.submit(allreduce_of(values, "beside", DataType::Float32), After::Wait));
      CHECK(values.front() == static_cast<float>(post.size));
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST_CASE("an idle rank's coordination thread serves its recvs and sends") {
  on_layouts([](const Post& post) {
    constexpr std::size_t kCount = 200'000;
    Values in(kCount), out = values_of(post.rank, 0, 0, kCount);
    const auto received = post.start_recv(in, post.before());
    const auto sent = post.start_send(out, post.next());
    // nobody drives
    while (!received->done.load() || !sent->done.load()) std::this_thread::sleep_for(1ms);
    CHECK(in == values_of(post.before(), 0, 0, kCount));
    post.barrier();
  });
}

TEST_CASE("random programs: who sends what to whom, in any order of waits") {
  for (unsigned seed = 0; seed < 6; ++seed) {
    on_layouts([seed](const Post& post) {
      struct Planned {
        int from, to, tag, number;
        std::size_t count;
      };
      std::mt19937 shared(seed);  // the same plan on all ranks
      std::vector<Planned> plan;
      for (int number = 0; number < 80; ++number) {
        const auto pick = [&](std::size_t below) { return static_cast<int>(shared() % below); };
        const std::size_t counts[] = {0, 1, 5, 6, 7, 500, 2048, 2049, 9000, 70'000};
        plan.push_back({pick(static_cast<std::size_t>(post.size)),
                        pick(static_cast<std::size_t>(post.size)), pick(3), number,
                        counts[static_cast<std::size_t>(pick(std::size(counts)))]});
      }
      std::mt19937 own(seed * 100 + static_cast<unsigned>(post.rank));
      std::vector<Values> memory(plan.size() * 2);
      std::vector<std::shared_ptr<HandleState>> pending;
      // Sends in order, recvs in order; how the two mix differs by rank.
      std::vector<std::size_t> sends, recvs;
      for (std::size_t i = 0; i < plan.size(); ++i) {
        if (plan[i].from == post.rank) sends.push_back(i);
        if (plan[i].to == post.rank) recvs.push_back(i);
      }
      for (std::size_t s = 0, r = 0; s < sends.size() || r < recvs.size();) {
        if (r == recvs.size() || (s < sends.size() && own() % 2 == 0)) {
          const auto& [from, to, tag, number, count] = plan[sends[s]];
          auto& values = memory[sends[s++]] = values_of(from, tag, number, count);
          pending.push_back(post.start_send(values, to, tag));
        } else {
          const auto& [from, to, tag, number, count] = plan[recvs[r]];
          auto& values = memory[plan.size() + recvs[r++]] = Values(count, -1);
          pending.push_back(post.start_recv(values, from, tag));
        }
        if (own() % 16 == 0) std::this_thread::sleep_for(200us);
      }
      std::shuffle(pending.begin(), pending.end(), own);
      for (const auto& one : pending) post.wait(one);
      for (const std::size_t i : recvs)
        CHECK(memory[plan.size() + i] ==
              values_of(plan[i].from, plan[i].tag, plan[i].number, plan[i].count));
    });
  }
}

// -------------------------------------------------------------------------------------------- ends

TEST_CASE("what is pending at shutdown() fails once, and a recv from who has left says so") {
  on_layouts(
      [](const Post& post) {
        Values never(3), out = values_of(post.rank, 0, 0, 100'000), late(4);
        if (post.rank == 0) {
          const auto received = post.start_recv(never, 1, 9);
          const auto sent = post.start_send(out, 1, 8);
          const auto any = post.start_recv(late, kAnyPeer, 7);
          post.engine.shutdown();
          CHECK(has(text_of_failure<Shutdown>([&] { post.wait(received); }), "shutdown()"));
          CHECK_THROWS_AS(post.wait(sent), Shutdown);
          CHECK_THROWS_AS(post.wait(any), Shutdown);
          CHECK_THROWS_AS(post.wait(any), Shutdown);
          CHECK_THROWS_AS(post.send(never, 1), Shutdown);
        } else {
          const std::string text =
              text_of_failure<Shutdown>([&] { static_cast<void>(post.recv(3, 0, 5)); });
          CHECK(has(text, "rank 0"));
          CHECK(has(text_of_failure<Shutdown>([&] { post.send(out, 0, 77); }), "rank 0"));
          post.engine.shutdown();
        }
      },
      false, 2);
}

TEST_CASE("a rank that has called shutdown() still takes part in what it has started") {
  on_layouts(
      [](const Post& post) {
        constexpr std::size_t kCount = 100'000;
        Values in(kCount), out = values_of(post.rank, 4, 0, kCount);
        if (post.rank == 0) {
          const auto received = post.start_recv(in, 1, 4);
          const auto sent = post.start_send(out, 1, 4);
          post.engine.shutdown();
          post.wait(received);
          post.wait(sent);
          CHECK(in == values_of(1, 4, 0, kCount));
        } else if (post.rank == 1) {
          std::this_thread::sleep_for(20ms);
          CHECK(post.recv(kCount, 0, 4) == values_of(0, 4, 0, kCount));
          post.send(out, 0, 4);
          post.engine.shutdown();
        } else {
          post.engine.shutdown();
        }
      },
      false, 2);
}

TEST_CASE("what matches comes whole, also if it is pending as all ranks call shutdown()") {
  on_layouts(
      [](const Post& post) {
        constexpr std::size_t kCount = 3'000'000;  // more than is copied at a time
        Values in(kCount), out = values_of(post.rank, 5, 0, kCount);
        const auto send = [&] { return post.start_send(out, post.next(), 5); };
        auto sent = post.rank % 2 == 0 ? send() : nullptr;
        const auto received = post.start_recv(in, post.before(), 5);
        if (!sent) sent = send();
        CHECK(post.engine.shutdown());
        post.wait(sent);
        std::fill(out.begin(), out.end(), -1);
        post.wait(received);
        CHECK(in == values_of(post.before(), 5, 0, kCount));
      },
      false);
}

TEST_CASE("many that match come, also if they are pending as all ranks call shutdown()") {
  on_layouts(
      [](const Post& post) {
        constexpr int kMessages = 500;
        constexpr std::size_t kCount = 512;
        std::vector<Values> in(kMessages, Values(kCount)), out;
        std::vector<std::shared_ptr<HandleState>> pending;
        for (int number = 0; number < kMessages; ++number)
          out.push_back(values_of(post.rank, 7, number, kCount));
        for (auto& values : in) pending.push_back(post.start_recv(values, post.before(), 7));
        for (auto& values : out) pending.push_back(post.start_send(values, post.next(), 7));
        CHECK(post.engine.shutdown());
        for (const auto& one : pending) post.wait(one);
        for (int number = 0; number < kMessages; ++number)
          REQUIRE(in[static_cast<std::size_t>(number)] ==
                  values_of(post.before(), 7, number, kCount));
      },
      false);
}

TEST_CASE("what nobody answers ends when all ranks call shutdown(), beside what matches") {
  on_layouts(
      [](const Post& post) {
        constexpr std::size_t kCount = 100'000;
        Values in(kCount), out = values_of(post.rank, 1, 0, kCount), never(2), too(2);
        const auto lost = post.start_send(out, post.next(), 2);
        const auto alone = post.start_recv(never, post.before(), 3);
        const auto any = post.start_recv(too, kAnyPeer, 4);
        const auto received = post.start_recv(in, post.before(), 1);
        const auto sent = post.start_send(out, post.next(), 1);
        CHECK(post.engine.shutdown());
        for (const auto& one : {lost, alone, any})
          CHECK(has(text_of_failure<Shutdown>([&] { post.wait(one); }), "shutdown()"));
        post.wait(sent);
        post.wait(received);
        CHECK(in == values_of(post.before(), 1, 0, kCount));
      },
      false);
}

TEST_CASE("a recv from the own rank ends when that leaves, and while others go on") {
  std::atomic<bool> has_left{false};
  on_layouts(
      [&](const Post& post) {
        if (post.rank == 0) {
          Values never(2), mine(4), out{1, 2, 3, 4}, other(1);
          const auto pending = post.start_recv(never, 0, 3);
          const auto received = post.start_recv(mine, 0, 4);
          const auto sent = post.start_send(out, 0, 4);
          const auto any = post.size == 1 ? post.start_recv(other, kAnyPeer, 5) : pending;
          CHECK(post.engine.leave(50ms) == (post.size == 1));
          for (const auto& one : {pending, any})
            CHECK(has(text_of_failure<Shutdown>([&] { post.wait(one); }), "shutdown()"));
          post.wait(sent);
          post.wait(received);
          CHECK(mine == out);
          has_left = true;
        } else {
          while (!has_left) std::this_thread::sleep_for(1ms);
        }
        CHECK(post.engine.shutdown());
        if (post.rank == 0) has_left = false;
      },
      false);
}

TEST_CASE("a rank that dies ends what others have pending in their shutdown()") {
  for (const Layout& layout : {Layout{2, 1, DirectCopies::On}, Layout{3, 1, DirectCopies::Off},
                               Layout{5, 2, DirectCopies::On}}) {
    CAPTURE(text_of(layout));
    WorldOptions options{.size = layout.size, .domains = layout.domains};
    options.config.direct_copies = layout.copies;
    options.config.log_level = LogLevel::Off;
    ThreadWorld world(options);
    world.run(
        [&](int rank, Engine& engine) {
          const Post post{engine, rank, layout.size};
          Values in(100'000), out(100'000);
          if (rank == 1) {
            std::this_thread::sleep_for(50ms);
            return EngineProbe::die(engine);
          }
          const auto received = post.start_recv(in, 1);
          const auto sent = post.start_send(out, 1);
          CHECK_FALSE(engine.shutdown());
          CHECK(has(text_of_failure<RankFailed>([&] { post.wait(received); }), "rank 1"));
          CHECK_THROWS_AS(post.wait(sent), RankFailed);
        },
        false);
  }
}

TEST_CASE("functions that follow a recv and a send are called once, however these end") {
  on_layouts(
      [](const Post& post) {
        constexpr std::size_t kCount = 50'000;
        Values in(kCount), out = values_of(post.rank, 6, 0, kCount), nothing(1);
        if (post.rank == 0) {
          std::atomic<int> called{0}, alive{0};
          auto owner = std::make_shared<int>();
          const std::weak_ptr<int> watch = owner;
          PeerCall call = call_of(in, 1, 6);
          call.keep_alive = std::move(owner);
          const auto received = post.engine.peer_calls().start_receive(std::move(call));
          const auto sent = post.start_send(out, 1, 6);
          const auto never = post.start_recv(nothing, 1, 9);  // which rank 1 does not send
          post.engine.then(*received, [&] {
            if (!watch.expired()) ++alive;
            ++called;
          });
          for (const auto& pending : {sent, never}) post.engine.then(*pending, [&] { ++called; });
          post.barrier();
          post.wait(received);
          post.wait(sent);
          CHECK(in == values_of(1, 6, 0, kCount));
          CHECK(has(text_of_failure<Shutdown>([&] { post.wait(never); }), "rank 1"));
          while (called < 3) std::this_thread::sleep_for(1ms);
          CHECK(alive == 1);
          post.engine.shutdown();
          CHECK(called == 3);
          CHECK(watch.expired());
          return;
        }
        post.barrier();
        if (post.rank == 1) {
          post.send(out, 0, 6);
          CHECK(post.recv(kCount, 0, 6) == values_of(0, 6, 0, kCount));
        }
        post.engine.shutdown();
      },
      false, 2);
}

TEST_CASE("a recv from any rank ends when all others have left") {
  on_layouts(
      [](const Post& post) {
        if (post.rank == 0) {
          CHECK(post.recv(1, kAnyPeer, 3).front() == 42);
          CHECK(
              has(text_of_failure<Shutdown>([&] { static_cast<void>(post.recv(1, kAnyPeer, 3)); }),
                  "all other ranks"));
        } else if (post.rank == post.size - 1) {
          std::this_thread::sleep_for(10ms);
          post.send({42}, 0, 3);
        }
        post.engine.shutdown();
      },
      false, 2);
}

TEST_CASE("a peer that dies ends what waits for it") {
  for (const Layout& layout : {Layout{2, 1, DirectCopies::On}, Layout{3, 1, DirectCopies::Off},
                               Layout{5, 2, DirectCopies::On}}) {
    CAPTURE(text_of(layout));
    WorldOptions options{.size = layout.size, .domains = layout.domains};
    options.config.direct_copies = layout.copies;
    options.config.log_level = LogLevel::Off;
    ThreadWorld world(options);
    world.run(
        [&](int rank, Engine& engine) {
          const Post post{engine, rank, layout.size};
          if (rank == 1) {
            post.barrier();
            return EngineProbe::die(engine);
          }
          Values in(100'000), out(100'000);
          const auto sent = post.start_send(out, 1, 1);
          post.barrier();
          CHECK(has(text_of_failure<RankFailed>([&] { static_cast<void>(post.recv(4, 1)); }),
                    "rank 1"));
          CHECK_THROWS_AS(post.wait(sent), RankFailed);
          CHECK_THROWS_AS(post.send(in, 1), RankFailed);
        },
        false);
  }
}

TEST_CASE("a recv that waits too long is a StallTimeout") {
  for (const int domains : {1, 2}) {
    WorldOptions options{.size = 2, .domains = domains};
    options.config.stall_shutdown_time = 1s;
    options.config.log_level = LogLevel::Off;
    ThreadWorld world(options);
    world.run(
        [&](int rank, Engine& engine) {
          const Post post{engine, rank, 2};
          Values never(1);
          const auto call = call_of(never, 1 - rank, 6);
          if (rank == 0) {
            CHECK(has(text_of_failure<StallTimeout>([&] { engine.peer_calls().receive(call); }),
                      "recv from rank 1 with tag 6"));
          } else {  // nobody waits for this one: it is not late
            const auto pending = engine.peer_calls().start_receive(call);
            while (!pending->done.load()) std::this_thread::sleep_for(10ms);
            CHECK_THROWS_AS(post.wait(pending), StallTimeout);
          }
          engine.shutdown();
        },
        false);
  }
}

TEST_CASE("a recv whose message is offered, and does not come, is a StallTimeout") {
  WorldOptions options{.size = 2};
  options.config.direct_copies = DirectCopies::Off;
  options.config.stall_shutdown_time = 1s;
  options.config.log_level = LogLevel::Off;
  ThreadWorld world(options);
  std::atomic<bool> frozen{false}, over{false};
  world.run(
      [&](int rank, Engine& engine) {
        constexpr std::size_t kCount = 100'000;
        const Post post{engine, rank, 2};
        Values values = values_of(rank, 6, 0, kCount);
        if (rank == 0) {
          const auto sent = post.start_send(values, 1, 6);
          EngineProbe::hold_mutex(engine, [&] {  // none of its threads can do anything
            frozen = true;
            while (!over) std::this_thread::sleep_for(1ms);
          });
          CHECK_THROWS_AS(post.wait(sent), StallTimeout);
        } else {
          while (!frozen) std::this_thread::sleep_for(1ms);
          CHECK(has(
              text_of_failure<StallTimeout>([&] { static_cast<void>(post.recv(kCount, 0, 6)); }),
              "recv from rank 0 with tag 6"));
          over = true;
        }
        engine.shutdown();
      },
      false);
}

}  // namespace
}  // namespace hvd::test
