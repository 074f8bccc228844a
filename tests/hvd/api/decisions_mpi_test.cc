/// What ranks decide together: any(), rank_zero_first(), share_of_batch().

#include "hvd/decisions.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "hvd/hvd.h"
#include "tests/support/error_of.h"
#include "tests/support/running.h"

namespace hvd::test::decisions {
namespace {

/// What all ranks say, in rank order.
std::vector<std::int64_t> all_of(std::int64_t mine) {
  const auto gathered = allgather({&mine, DataType::Int64, {1}});
  const auto* const first = reinterpret_cast<const std::int64_t*>(gathered.data.data());
  return {first, first + size()};
}

TEST_CASE("any() is true on all ranks where one says so, and on none where none does") {
  const Running running;
  for (int yes = -1; yes < size(); ++yes) CHECK(any(rank() == yes) == (yes >= 0));
  CHECK(any(true));
  CHECK_FALSE(any(false));
}

TEST_CASE("any() of a process set asks its ranks alone") {
  const Running running;
  std::vector<int> others;
  for (int r = size() > 1 ? 1 : 0; r < size(); ++r) others.push_back(r);
  const ProcessSet set = add_process_set(others);
  if (set.included()) {
    CHECK(any(rank() == size() - 1, set));
    CHECK(any(rank() == 0, set) == (size() == 1));
  } else {
    CHECK(error_of<InvalidArgument>([&] { static_cast<void>(any(true, set)); }).find("any()") == 0);
    CHECK(error_of<InvalidArgument>([&] {
            rank_zero_first([] {}, {.process_set = set});
          }).find("rank_zero_first()") == 0);
    CHECK(error_of<InvalidArgument>([&] {
            static_cast<void>(share_of_batch(64, set));
          }).find("share_of_batch()") == 0);
  }
  remove_process_set(set);
}

TEST_CASE("early stopping: all ranks stop in the epoch in which any of them has had enough") {
  const Running running;
  int epoch = 0;
  while (!any(epoch == 3 + rank())) ++epoch;
  CHECK(epoch == 3);
}

TEST_CASE(
    "rank_zero_first() runs it on rank 0, then on the others, and returns what it returned here") {
  const Running running;
  for (const bool per_host : {false, true}) {
    CAPTURE(per_host);
    int calls = 0;
    const int mine = rank_zero_first(
        [&] {
          ++calls;
          return 10 + rank();
        },
        {.per_host = per_host});
    CHECK(calls == 1);
    CHECK(mine == 10 + rank());
    const auto moved = rank_zero_first([] { return std::make_unique<int>(rank()); });
    CHECK(*moved == rank());
    int place = 5;
    int& same = rank_zero_first([&]() -> int& { return place; });
    CHECK(&same == &place);
  }
}

TEST_CASE("rank_zero_first() lets nobody begin before rank 0 has returned") {
  const Running running;
  std::int64_t number = ::getpid();
  broadcast({&number, DataType::Int64, {1}}, {.root_rank = 0});
  const auto file =
      std::filesystem::temp_directory_path() / ("rank_zero_first." + std::to_string(number));
  const bool found = rank_zero_first([&] {
    if (rank() != 0) return std::filesystem::exists(file);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // time for others to be too early
    return std::ofstream(file).good();
  });
  CHECK(found);
  barrier();
  std::filesystem::remove(file);
}

TEST_CASE(
    "rank_zero_first(): what rank 0 throws is RankFailed on all others, which do not run it; the "
    "library goes on") {
  const Running running;
  for (const bool per_host : {false, true}) {
    int calls = 0;
    const auto call = [&] {
      rank_zero_first(
          [&] {
            ++calls;
            if (rank() == 0) throw std::runtime_error("no such file: data.bin");
          },
          {.per_host = per_host});
    };
    if (rank() == 0) {
      CHECK(error_of<std::runtime_error>(call) == "no such file: data.bin");
    } else {
      const std::string text = error_of<RankFailed>(call);
      CHECK(text == "rank_zero_first(): rank 0 threw: no such file: data.bin");
      CHECK(calls == (per_host && local_rank() == 0 ? 1 : 0));  // one of each host goes first
    }
    CHECK(any(true));
  }
}

TEST_CASE(
    "rank_zero_first(): what a later rank throws is its own, and what is no std::exception is told "
    "as that") {
  const Running running;
  const auto late = [] {
    rank_zero_first([] {
      if (rank() != 0) throw std::logic_error("mine");
    });
  };
  CHECK(error_of<std::logic_error>(late) == (rank() == 0 ? "(no error)" : "mine"));
  bool caught = false;
  try {
    rank_zero_first([] {
      if (rank() == 0) throw 7;
    });
  } catch (const int number) {
    caught = number == 7;
  } catch (const RankFailed& error) {
    caught = std::string(error.what()).find("no std::exception") != std::string::npos;
  }
  CHECK(caught);
  CHECK_FALSE(any(false));
}

TEST_CASE(
    "shares of a batch add up to it, differ by one at most, and the first ranks have more; too "
    "small a batch is refused on all") {
  const Running running;
  for (const std::int64_t items : {1, 2, 3, 4, 5, 7, 63, 64}) {
    CAPTURE(items);
    if (items < size()) {
      CHECK(error_of<InvalidArgument>([&] {
              static_cast<void>(share_of_batch(items));
            }).find("share_of_batch(") == 0);
      continue;
    }
    const auto shares = all_of(static_cast<std::int64_t>(share_of_batch(items)));
    std::int64_t sum = 0;
    for (std::size_t r = 0; r < shares.size(); ++r) {
      sum += shares[r];
      CHECK(shares[r] >= 1);
      CHECK(shares.front() - shares[r] <= 1);
      if (r > 0) CHECK(shares[r] <= shares[r - 1]);
    }
    CHECK(sum == items);
  }
  for (const std::int64_t items : {0, -4})
    CHECK(error_of<InvalidArgument>([&] {
            static_cast<void>(share_of_batch(items));
          }).find("each needs one") != std::string::npos);
}

}  // namespace
}  // namespace hvd::test::decisions
