// What the arena gives back: to the system what is free, where it is told to; nothing at all in a
// world that has failed, as a rank that was stopped may still write there.
#include "ops/shm/memory/arena.h"

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "ops/shm/memory/overflow.h"
#include "ops/shm/memory/shared_memory.h"
#include "tests/support/engine_probe.h"
#include "tests/support/thread_world.h"

namespace hvd::test {

TEST_CASE(
    "arena: once the world has failed nothing is given back, and nothing more is handed out") {
  ThreadWorld world({.size = 2, .config = {}});
  std::size_t used = 0;
  std::byte* users = nullptr;
  world.run(
      [&](int rank, Engine& engine) {
        std::vector<float> values(4);
        const Submission submission = allreduce_of(values, "x", DataType::Float32);
        for (int i = 0; i < 4; ++i)
          if (!engine.small_calls().try_run(call_of(submission)))
            engine.wait(*engine.submit(submission, After::Wait));
        if (rank == 1) return EngineProbe::die(engine);
        users = world.arena(0).allocate(1000);
        used = world.arena(0).used_bytes();
        CHECK_THROWS_AS(
            engine.wait(*engine.submit(allreduce_of(values, "y", DataType::Float32), After::Wait)),
            RankFailed);
      },
      false);
  Arena& arena = world.arena(0);
  CHECK(EngineProbe::drop_repeated(world.engine(0)) == 1);
  CHECK(arena.free(users) == 0);
  CHECK(arena.used_bytes() >= used);
  CHECK(arena.try_allocate(64) == nullptr);
  std::string text;
  try {
    arena.allocate(64);
  } catch (const BackendError& error) {
    text = error.what();
  }
  CHECK(text == "shared memory: the world has failed");
}

TEST_CASE("arena: what is free goes back to the system, and what is used stays as it is") {
  constexpr std::size_t kBytes = 8 << 20;
  constexpr std::size_t kBlock = 1 << 20;
  const FileDescriptor file = make_shared_file("hvd-test", kBytes);
  const auto mapping = map_ticket(ticket_of(file, kBytes));
  const auto pages = [&] {
    struct stat status {};
    REQUIRE(::fstat(file.get(), &status) == 0);
    return static_cast<std::size_t>(status.st_blocks) * 512;
  };
  Arena arena(mapping->bytes());
  const std::size_t before = pages();
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(arena.allocate(kBlock));
    std::fill_n(blocks.back(), kBlock, std::byte{7});
  }
  CHECK(pages() == before + 4 * kBlock);
  arena.free(blocks[0]);
  arena.free(blocks[2]);
  CHECK(pages() == before + 4 * kBlock);
  arena.trim();
  CHECK(pages() == before + 2 * kBlock);
  for (const int kept : {1, 3})
    CHECK(std::all_of(blocks[kept], blocks[kept] + kBlock,
                      [](std::byte byte) { return byte == std::byte{7}; }));
  std::byte* const again = arena.allocate(kBlock);
  CHECK(again == blocks[0]);
  again[kBlock - 1] = std::byte{1};
  arena.free(blocks[1]);  // it was used when the arena was trimmed
  CHECK(pages() == before + kBlock + 4096);
}

TEST_CASE(
    "arena: what lies beyond it is not handed out a second time either, once the world has "
    "failed") {
  std::atomic<bool> failed{false};
  Overflow overflow({}, 0, [&] { return failed.load(); });
  const auto first = overflow.allocate(1000);
  overflow.free(first);
  CHECK(overflow.allocate(1000) == first);
  failed = true;
  overflow.free(first);
  CHECK(overflow.allocate(1000) != first);
}

}  // namespace hvd::test
