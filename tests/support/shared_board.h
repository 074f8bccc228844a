#pragma once
/// A board that this process sees and another one, which does something there and stays where it
/// is: to be stopped or killed.

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <new>
#include <span>
#include <utility>

#include "hvd/negotiation/board/board.h"

namespace hvd::test {

/// Of three ranks and four slots; the other process is that of index 1.
class SharedBoard {
 public:
  /// Returns when the other process has done `work`.
  explicit SharedBoard(const std::function<void(std::span<std::byte> block, Board& board)>& work) {
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
      board.begin_life();
      work(block_, board);
      char byte = 0;
      static_cast<void>(!::write(ends[1], &byte, 1));
      while (true) ::pause();
    }
    char byte = 0;
    ::close(ends[1]);
    const bool has_begun = ::read(ends[0], &byte, 1) == 1;
    ::close(ends[0]);
    if (!has_begun) throw std::bad_alloc();
  }
  ~SharedBoard() {
    kill(SIGKILL);
    ::munmap(block_.data(), block_.size());
  }
  SharedBoard(const SharedBoard&) = delete;
  SharedBoard& operator=(const SharedBoard&) = delete;

  void kill(int signal) {
    if (child_ <= 0) return;
    ::kill(child_, signal);
    if (signal == SIGKILL) ::waitpid(std::exchange(child_, 0), nullptr, 0);
  }
  [[nodiscard]] std::span<std::byte> block() const { return block_; }

 private:
  static constexpr int kRanks = 3;
  static constexpr std::uint32_t kSlots = 4;
  std::span<std::byte> block_;
  pid_t child_ = 0;
};

}  // namespace hvd::test
