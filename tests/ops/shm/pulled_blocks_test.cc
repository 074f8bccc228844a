/// Blocks that are lent for a round: when they are lent again, how many there are, and what is
/// given back.

#include "ops/shm/pulled_blocks.h"

#include <doctest/doctest.h>

#include <array>
#include <memory>
#include <vector>

namespace hvd::test {
namespace {

/// The memory of one rank.
struct Lender {
  std::vector<std::byte> bytes = std::vector<std::byte>(std::size_t{96} << 20);
  std::shared_ptr<Arena> arena = std::make_shared<Arena>(std::span(bytes.data(), bytes.size()));
  DomainMemory memory{{}, {std::span(bytes.data(), bytes.size())}, {}, {}, false};
  Staging staging{memory, arena, 0};
  bool is_over = false;
  PulledBlocks blocks{staging, [this](std::uint64_t) { return is_over; }};

  void read(std::uint64_t location) {
    const std::array<const std::byte*, 1> read{staging.address(0, location)};
    PulledBlocks::finish_reading(read);
  }
};

}  // namespace

TEST_CASE("pulled blocks: a block is lent again when all have read it, and not before") {
  Lender lender;
  const auto first = *lender.blocks.lend(100'000);
  const auto second = *lender.blocks.lend(100'000);
  CHECK(first != second);
  CHECK(Staging::is_kept(first));
  lender.blocks.take_back(first, 2);
  CHECK(*lender.blocks.lend(100'000) != first);
  lender.read(first);
  CHECK(*lender.blocks.lend(100'000) != first);
  lender.read(first);
  CHECK(*lender.blocks.lend(120'000) == first);  // of that size, rounded
  lender.blocks.take_back(first, 1);
  CHECK(*lender.blocks.lend(100'000) != first);  // whoever read it before does not count
  lender.read(first);
  CHECK(*lender.blocks.lend(40'000) != first);
  lender.blocks.take_back(second, 0);
  CHECK(*lender.blocks.lend(100'000) == second);
}

TEST_CASE("pulled blocks: what a batch reads from is lent again when that is over") {
  Lender lender;
  const auto first = *lender.blocks.lend(50'000);
  lender.staging.release_later(7, first);
  lender.blocks.take_back(first, 0);
  CHECK(*lender.blocks.lend(50'000) != first);
  lender.blocks.trim();
  lender.is_over = true;
  CHECK(*lender.blocks.lend(50'000) == first);
}

TEST_CASE(
    "pulled blocks: no more than so many bytes; those of other sizes make room, but not what "
    "somebody reads") {
  Lender lender;
  const std::size_t bytes = PulledBlocks::kMostBytes / 8;
  std::vector<std::uint64_t> lent;
  for (int i = 0; i < 8; ++i) lent.push_back(*lender.blocks.lend(bytes));
  CHECK_FALSE(lender.blocks.lend(bytes));
  CHECK_FALSE(lender.blocks.lend(1));
  for (const auto location : lent) lender.blocks.take_back(location, 1);
  CHECK_FALSE(lender.blocks.lend(1));
  lender.read(lent[3]);
  CHECK(lender.blocks.lend(1));
  CHECK_FALSE(lender.blocks.lend(bytes));
  for (const auto location : lent)
    if (location != lent[3]) lender.read(location);
  const std::size_t before = lender.arena->used_bytes();
  lender.blocks.trim();
  CHECK(lender.arena->used_bytes() < before - 6 * bytes);
}

}  // namespace hvd::test
