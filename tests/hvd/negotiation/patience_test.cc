// Waits for a rank that dies or is stopped where the others of its domain need it to go on: while
// it ends a round, and with the log unread.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "hvd/negotiation/board/board.h"
#include "tests/support/error_of.h"
#include "tests/support/shared_board.h"
#include "tests/support/stderr_text.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

/// The rank gives the results of a round in slot 0, in which all three have arrived, and does not
/// come to the end of it.
void stay_in_round(std::span<std::byte> block, Board& board) {
  for (const int other : {0, 2}) Board(block, other).rounds().arrive(0, 0);
  const int all[] = {0, 1, 2};
  board.rounds().arrive_last(0, 0, 3);
  board.rounds().give_results(0, all);
}

/// What of the board of index 0 waits for the end of the round.
struct Waiter {
  const char* what;
  std::function<void(Board& board)> wait;
};
const Waiter kWaiters[] = {
    {"an arrival", [](Board& board) { board.rounds().arrive(0, 0); }},
    {"a location", [](Board& board) { board.rounds().set_location(0, 7); }},
    {"the end of a slot",
     [](Board& board) {
       const BoardLock lock(board);
       board.rounds().void_slot(0, 1);
     }},
    {"a slot that is closed",
     [](Board& board) {
       const BoardLock lock(board);
       board.rounds().close_slot(0);
     }},
};

}  // namespace

TEST_CASE("patience: a rank that died while it ended a round is named, whatever waits for it") {
  for (const auto& [what, wait] : kWaiters) {
    CAPTURE(what);
    const Watchdog watchdog("a board", 20s);
    SharedBoard shared(stay_in_round);
    shared.kill(SIGKILL);
    Board board(shared.block(), 0);
    board.set_patience({{4, 7, 9}, {}, {}});
    CHECK(board.rounds().has_result(0));
    wait(board);
    CHECK(board.failure().code() == Status::Code::RankFailed);
    CHECK(board.failure().text().starts_with("rank 7 died"));
  }
}

TEST_CASE(
    "patience: a rank that is stopped while it ends a round is told of as a stall, whatever waits "
    "for it") {
  for (const auto& [what, wait] : kWaiters) {
    CAPTURE(what);
    const Watchdog watchdog("a board", 20s);
    SharedBoard shared(stay_in_round);
    shared.kill(SIGSTOP);
    Board board(shared.block(), 0);
    board.set_patience({{4, 7, 9}, {}, 1s});
    wait(board);
    CHECK(board.failure().code() == Status::Code::StallTimeout);
    CHECK(board.failure().text().starts_with(
        "rank 7 has kept the others of its host from going on for "));
  }
}

TEST_CASE(
    "patience: a rank that is stopped is warned of again and again where the world is not to end "
    "for it") {
  const Watchdog watchdog("a board", 20s);
  SharedBoard shared(stay_in_round);
  shared.kill(SIGSTOP);
  Board board(shared.block(), 0);
  board.set_patience({{4, 7, 9}, 200ms, {}});
  std::string text;
  {
    const StderrText said;
    std::jthread until_warned([&] {
      while (std::ranges::count(said.get(), '\n') < 2) std::this_thread::sleep_for(20ms);
      shared.kill(SIGKILL);  // which ends the wait
    });
    board.rounds().arrive(0, 0);
    until_warned.join();
    text = said.get();
  }
  CAPTURE(text);
  CHECK(
      text.starts_with("hvd: warning: rank 7 has kept the others of its host from going on for "));
  CHECK(board.failure().code() == Status::Code::RankFailed);
}

TEST_CASE("patience: who waits for the lock names the rank that the lock's owner waits for") {
  const Watchdog watchdog("a board", 20s);
  SharedBoard shared(stay_in_round);
  shared.kill(SIGSTOP);
  std::atomic<bool> has_lock{false};
  std::jthread owner([&] {
    Board board(shared.block(), 0);
    const BoardLock lock(board);
    has_lock = true;
    board.rounds().void_slot(0, 1);
  });
  while (!has_lock) std::this_thread::yield();
  Board board(shared.block(), 2);
  board.set_patience({{4, 7, 9}, {}, 1s});
  const std::string text = error_of<StallTimeout>([&] { board.lock(); });
  CAPTURE(text);
  CHECK(text.starts_with("rank 7 has kept"));
}

TEST_CASE("patience: a rank that goes on after all has kept nobody for good") {
  const Watchdog watchdog("a board", 20s);
  std::vector<std::byte> memory(Board::bytes_needed(2, 1) + 64);
  void* base = memory.data();
  std::size_t space = memory.size();
  const std::span<std::byte> block{
      static_cast<std::byte*>(std::align(64, Board::bytes_needed(2, 1), base, space)), space};
  Board::format(block, 2, 1);
  Board slow(block, 1);
  Board board(block, 0);
  board.set_patience({{4, 7}, {}, 20s});
  CHECK(board.rounds().arrive(0, 0) == 1);
  CHECK(slow.rounds().arrive_last(0, 0, 2));
  CHECK(board.rounds().claimant(0) == 1);
  std::jthread later([&] {
    std::this_thread::sleep_for(200ms);
    slow.rounds().reset_arrivals(0, 1);
  });
  CHECK(board.rounds().arrive(0, 0) == 1);
  CHECK(board.rounds().claimant(0) == Board::kNobody);
  CHECK_FALSE(board.failed());
}

}  // namespace hvd::test
