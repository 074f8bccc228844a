/// ChildWatch: a child is known to be gone when it has ended or runs another program, and not
/// before.
#include "hvd/base/child_watch.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

/// Children of a sanitizer's process may not do more than this.
pid_t child_that_waits(int for_end_of) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  char byte = 0;
  static_cast<void>(::read(for_end_of, &byte, 1));
  ::_exit(0);
}

}  // namespace

TEST_CASE("child watch: children of forks that came meanwhile, and no others") {
  auto& watch = ChildWatch::instance();
  const auto before = watch.begin();
  CHECK(watch.end() == before);
  CHECK(watch.are_gone(before, before));

  const pid_t early = ::fork();  // nothing is in use
  if (early == 0) ::_exit(0);
  ::waitpid(early, nullptr, 0);

  const auto born = watch.begin();
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t lives = child_that_waits(ends[0]);
  const pid_t ended = ::fork();
  if (ended == 0) ::_exit(0);
  ::waitpid(ended, nullptr, 0);
  const auto last = watch.end();
  CHECK(last == born + 2);
  CHECK_FALSE(watch.are_gone(born, last));
  CHECK_FALSE(watch.are_gone(born, born + 1));
  CHECK(watch.are_gone(born + 1, last));
  REQUIRE(::write(ends[1], "x", 1) == 1);
  ::waitpid(lives, nullptr, 0);
  CHECK(watch.are_gone(born, last));
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_CASE("child watch: a child that runs another program sees nothing any more") {
  auto& watch = ChildWatch::instance();
  const auto born = watch.begin();
  const pid_t child = ::fork();
  if (child == 0) {
    ::execlp("sleep", "sleep", "60", nullptr);
    ::_exit(1);
  }
  const auto last = watch.end();
  CHECK(last == born + 1);
  // the test's time limit ends it
  while (!watch.are_gone(born, last)) std::this_thread::sleep_for(1ms);
  CHECK(::kill(child, SIGKILL) == 0);
  ::waitpid(child, nullptr, 0);
}

}  // namespace hvd::test
