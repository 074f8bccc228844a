// The lock of the board when its owner dies or is stopped.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <new>
#include <span>
#include <string>

#include "hvd/negotiation/board.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

constexpr int kRanks = 3;
constexpr std::uint32_t kSlots = 4;

/// A board that two processes see; the other one, index 1, takes the lock and keeps it.
class SharedBoard {
 public:
  SharedBoard() {
    const std::size_t bytes = Board::bytes_needed(kRanks, kSlots);
    void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    block_ = {static_cast<std::byte*>(base), bytes};
    Board::format(block_, kRanks, kSlots);
    int ends[2];
    if (::pipe(ends) != 0) throw std::bad_alloc();
    child_ = ::fork();
    if (child_ == 0) {
      Board board(block_, 1);
      board.lock();
      char byte = 0;
      static_cast<void>(!::write(ends[1], &byte, 1));
      while (true) ::pause();
    }
    char byte = 0;
    REQUIRE(::read(ends[0], &byte, 1) == 1);
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~SharedBoard() {
    kill(SIGKILL);
    ::munmap(block_.data(), block_.size());
  }
  void kill(int signal) {
    if (child_ <= 0) return;
    ::kill(child_, signal);
    if (signal == SIGKILL) ::waitpid(std::exchange(child_, 0), nullptr, 0);
  }
  [[nodiscard]] std::span<std::byte> block() const { return block_; }

 private:
  std::span<std::byte> block_;
  pid_t child_ = 0;
};

}  // namespace

TEST_CASE("board: a rank that died with the lock is named, and the lock is had") {
  const Watchdog watchdog("a board", 20s);
  SharedBoard shared;
  Board board(shared.block(), 0);
  board.set_lock_patience({{4, 7, 9}, {}, {}});
  shared.kill(SIGKILL);
  board.lock();
  CHECK(board.failed());
  CHECK(board.failure().code() == Status::Code::RankFailed);
  CHECK(board.failure().text().starts_with("rank 7 died"));
  board.unlock();
  board.lock();
  board.unlock();
}

TEST_CASE("board: a rank that is stopped with the lock is told of as a stall, and ends the world where that is asked for") {
  const Watchdog watchdog("a board", 20s);
  SharedBoard shared;
  shared.kill(SIGSTOP);
  Board board(shared.block(), 0);
  board.set_lock_patience({{4, 7, 9}, {}, 1s});
  std::string text;
  try {
    board.lock();
  } catch (const StallTimeout& error) {
    text = error.what();
  }
  CAPTURE(text);
  CHECK(text.starts_with("rank 7 has kept the others of its host from going on for 1 s"));
  CHECK(board.failure().code() == Status::Code::StallTimeout);
  // The third rank does not wait for its own patience to end: the world has failed.
  Board third(shared.block(), 2);
  CHECK_THROWS_AS(third.lock(), StallTimeout);
}

TEST_CASE("board: one that goes on after having been stopped leaves nothing behind") {
  const Watchdog watchdog("a board", 20s);
  SharedBoard shared;
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
