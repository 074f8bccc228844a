/// Functions that are called by the one thread of the process: in order, and in no process that was
/// forked.

#include "hvd/base/callback_thread.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <set>
#include <thread>
#include <utility>

#include "tests/support/sanitized.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;
using Left = std::shared_ptr<std::atomic<std::uint64_t>>;

void post_all(const Left& left, std::vector<std::function<void()>> functions,
              std::shared_ptr<void> kept = nullptr) {
  auto callbacks = std::make_shared<Callbacks>();
  *left += functions.size();
  callbacks->functions = std::move(functions);
  callbacks->kept = std::move(kept);
  callbacks->left = left;
  CallbackThread::start();
  CallbackThread::post(std::move(callbacks));
}

}  // namespace

TEST_CASE(
    "callbacks are called one after the other by one thread, in the order in which they were "
    "posted") {
  const auto left = std::make_shared<std::atomic<std::uint64_t>>(0);
  std::vector<int> order;
  std::set<std::thread::id> threads;
  const auto note = [&](int what) {
    return [&order, &threads, what] {
      order.push_back(what);
      threads.insert(std::this_thread::get_id());
      CHECK(CallbackThread::is_here());
    };
  };
  std::vector<int> expected;
  for (int i = 0; i < 300; i += 3) {
    post_all(left, {note(i), note(i + 1)});
    post_all(left, {note(i + 2)});
    expected.insert(expected.end(), {i, i + 1, i + 2});
  }
  REQUIRE(CallbackThread::wait_until_called(*left, 60s));
  CHECK(order == expected);
  CHECK(threads.size() == 1);
  CHECK(!threads.contains(std::this_thread::get_id()));
  CHECK(!CallbackThread::is_here());
}

TEST_CASE(
    "what callbacks own ends in their thread before they count as called, and what is kept for "
    "them after all of them") {
  const auto left = std::make_shared<std::atomic<std::uint64_t>>(0);
  std::vector<char> order;
  const auto owner = [&order](char name) {
    return std::shared_ptr<void>(nullptr, [&order, name](void*) {
      order.push_back(CallbackThread::is_here() ? name : '!');
    });
  };
  const auto function = [&](char name) {
    return [&order, name, owned = owner(name)] { order.push_back('('); };
  };
  // moved: copies of a braced list would end here, after the call
  std::vector<std::function<void()>> functions;
  functions.emplace_back(function('a'));
  functions.emplace_back(function('b'));
  post_all(left, std::move(functions), owner('k'));
  REQUIRE(CallbackThread::wait_until_called(*left, 60s));
  CHECK(std::string(order.begin(), order.end()) == "(a(bk");
}

TEST_CASE(
    "callbacks that are not called yet are waited for as long as was said, and never by their own "
    "thread") {
  const auto left = std::make_shared<std::atomic<std::uint64_t>>(0);
  std::promise<void> go;
  bool waited = true;
  post_all(left, {[&] { waited = CallbackThread::wait_until_called(*left, 60s); },
                  [&] { go.get_future().wait(); }});
  CHECK(!CallbackThread::wait_until_called(*left, 1ms));
  go.set_value();
  CHECK(CallbackThread::wait_until_called(*left, 60s));
  CHECK(!waited);
}

TEST_CASE(
    "a process that was forked calls none of its parent's callbacks, and has a thread for its "
    "own") {
  if (kSanitized) return;  // which do not like fork()
  const auto left = std::make_shared<std::atomic<std::uint64_t>>(0);
  std::promise<void> begun, go;
  std::atomic<int> called{0};
  post_all(left, {[&] {
             begun.set_value();
             go.get_future().wait();
             ++called;
           }});
  post_all(left, {[&] { ++called; }});
  begun.get_future().wait();
  const pid_t child = ::fork();
  if (child == 0) {
    const auto own = std::make_shared<std::atomic<std::uint64_t>>(0);
    bool here = false;
    post_all(own, {[&] { here = CallbackThread::is_here(); }});
    const bool was_called = CallbackThread::wait_until_called(*own, 60s);
    ::_exit(was_called && here && called == 0 && *left == 2 ? 0 : 1);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  go.set_value();
  CHECK(CallbackThread::wait_until_called(*left, 60s));
  CHECK(called == 2);
}

TEST_CASE("a callback that forks goes on in the parent alone") {
  if (kSanitized) return;
  const auto left = std::make_shared<std::atomic<std::uint64_t>>(0);
  std::array<int, 2> line{};
  REQUIRE(::pipe(line.data()) == 0);
  pid_t child = -1;
  post_all(left,
           {[&] { child = ::fork(); }, [&] { static_cast<void>(!::write(line[1], "x", 1)); }});
  while (child < 0) std::this_thread::sleep_for(1ms);
  REQUIRE(::waitpid(child, nullptr, 0) == child);  // its only thread has ended
  CHECK(CallbackThread::wait_until_called(*left, 60s));
  ::close(line[1]);
  std::array<char, 8> text{};
  CHECK(::read(line[0], text.data(), text.size()) == 1);
  ::close(line[0]);
}

}  // namespace hvd::test
