// What ranks say to each other beside the collectives: how NCCL's communicators are made known.
#include <doctest/doctest.h>

#include <numeric>
#include <vector>

#include "hvd/errors.h"
#include "ops/bootstrap.h"
#include "tests/support/mpi_world.h"

namespace hvd::test {
namespace {

const auto kNever = [] { return false; };

Bytes bytes_of(int rank, std::size_t count) {
  Bytes made(count);
  for (std::size_t i = 0; i < count; ++i)
    made[i] = static_cast<std::byte>(rank * 31 + static_cast<int>(i) * 7 + 1);
  return made;
}

}  // namespace

TEST_CASE("bootstrap: the first of some ranks gives to the others, however much it is") {
  const Bootstrap bootstrap;
  const int size = mpi_size();
  for (int first = 0; first < size; ++first) {
    for (int last = first; last < size; ++last) {
      std::vector<int> ranks(static_cast<std::size_t>(last - first + 1));
      std::iota(ranks.begin(), ranks.end(), first);
      if (mpi_rank() < first || mpi_rank() > last) continue;
      CAPTURE(first);
      CAPTURE(last);
      // One after the other under one tag, of different sizes: an id, nothing, and the words of an
      // error.
      for (const std::size_t count : {129u, 0u, 71u}) {
        const Bytes mine = mpi_rank() == first ? bytes_of(first, count) : Bytes();
        CHECK(bootstrap.give_from_first(ranks, mine, last, kNever) == bytes_of(first, count));
      }
    }
  }
}

TEST_CASE("bootstrap: who gives something that nobody takes ends when it is told to") {
  const Bootstrap bootstrap;
  if (mpi_size() == 1) return;
  const std::vector<int> ranks{0, mpi_size() - 1};
  // more than MPI sends before it is asked for
  constexpr std::size_t kLarge = std::size_t{8} << 20;
  if (mpi_rank() == 0) {
    int asked = 0;
    CHECK_THROWS_AS(static_cast<void>(bootstrap.give_from_first(ranks, bytes_of(0, kLarge), 98,
                                                                [&] { return ++asked == 300; })),
                    BackendError);
    CHECK(asked == 300);
  }
  bootstrap.barrier();
  // What was begun can still be taken, unharmed.
  if (mpi_rank() == ranks[1])
    CHECK(bootstrap.give_from_first(ranks, {}, 98, kNever) == bytes_of(0, kLarge));
  bootstrap.barrier();
}

TEST_CASE("bootstrap: who waits for a rank that gives nothing ends when it is told to") {
  const Bootstrap bootstrap;
  if (mpi_rank() != 0) {
    int asked = 0;
    CHECK_THROWS_AS(static_cast<void>(bootstrap.give_from_first({0, mpi_rank()}, {}, 99,
                                                                [&] { return ++asked == 300; })),
                    BackendError);
    CHECK(asked == 300);
  }
  bootstrap.barrier();
}

}  // namespace hvd::test
