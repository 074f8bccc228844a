// How long a rank looks before it sleeps.
#include "hvd/base/short_wait.h"

#include <doctest/doctest.h>

#include <algorithm>

namespace hvd {
namespace {

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
  CHECK(wait.until([&] { return ++looks == 301; }));  // after the short look
  CHECK(looks == 301);
}

TEST_CASE("long waits in vain make the next ones short, more and more of them, until one helps") {
  ShortWait wait(true);
  CHECK(looks_in_vain(wait) > 300);
  for (int i = 0; i < 2; ++i) CHECK(looks_in_vain(wait) == 300);
  CHECK(looks_in_vain(wait) > 300);
  for (int i = 0; i < 4; ++i) CHECK(looks_in_vain(wait) == 300);
  int looks = 0;
  CHECK(wait.until([&] { return ++looks == 301; }));
  CHECK(looks_in_vain(wait) > 300);
  for (int i = 0; i < 2; ++i) CHECK(looks_in_vain(wait) == 300);
  CHECK(looks_in_vain(wait) > 300);
}

TEST_CASE("there is an end to how many waits are short") {
  ShortWait wait(true);
  int most = 0;
  for (int i = 0, in_a_row = 0; i < 10000; ++i) {
    in_a_row = looks_in_vain(wait) == 300 ? in_a_row + 1 : 0;
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
  CHECK(wait.until([&] { return ++looks == 2; }));  // whatever the first offer took
  for (int i = 0; i < 1000; ++i) CHECK(looks_in_vain(wait) <= 21);
}

}  // namespace
}  // namespace hvd
