// How long a rank looks before it sleeps.
#include "hvd/base/waits.h"

#include <doctest/doctest.h>

#include <algorithm>

namespace hvd {
namespace {

/// How often a short wait looks: before each pause, after the last one, and once more at its end.
constexpr int kShort = waits::kFirst.looks + 2;

/// How often a wait that is in vain looks.
int looks_in_vain(ShortWait& wait) {
  int looks = 0;
  CHECK(!wait.until([&] { return ++looks < 0; }));
  return looks;
}

TEST_CASE("a wait ends with what it waits for") {
  ShortWait wait(true);
  int looks = 0;
  CHECK(wait.until([&] { return ++looks == 1; }));
  CHECK(looks == 1);
  looks = 0;
  CHECK(wait.until([&] { return ++looks == kShort + 1; }));  // after the short look
  CHECK(looks == kShort + 1);
}

TEST_CASE("long waits in vain make the next ones short, more and more of them, until one helps") {
  ShortWait wait(true);
  CHECK(looks_in_vain(wait) > kShort);
  for (int i = 0; i < 2; ++i) CHECK(looks_in_vain(wait) == kShort);
  CHECK(looks_in_vain(wait) > kShort);
  for (int i = 0; i < 4; ++i) CHECK(looks_in_vain(wait) == kShort);
  int looks = 0;
  CHECK(wait.until([&] { return ++looks == kShort + 1; }));
  CHECK(looks_in_vain(wait) > kShort);
  for (int i = 0; i < 2; ++i) CHECK(looks_in_vain(wait) == kShort);
  CHECK(looks_in_vain(wait) > kShort);
}

TEST_CASE("there is an end to how many waits are short") {
  ShortWait wait(true);
  int most = 0;
  for (int i = 0, in_a_row = 0; i < 10000; ++i) {
    in_a_row = looks_in_vain(wait) == kShort ? in_a_row + 1 : 0;
    most = std::max(most, in_a_row);
  }
  CHECK(most == 1024);
}

TEST_CASE("ranks that share cores offer theirs a few times") {
  ShortWait wait(false);
  int looks = 0;
  CHECK(wait.until([&] { return ++looks == 1; }));
  CHECK(looks == 1);
  looks = 0;
  CHECK(wait.until([&] { return ++looks == 4; }));  // whatever the first offer took
  for (int i = 0; i < 1000; ++i) CHECK(looks_in_vain(wait) <= 24);
}

/// How often a plan pauses after looks in vain.
int pauses(const WaitPlan& plan, bool has_core) {
  Pauses pauses(has_core);
  int count = 0;
  while (pauses.pause(plan)) ++count;
  return count;
}

TEST_CASE("a plan has so many looks, with a core or with what ranks share") {
  const WaitPlan plan{.looks = 7, .looks_for_offer = 3, .offers = 4};
  CHECK(pauses(plan, true) == 7);
  CHECK(pauses(plan, false) == 4);
  CHECK(pauses(waits::kPieceInVain, true) == 0);
  CHECK(pauses(waits::kPieceInVain, false) <= 2);
  // that limit is of offers
  CHECK(pauses({.looks = 5, .longest = std::chrono::microseconds(1)}, true) == 5);
}

TEST_CASE("a plan with a time lasts so long, and begins again when something has happened") {
  const WaitPlan plan{.time = std::chrono::microseconds(2000), .offers = 3};
  const auto begin = std::chrono::steady_clock::now();
  CHECK(pauses(plan, true) > 0);
  CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::microseconds(2000));
  CHECK(pauses(plan, false) == 3);
  Pauses again(false);
  for (int i = 0; i < 10; ++i) {
    CHECK(again.pause(plan));
    again.again();
  }
}

TEST_CASE("waiting until something ends with it, or with the plan") {
  int looks = 0;
  CHECK(wait_until([&] { return ++looks == 3; }, waits::kTurn, true));
  CHECK(looks == 3);
  looks = 0;
  CHECK(!wait_until([&] { return ++looks < 0; }, waits::kTurn, true));
  CHECK(looks == waits::kTurn.looks + 2);  // once more at the end
}

}  // namespace
}  // namespace hvd
