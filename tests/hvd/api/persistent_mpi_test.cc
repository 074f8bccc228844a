/// Persistent operations on raw buffers: that each start gives what the plain form gives, whichever
/// way it goes, and what misuse is told.

#include "hvd/api/persistent.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/running.h"

namespace hvd::test {
namespace {

using Ints = std::vector<std::int32_t>;
constexpr std::size_t kSizes[] = {0, 1, 16384, 2 << 20};  // elements: none, 4 B, 64 KiB, 8 MiB
// from the third start on a small one takes the fast path
constexpr int kRounds = 5;

Buffer buffer_of(Ints& values, std::int64_t width = 1) {
  return {values.data(),
          DataType::Int32,
          {static_cast<std::int64_t>(values.size()) / width, width},
          {}};
}
std::int32_t value(int rank, std::size_t i, int round) {
  return static_cast<std::int32_t>(1000 * rank + 7 * round + static_cast<int>(i % 13));
}
void fill(Ints& values, int round, int of = rank()) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = value(of, i, round);
}
Ints filled(std::size_t count, int round, int of) {
  Ints values(count);
  fill(values, round, of);
  return values;
}
Ints summed(std::size_t count, int round) {
  Ints sums(count);
  for (int of = 0; of < size(); ++of)
    for (std::size_t i = 0; i < count; ++i) sums[i] += value(of, i, round);
  return sums;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("persistent: every operation and size, started again and again") {
  in_both_worlds([] {
    const auto n = static_cast<std::size_t>(size());
    const auto self = static_cast<std::size_t>(rank());
    for (const std::size_t count : kSizes) {
      CAPTURE(count);
      Ints reduced(count), apart(count), sent(count), mine(count), all(count * n), even(count * n),
          exchanged(count * n), own(count);
      auto in_place = allreduce_init(buffer_of(reduced), {.name = "in place", .op = ReduceOp::Sum});
      auto reduce = allreduce_init(buffer_of(mine), buffer_of(apart), {.op = ReduceOp::Sum});
      auto send = broadcast_init(buffer_of(sent), {.root_rank = size() - 1});
      auto gather = allgather_init(buffer_of(all), buffer_of(mine));
      auto exchange = alltoall_init(buffer_of(exchanged), buffer_of(even));
      auto scatter = reducescatter_init(buffer_of(own), buffer_of(even), {.op = ReduceOp::Sum});
      CHECK(in_place.done());
      in_place.wait();  // nothing is under way
      for (int round = 0; round < kRounds; ++round) {
        fill(reduced, round);
        fill(mine, round);
        fill(sent, round);
        fill(even, round);
        in_place.start();
        reduce.start();
        send.start();
        gather.start();
        exchange.start();
        scatter.start();
        while (!gather.done()) continue;
        gather.wait();
        scatter.wait();
        CHECK(exchange.wait() == std::vector<std::int64_t>(n, static_cast<std::int64_t>(count)));
        send.wait();
        reduce.wait();
        in_place.wait();
        const Ints whole = summed(count, round);
        const Ints sums = summed(count * n, round);
        CHECK(reduced == whole);
        CHECK(apart == whole);
        CHECK(sent == filled(count, round, size() - 1));
        Ints gathered, received;
        for (std::size_t of = 0; of < n; ++of) {
          const Ints its = filled(count * n, round, static_cast<int>(of));
          gathered.insert(gathered.end(), its.begin(),
                          its.begin() + static_cast<std::ptrdiff_t>(count));
          const auto part = its.begin() + static_cast<std::ptrdiff_t>(self * count);
          received.insert(received.end(), part, part + static_cast<std::ptrdiff_t>(count));
        }
        CHECK(all == gathered);
        CHECK(exchanged == received);
        const auto part = sums.begin() + static_cast<std::ptrdiff_t>(self * count);
        CHECK(own == Ints(part, part + static_cast<std::ptrdiff_t>(count)));
      }
    }
  });
}

TEST_CASE("persistent: ranks start in different orders, and some call the plain form of the name") {
  in_both_worlds([] {
    constexpr int kOps = 6;
    std::vector<Ints> values(kOps, Ints(3));
    std::vector<PersistentHandle<void>> ops;
    for (auto& one : values) ops.push_back(allreduce_init(buffer_of(one), {.op = ReduceOp::Sum}));
    Ints named(5);
    auto same = allreduce_init(buffer_of(named), {.name = "same", .op = ReduceOp::Sum});
    for (int round = 0; round < 3 * kRounds; ++round) {
      for (int i = 0; i < kOps; ++i) fill(values[static_cast<std::size_t>(i)], round + i);
      fill(named, round);
      for (int i = 0; i < kOps; ++i)
        ops[static_cast<std::size_t>((i + rank() * (round + 1)) % kOps)].start();
      if ((round + rank()) % 3 == 0) {
        allreduce(buffer_of(named), buffer_of(named), {.name = "same", .op = ReduceOp::Sum});
      } else if ((round + rank()) % 3 == 1) {
        const auto handle = allreduce_async(buffer_of(named), buffer_of(named),
                                            {.name = "same", .op = ReduceOp::Sum});
        handle.wait();
      } else {
        same.start();
        same.wait();
      }
      for (int i = 0; i < kOps; ++i) ops[static_cast<std::size_t>((i + rank()) % kOps)].wait();
      for (int i = 0; i < kOps; ++i)
        CHECK(values[static_cast<std::size_t>(i)] == summed(3, round + i));
      CHECK(named == summed(5, round));
    }
  });
}

TEST_CASE("persistent: scales, averages, 16 bits on the wire, overlapping memory, process sets") {
  in_both_worlds([] {
    const int n = size();
    for (const std::size_t count : {std::size_t{3}, std::size_t{100'000}}) {
      CAPTURE(count);
      std::vector<float> values(count), scaled(count);
      const auto floats = [&](std::vector<float>& of) {
        return Buffer{of.data(), DataType::Float32, {static_cast<std::int64_t>(count)}, {}};
      };
      auto half = allreduce_init(floats(values), {.compression = Compression::fp16()});
      auto scale = allreduce_init(
          floats(scaled), {.op = ReduceOp::Sum, .prescale_factor = 2, .postscale_factor = 0.5});
      Ints around(count * static_cast<std::size_t>(n));
      const Buffer whole = buffer_of(around);
      const Buffer mine{around.data() + static_cast<std::size_t>(rank()) * count,
                        DataType::Int32,
                        {static_cast<std::int64_t>(count), 1},
                        {}};
      auto gather = allgather_init(whole, mine);
      for (int round = 0; round < kRounds; ++round) {
        for (std::size_t i = 0; i < count; ++i)
          values[i] = scaled[i] = static_cast<float>(static_cast<int>(i % 9) + 4 * rank() + round);
        std::fill(around.begin(), around.end(), -1);
        std::fill_n(static_cast<std::int32_t*>(mine.data), count, 10 * rank() + round);
        half.start();
        scale.start();
        gather.start();
        gather.wait();
        scale.wait();
        half.wait();
        bool right = true;
        for (std::size_t i = 0; i < count; ++i) {
          const float mean =
              static_cast<float>(static_cast<int>(i % 9) + round) + 2.F * static_cast<float>(n - 1);
          right = right && values[i] == mean && scaled[i] == mean * static_cast<float>(n);
        }
        for (std::size_t i = 0; i < around.size(); ++i)
          right = right && around[i] == 10 * static_cast<int>(i / count) + round;
        CHECK(right);
      }
    }
    const auto set = add_process_set({n - 1});
    Ints lonely{rank()};
    if (set.included()) {
      auto alone = allreduce_init(buffer_of(lonely), {.process_set = set});
      for (int round = 0; round < kRounds; ++round) {
        alone.start();
        alone.wait();
        CHECK(lonely == Ints{rank()});
      }
      barrier();
      remove_process_set(set);
      CHECK(contains(error_of<InvalidArgument>([&] { alone.start(); }), "process set"));
      CHECK(alone.done());
    } else {
      CHECK(contains(error_of<InvalidArgument>(
                         [&] { allreduce_init(buffer_of(lonely), {.process_set = set}); }),
                     "is not in process set"));
      barrier();
      remove_process_set(set);
    }
  });
}

TEST_CASE("persistent: what one rank can see is refused, and costs no name") {
  const Running running;
  Ints values(4), others(5);
  const Buffer buffer = buffer_of(values);
  CHECK(contains(
      error_of<InvalidArgument>([&] { allreduce_init(buffer, {.process_set = ProcessSet(77)}); }),
      "77"));
  CHECK(contains(error_of<InvalidArgument>(
                     [&] { allreduce_init(buffer, {.compression = Compression::topk()}); }),
                 "topk"));
  CHECK(contains(error_of<InvalidArgument>([&] { allreduce_init(buffer, buffer_of(others)); }),
                 "alike"));
  CHECK(contains(error_of<InvalidArgument>([&] {
                   allreduce_init({nullptr, DataType::Float32, {3}, {}});
                 }),
                 "no memory"));
  CHECK(contains(error_of<InvalidArgument>([&] {
                   allreduce_init({values.data(), DataType::Bool, {3}, {}});
                 }),
                 "not supported"));
  CHECK(contains(error_of<InvalidArgument>(
                     [&] { broadcast_init(buffer, {.name = "b", .root_rank = size()}); }),
                 "root rank"));
  CHECK(contains(error_of<InvalidArgument>([&] { allgather_init(buffer_of(values, 2), buffer); }),
                 "must be equal"));
  CHECK(contains(error_of<InvalidArgument>([&] {
                   alltoall_init(buffer, buffer, {.splits = {1, 2, 3, 4, 5}});
                 }),
                 "splits"));
  CHECK(contains(error_of<InvalidArgument>([&] { reducescatter_init(buffer, buffer_of(others)); }),
                 "rows"));
  CHECK_THROWS_AS(PersistentHandle<void>().start(), InvalidArgument);
  // Ranks that were refused more often than others still match.
  for (int i = 0; i < rank(); ++i)
    CHECK_THROWS_AS(allreduce_init(buffer, {.process_set = ProcessSet(77)}), InvalidArgument);
  auto op = allreduce_init(buffer, {.op = ReduceOp::Sum});
  fill(values, 1);
  op.start();
  CHECK(contains(error_of<InvalidArgument>([&] { op.start(); }), "call wait() first"));
  auto moved = std::move(op);
  moved.wait();
  CHECK(values == summed(4, 1));
  CHECK_THROWS_AS(op.wait(), InvalidArgument);  // NOLINT(bugprone-use-after-move)
}

TEST_CASE(
    "persistent: a name in flight, a mismatch, a rank that has joined; then everything works "
    "again") {
  in_both_worlds([] {
    Ints values(3);
    for (int round = 0; round < 2; ++round) {  // submitted, and on the fast path
      CAPTURE(round);
      auto op = allreduce_init(buffer_of(values), {.name = "x", .op = ReduceOp::Sum});
      for (int i = 0; i < (round == 0 ? 0 : kRounds); ++i) {
        op.start();
        op.wait();
      }
      if (size() > 1) {  // alone it may have ended before
        barrier();
        if (rank() == 0) {
          op.start();
          auto other = allreduce_init(buffer_of(values), {.name = "x", .op = ReduceOp::Sum});
          CHECK_THROWS_AS(other.start(), DuplicateName);
          CHECK(other.done());
        }
        barrier();
        if (rank() != 0) op.start();
        op.wait();

        Ints longer(4);
        auto wrong = allreduce_init(buffer_of(rank() == 0 ? longer : values),
                                    {.name = "x", .op = ReduceOp::Sum});
        for (int again = 0; again < 2; ++again) {
          wrong.start();
          CHECK(contains(error_of<Mismatch>([&] { wrong.wait(); }), "'x'"));
          CHECK(wrong.done());
          wrong.wait();
        }
      }
      fill(values, round);
      op.start();
      op.wait();
      CHECK(values == summed(3, round));

      Ints gathered(static_cast<std::size_t>(size())), one{rank()};
      auto gather = allgather_init(buffer_of(gathered), buffer_of(one));
      if (rank() == 0) {
        CHECK(join() >= 0);
      } else {
        gather.start();
        CHECK_THROWS_AS(gather.wait(), Joined);
        join();
      }
      gather.start();
      gather.wait();
      for (int of = 0; of < size(); ++of) CHECK(gathered[static_cast<std::size_t>(of)] == of);
      auto later = allreduce_init(buffer_of(values));  // of the numbers after the join
      later.start();
      later.wait();
    }
  });
}

TEST_CASE("persistent: the end of one that is under way waits for it") {
  in_both_worlds([] {
    Ints values(3);
    std::vector<Ints> large(1, Ints(300'000));
    for (int round = 0; round < kRounds; ++round) {
      fill(values, round);
      fill(large.front(), round);
      {
        auto small = allreduce_init(buffer_of(values), {.name = "small", .op = ReduceOp::Sum});
        auto big = allreduce_init(buffer_of(large.front()), {.name = "big", .op = ReduceOp::Sum});
        small.start();
        big.start();
      }
      CHECK(values == summed(3, round));
      CHECK(large.front() == summed(300'000, round));
    }
  });
}

TEST_CASE("persistent: shutdown() with one under way, and a world that is another") {
  for (const int before : {0, kRounds}) {
    Ints values(3), others(3);
    std::optional<PersistentHandle<void>> op, idle;
    bool is_first = false, is_alone = false;
    {
      const Running running;
      is_first = rank() == 0;
      is_alone = size() == 1;
      op = allreduce_init(buffer_of(values), {.name = "x"});
      idle = allreduce_init(buffer_of(others), {.name = "y"});
      for (int i = 0; i < before; ++i) {
        op->start();
        op->wait();
      }
      if (is_first) op->start();
    }
    CHECK_THROWS_AS(idle->start(), NotInitialized);
    CHECK_THROWS_AS(allreduce_init(buffer_of(others)), NotInitialized);
    idle->wait();
    if (is_first && !is_alone) CHECK_THROWS_AS(op->wait(), Shutdown);
    const Running again;
    CHECK(contains(error_of<InvalidArgument>([&] { op->start(); }),
                   is_alone ? "call wait() first" : "make it anew"));
    auto fresh = allreduce_init(buffer_of(others), {.op = ReduceOp::Sum});
    fill(others, 3);
    fresh.start();
    fresh.wait();
    CHECK(others == summed(3, 3));
    op.reset();
  }
}

}  // namespace
}  // namespace hvd::test
