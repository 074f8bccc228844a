// The lock of the board when its owner dies or is stopped.
#include <doctest/doctest.h>

#include <chrono>
#include <span>
#include <string>
#include <thread>

#include "hvd/negotiation/board/board.h"
#include "tests/support/error_of.h"
#include "tests/support/shared_board.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

void take_lock(std::span<std::byte> /*block*/, Board& board) { board.lock(); }

}  // namespace

TEST_CASE("board: a rank that died with the lock is named, and the lock is had") {
  const Watchdog watchdog("a board", 20s);
  SharedBoard shared(take_lock);
  Board board(shared.block(), 0);
  board.set_patience({{4, 7, 9}, {}, {}});
  shared.kill(SIGKILL);
  board.lock();
  CHECK(board.failed());
  CHECK(board.failure().code() == Status::Code::RankFailed);
  CHECK(board.failure().text().starts_with("rank 7 died"));
  board.unlock();
  board.lock();
  board.unlock();
}

TEST_CASE(
    "board: a rank that is stopped with the lock is told of as a stall, and ends the world where "
    "that is asked for") {
  const Watchdog watchdog("a board", 20s);
  SharedBoard shared(take_lock);
  shared.kill(SIGSTOP);
  Board board(shared.block(), 0);
  board.set_patience({{4, 7, 9}, {}, 1s});
  const std::string text = error_of<StallTimeout>([&] { board.lock(); });
  CAPTURE(text);
  CHECK(text.starts_with("rank 7 has kept the others of its host from going on for 1 s"));
  CHECK(board.failure().code() == Status::Code::StallTimeout);
  // The third rank does not wait for its own patience to end: the world has failed.
  Board third(shared.block(), 2);
  CHECK_THROWS_AS(third.lock(), StallTimeout);
}

TEST_CASE("board: one that goes on after having been stopped leaves nothing behind") {
  const Watchdog watchdog("a board", 20s);
  SharedBoard shared(take_lock);
  shared.kill(SIGSTOP);
  Board board(shared.block(), 2);
  std::thread later([&] {
    std::this_thread::sleep_for(400ms);
    shared.kill(SIGKILL);  // which counts as its death, but not as a stall
  });
  board.lock();
  later.join();
  CHECK(board.failure().code() == Status::Code::RankFailed);
  CHECK(board.failure().text().starts_with("rank 1 died"));
  board.unlock();
}

}  // namespace hvd::test
