// Rounds that leaders end among themselves: every order in which their messages may come.
#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "hvd/negotiation/leaders/direct_rounds.h"

namespace hvd::test {
namespace {

constexpr std::uint32_t kNumber = 7;

Bytes contribution_of(int domain, std::uint64_t round) {
  return Writer().put(static_cast<std::uint64_t>(domain) << 32 | round).take();
}

/// Leaders whose messages wait in lines, one for each pair, until they are let through.
struct Leaders {
  struct Line final : Transport {
    Line(Leaders& all, int of) : leaders(all), self(of) {}
    int domain() const override { return self; }
    int domains() const override { return leaders.count; }
    void send(int to, SharedBytes message) override {
      leaders.lines[{self, to}].push_back({self, *message});
    }
    std::optional<Message> receive() override { return std::nullopt; }
    Leaders& leaders;
    int self;
  };
  explicit Leaders(int domains) : count(domains) {
    for (int domain = 0; domain < domains; ++domain) {
      rounds.push_back(std::make_unique<DirectRounds>(domain, domains));
      wires.push_back(std::make_unique<Line>(*this, domain));
      rounds.back()->end(kNumber);  // the first round took the long way everywhere
    }
  }
  DirectRounds& operator[](int domain) { return *rounds[static_cast<std::size_t>(domain)]; }
  void flush() {
    for (int domain = 0; domain < count; ++domain)
      (*this)[domain].flush(*wires[static_cast<std::size_t>(domain)]);
  }
  /// Returns whether the receiver falls back.
  bool let_through(int from, int to, bool cannot_come = false, bool is_known = true) {
    flush();
    auto& line = lines[{from, to}];
    const Message message = line.front();
    line.pop_front();
    std::uint32_t fallen_back = 0;
    const bool falls = (*this)[to].receive(message.from, DirectRounds::Part(message.bytes),
                                           is_known, cannot_come, fallen_back);
    if (falls) CHECK(fallen_back == kNumber);
    flush();
    return falls;
  }
  void promise(int domain, DirectRounds::Clock::time_point now = {}) {
    const Bytes contribution = contribution_of(domain, (*this)[domain].rounds_over(kNumber));
    (*this)[domain].promise(kNumber, now, contribution.size(), 0, [&](Bytes& bytes) {
      bytes.insert(bytes.end(), contribution.begin(), contribution.end());
    });
    flush();
  }
  [[nodiscard]] std::size_t waiting(int from, int to) { return lines[{from, to}].size(); }

  int count;
  std::vector<std::unique_ptr<DirectRounds>> rounds;
  std::vector<std::unique_ptr<Line>> wires;
  std::map<std::pair<int, int>, std::deque<Message>> lines;
};

bool is_complete(const DirectRounds& rounds) {
  return rounds.complete() == std::vector<std::uint32_t>{kNumber};
}

}  // namespace

TEST_CASE(
    "direct rounds: whoever has all contributions ends the round, and others may be a round "
    "ahead") {
  Leaders leaders(2);
  for (std::uint64_t round = 1; round < 5; ++round) {
    REQUIRE(leaders[0].may_promise(kNumber));
    leaders.promise(0);
    CHECK_FALSE(leaders[0].may_promise(kNumber));
    leaders.promise(1);
    CHECK_FALSE(is_complete(leaders[0]));
    CHECK(leaders[0].missing(kNumber) == std::vector<int>{1});
    CHECK_FALSE(leaders.let_through(1, 0));
    REQUIRE(is_complete(leaders[0]));
    for (int domain = 0; domain < 2; ++domain) {
      const auto got = leaders[0].contributions(kNumber)[static_cast<std::size_t>(domain)];
      const Bytes wanted = contribution_of(domain, round);
      CHECK(Bytes(got.begin(), got.end()) == wanted);
      CHECK(reinterpret_cast<std::uintptr_t>(got.data()) % 16 == 0);
    }
    leaders[0].end(kNumber);
    leaders.promise(0);  // the next, before the other has ended this one
    CHECK_FALSE(leaders.let_through(0, 1));
    CHECK_FALSE(leaders.let_through(0, 1));
    REQUIRE(is_complete(leaders[1]));
    leaders[1].end(kNumber);
    CHECK_FALSE(is_complete(leaders[1]));
    leaders.promise(1);
    REQUIRE(is_complete(leaders[1]));
    leaders[1].end(kNumber);
    CHECK_FALSE(leaders.let_through(1, 0));
    leaders[0].end(kNumber);
    CHECK(leaders[0].rounds_over(kNumber) == leaders[1].rounds_over(kNumber));
    round += 1;
  }
}

TEST_CASE(
    "direct rounds: one that takes the long way makes all take it, whether it says so before or "
    "after they contribute") {
  for (const bool before : {true, false}) {
    Leaders leaders(3);
    if (before) leaders[2].go_long(kNumber);
    leaders.promise(0);
    leaders.promise(1);
    CHECK_FALSE(leaders.let_through(0, 2));
    CHECK_FALSE(leaders.let_through(1, 2));
    if (!before) leaders[2].go_long(kNumber);
    CHECK_FALSE(leaders[2].may_promise(kNumber));
    CHECK(leaders.let_through(2, 0));
    CHECK(leaders.let_through(2, 1));
    CHECK_FALSE(leaders[0].is_promised(kNumber));
    leaders[0].go_long(kNumber);
    leaders[1].go_long(kNumber);
    // What was on its way between those two changes nothing any more.
    CHECK_FALSE(leaders.let_through(0, 1));
    CHECK_FALSE(leaders.let_through(1, 0));
    while (leaders.waiting(0, 1) > 0) CHECK_FALSE(leaders.let_through(0, 1));
    while (leaders.waiting(1, 0) > 0) CHECK_FALSE(leaders.let_through(1, 0));
    CHECK_FALSE(is_complete(leaders[0]));
    for (int domain = 0; domain < 3; ++domain) leaders[domain].end(kNumber);
    // it does not try again at once
    for (int domain = 0; domain < 2; ++domain) CHECK_FALSE(leaders[domain].may_promise(kNumber));
  }
}

TEST_CASE("direct rounds: a contribution that comes when the round is over elsewhere is dropped") {
  Leaders leaders(3);
  leaders.promise(0);
  leaders[1].go_long(kNumber);
  CHECK_FALSE(leaders.let_through(0, 1));
  CHECK(leaders.let_through(1, 0));
  for (int domain = 0; domain < 3; ++domain) leaders[domain].end(kNumber);
  CHECK_FALSE(leaders.let_through(0, 2));  // late
  leaders.promise(2);
  CHECK(leaders[2].missing(kNumber) == std::vector<int>{0, 1});
}

TEST_CASE(
    "direct rounds: who is missed for long is asked, and takes the long way unless it has "
    "contributed") {
  Leaders leaders(3);
  const auto begin = DirectRounds::Clock::now();
  leaders.promise(0, begin);
  leaders.promise(1, begin);
  leaders[0].ask(begin + DirectRounds::kPatience / 2);
  leaders.flush();
  CHECK(leaders.waiting(0, 2) == 1);
  leaders[0].ask(begin + DirectRounds::kPatience);
  leaders.flush();
  CHECK(leaders.waiting(0, 1) == 2);
  CHECK(leaders.waiting(0, 2) == 2);
  for (int i = 0; i < 2; ++i) {
    CHECK_FALSE(leaders.let_through(0, 1));
    CHECK_FALSE(leaders.let_through(0, 2));
  }
  CHECK(leaders.waiting(1, 0) == 1);  // its contribution, which answers
  CHECK(leaders.waiting(2, 0) == 1);
  CHECK_FALSE(leaders[2].may_promise(kNumber));
  CHECK(leaders.let_through(2, 0));
  CHECK_FALSE(leaders.let_through(1, 2));
  CHECK(leaders.let_through(2, 1));
}

TEST_CASE(
    "direct rounds: a leader that is slow gets few queries for many rounds, and its answers travel "
    "as one") {
  constexpr std::uint32_t kNumbers = 100;
  Leaders leaders(3);
  const auto begin = DirectRounds::Clock::now();
  for (std::uint32_t number = 100; number < 100 + kNumbers; ++number) {
    for (int domain = 0; domain < 3; ++domain) leaders[domain].end(number);
    leaders[0].promise(number, begin, 0, 0, [](Bytes&) {});
  }
  leaders.flush();
  for (auto& [pair, line] : leaders.lines) line.clear();  // the contributions are on their way
  for (int ms = 0; ms < 10'000; ++ms) {
    leaders[0].ask(begin + std::chrono::milliseconds(ms));
    leaders.flush();
  }
  // after 20, 60, 140... ms
  for (const int to : {1, 2}) CHECK(leaders.waiting(0, to) == 8);
  std::uint32_t queries = 0, fallen_back = 0, fell_back = 0;
  DirectRounds::split(std::move(leaders.lines[{0, 2}].front()), [&](DirectRounds::Part query) {
    CHECK(DirectRounds::number_of(query) == 100 + queries++);
    CHECK_FALSE(leaders[2].receive(0, std::move(query), false, false, fallen_back));
  });
  CHECK(queries == kNumbers);
  leaders.flush();
  REQUIRE(leaders.waiting(2, 0) == 1);
  DirectRounds::split(std::move(leaders.lines[{2, 0}].front()), [&](DirectRounds::Part answer) {
    fell_back += leaders[0].receive(2, std::move(answer), true, false, fallen_back) ? 1 : 0;
  });
  CHECK(fell_back == kNumbers);
}

TEST_CASE("direct rounds: what is said to one domain does not pass a contribution") {
  Leaders leaders(2);
  const auto begin = DirectRounds::Clock::now();
  const auto contribute = [&](std::uint32_t number) {
    for (int domain = 0; domain < 2; ++domain) leaders[domain].end(number);
    leaders[0].promise(number, begin, 0, 0, [](Bytes&) {});
  };
  contribute(100);
  leaders[0].ask(begin + DirectRounds::kPatience);
  contribute(101);
  leaders[0].ask(begin + 2 * DirectRounds::kPatience);
  leaders.flush();
  std::vector<std::uint32_t> order;
  for (auto& message : leaders.lines[{0, 1}])
    DirectRounds::split(std::move(message), [&](const DirectRounds::Part& part) {
      order.push_back(DirectRounds::number_of(part));
    });
  CHECK(order == std::vector<std::uint32_t>{100, 100, 101, 101});
}

TEST_CASE("direct rounds: who asks for the next round is answered while this one is under way") {
  Leaders leaders(2);
  const auto begin = DirectRounds::Clock::now();
  leaders.promise(0, begin);
  leaders.promise(1, begin);
  CHECK_FALSE(leaders.let_through(1, 0));
  leaders[0].end(kNumber);
  leaders.promise(0, begin);
  leaders[0].ask(begin + DirectRounds::kPatience);
  CHECK_FALSE(leaders.let_through(0, 1));
  CHECK_FALSE(leaders.let_through(0, 1));
  CHECK_FALSE(leaders.let_through(0, 1));  // asks for what this one has not begun
  CHECK(is_complete(leaders[1]));          // and does not touch this round
  leaders[1].end(kNumber);
  CHECK_FALSE(leaders[1].may_promise(kNumber));
  CHECK(leaders.let_through(1, 0));
}

TEST_CASE(
    "direct rounds: one whose rank has joined, and one that knows the number no more, say so at "
    "once") {
  Leaders leaders(3);
  leaders.promise(0);
  CHECK_FALSE(leaders.let_through(0, 1, true));
  CHECK_FALSE(leaders.let_through(0, 2, false, false));
  CHECK(leaders.let_through(1, 0));
  CHECK_FALSE(leaders.let_through(2, 0));  // it knows already
  leaders[0].forget(kNumber);
  CHECK(leaders[0].numbers_kept() == 0);
  CHECK_FALSE(leaders[0].may_promise(kNumber));
}

TEST_CASE("direct rounds: contributions to several travel together in messages that are not long") {
  constexpr std::size_t kMost = 60 << 10;
  constexpr std::size_t kHead = 32;
  Leaders leaders(2);
  DirectRounds& first = leaders[0];
  const std::vector<std::size_t> lengths{8,          16 << 10, 16 << 10, 16 << 10, 16 << 10,
                                         kMost + 80, 100,      0,        40 << 10};
  const auto number_of = [](std::size_t place) { return static_cast<std::uint32_t>(100 + place); };
  const auto value_of = [](std::size_t place) { return static_cast<std::byte>(place + 1); };
  std::size_t sent_before_the_end = 0;
  for (std::size_t place = 0; place < lengths.size(); ++place) {
    for (int domain = 0; domain < 2; ++domain) leaders[domain].end(number_of(place));
    first.promise(number_of(place), {}, lengths[place], 100 << 10, [&](Bytes& bytes) {
      bytes.resize(bytes.size() + lengths[place], value_of(place));
    });
    first.flush_full(*leaders.wires[0]);
    sent_before_the_end = leaders.waiting(0, 1);
  }
  leaders.flush();
  CHECK(leaders.waiting(0, 1) == sent_before_the_end + 1);  // the last, which had room
  std::size_t messages = 0, place = 0;
  for (auto& line = leaders.lines[{0, 1}]; !line.empty(); line.pop_front(), ++messages) {
    const bool is_long = line.front().bytes.size() > kMost;
    const std::size_t before = place;
    DirectRounds::split(std::move(line.front()), [&](const DirectRounds::Part& part) {
      REQUIRE(place < lengths.size());
      CHECK(DirectRounds::number_of(part) == number_of(place));
      const auto bytes = part.bytes().subspan(kHead);
      REQUIRE(bytes.size() >= lengths[place]);
      for (std::size_t i = 0; i < bytes.size(); ++i)
        REQUIRE(bytes[i] == (i < lengths[place] ? value_of(place) : std::byte{0}));
      ++place;
    });
    if (is_long) CHECK(place == before + 1);  // alone
  }
  CHECK(place == lengths.size());
  CHECK(messages == 4);
}

TEST_CASE("direct rounds: what is malformed is refused") {
  DirectRounds rounds(0, 2);
  rounds.end(kNumber);
  std::uint32_t fallen_back = 0;
  const auto message = [](std::uint64_t round, std::uint64_t what, std::size_t more) {
    Bytes bytes =
        Writer().put(0xffffffffU).put(kNumber).put(round).put(what).put(std::uint64_t{more}).take();
    bytes.resize(bytes.size() + (more + 15) / 16 * 16);
    return Message{1, bytes};
  };
  const auto receive = [&](const Message& said) {
    return rounds.receive(said.from, DirectRounds::Part(said.bytes), true, false, fallen_back);
  };
  CHECK(DirectRounds::is_direct(message(1, 0, 0)));
  CHECK_FALSE(DirectRounds::is_direct({1, Bytes(3, std::byte{0})}));
  CHECK_FALSE(DirectRounds::is_direct({1, Bytes(40, std::byte{0})}));
  CHECK_THROWS_AS(receive(message(1, 3, 0)), WireError);  // what it is
  CHECK_THROWS_AS(receive(message(1, 1, 4)), WireError);  // too long
  Message cut = message(1, 0, 0);
  cut.bytes.resize(20);
  CHECK_THROWS_AS(receive(cut), WireError);
  CHECK_FALSE(receive(message(1, 0, 8)));
  CHECK_THROWS_AS(receive(message(1, 0, 8)), WireError);  // twice
}

TEST_CASE(
    "direct rounds: one that the others have left behind says so, and contributes to none of those "
    "rounds") {
  Leaders leaders(2);
  // decided without the ranks of domain 1, which has still to hear of it
  for (int i = 0; i < 3; ++i) leaders[0].end(kNumber);
  leaders.promise(0);
  CHECK_FALSE(leaders.let_through(0, 1));
  CHECK_FALSE(leaders[1].may_promise(kNumber));
  CHECK(leaders.let_through(1, 0));
  for (int i = 0; i < 4; ++i) {
    CHECK_FALSE(leaders[1].may_promise(kNumber));
    leaders[1].end(kNumber);
  }
  CHECK(leaders[1].may_promise(kNumber));
}

// Whatever the order: every round ends in one way on all, or all take the long way, and nobody
// waits for ever.
TEST_CASE("direct rounds: in any order of messages each round ends alike everywhere") {
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 dice(seed);
    const int domains = 2 + static_cast<int>(dice() % 3);
    CAPTURE(seed);
    Leaders leaders(domains);
    const auto begin = DirectRounds::Clock::now();
    auto now = begin;
    struct Domain {
      bool went_long = false;  ///< in its round: it waits for the others to do so
      std::map<std::uint64_t, bool> ended_directly;
    };
    std::vector<Domain> state(static_cast<std::size_t>(domains));
    constexpr std::uint64_t kRounds = 12;
    const auto over = [&] {
      return std::all_of(leaders.rounds.begin(), leaders.rounds.end(),
                         [](const auto& one) { return one->rounds_over(kNumber) == kRounds; });
    };
    int steps = 0;
    for (; !over() && steps < 20000; ++steps) {
      const int domain = static_cast<int>(dice() % static_cast<unsigned>(domains));
      DirectRounds& own = leaders[domain];
      Domain& mine = state[static_cast<std::size_t>(domain)];
      const std::uint64_t round = own.rounds_over(kNumber);
      switch (dice() % 4) {
        case 0:  // its ranks have arrived
          if (round == kRounds || own.is_promised(kNumber) || mine.went_long) break;
          if (own.may_promise(kNumber) && dice() % 8 != 0) {
            leaders.promise(domain, now);
          } else {
            mine.went_long = true;
            own.go_long(kNumber);
          }
          break;
        case 1:
          now += DirectRounds::kPatience / 4;
          own.ask(now);
          break;
        default: {
          leaders.flush();
          const int from = static_cast<int>(dice() % static_cast<unsigned>(domains));
          if (from == domain || leaders.waiting(from, domain) == 0) break;
          if (leaders.let_through(from, domain)) {
            mine.went_long = true;
            own.go_long(kNumber);
          }
        }
      }
      if (is_complete(own)) {
        REQUIRE_FALSE(mine.went_long);
        mine.ended_directly[round] = true;
        own.end(kNumber);
      }
      // The long way: once all have said that they take it, it ends everywhere.
      const auto slowest =
          std::min_element(leaders.rounds.begin(), leaders.rounds.end(),
                           [](const auto& a, const auto& b) {
                             return a->rounds_over(kNumber) < b->rounds_over(kNumber);
                           })
              ->get()
              ->rounds_over(kNumber);
      const bool all_long =
          std::all_of(state.begin(), state.end(),
                      [](const Domain& one) { return one.went_long; }) &&
          std::all_of(leaders.rounds.begin(), leaders.rounds.end(),
                      [&](const auto& one) { return one->rounds_over(kNumber) == slowest; });
      if (all_long)
        for (int d = 0; d < domains; ++d) {
          state[static_cast<std::size_t>(d)].went_long = false;
          state[static_cast<std::size_t>(d)].ended_directly[slowest] = false;
          leaders[d].end(kNumber);
        }
    }
    REQUIRE(over());
    for (const auto& one : state) CHECK(one.ended_directly == state.front().ended_directly);
  }
}

}  // namespace hvd::test
