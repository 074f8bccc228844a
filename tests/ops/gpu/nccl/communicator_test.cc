// What ends a wait inside a library: a failed world, and a rank that has died, which nobody else
// finds.
#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "ops/gpu/nccl/nccl_backend.h"

namespace hvd::gpu::test {

TEST_CASE(
    "lost ranks: who waits with the turn finds a rank that has died, names it, and finds what "
    "others say") {
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> memory(Board::bytes_needed(3, 16) / sizeof(Line) + 1);
  const std::span block = std::as_writable_bytes(std::span(memory));
  Board::format(block, 3, 16);
  Board own(block, 0), others(block, 1);
  std::thread([&] { own.begin_life(), std::this_thread::yield(), own.end_life(); }).join();
  for (Board* const board : {&own, &others}) board->set_patience({{4, 7, 9}, {}, {}});
  const auto over = world_has_failed(own);
  CHECK_FALSE(over());
  std::thread([&] { Board(block, 2).begin_life(); }).join();  // ends without a word
  const auto start = std::chrono::steady_clock::now();
  bool found = false;
  while (!found && std::chrono::steady_clock::now() - start < std::chrono::seconds(60))
    found = over();
  REQUIRE(found);
  CHECK(own.failure().code() == Status::Code::RankFailed);
  CHECK(own.failure().text().find("rank 9 died") != std::string::npos);
  CHECK(over());
  CHECK(world_has_failed(others)());
  CHECK(others.failure().text() == own.failure().text());
}

}  // namespace hvd::gpu::test
