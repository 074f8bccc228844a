/// Operations beyond allreduce, sets that are made later, joining and disagreements about the
/// operation, with threads as ranks.

#include <doctest/doctest.h>

#include <chrono>
#include <numeric>
#include <thread>

#include "hvd/engine/engine.h"
#include "tests/support/shapes.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

void each_world(const std::function<void(ThreadWorld&, int size)>& body) {
  for (const auto& [size, domains] : kShapes) {
    CAPTURE(size);
    CAPTURE(domains);
    ThreadWorld world({.size = size, .domains = domains, .config = {}});
    body(world, size);
  }
}

Submission of_kind(OpKind kind, std::string name = {}, int process_set = 0) {
  Submission submission;
  submission.kind = kind;
  submission.name = std::move(name);
  submission.process_set = process_set;
  return submission;
}

std::shared_ptr<HandleState> run(Engine& engine, Submission submission) {
  auto pending = engine.submit(std::move(submission), After::Wait);
  engine.wait(*pending);
  return pending;
}

int join(Engine& engine) {
  return static_cast<int>(run(engine, of_kind(OpKind::Join, std::string(kJoin)))->value);
}

int add_set(Engine& engine, Shape ranks) {
  Submission submission = of_kind(OpKind::Control, std::string(kAddProcessSet));
  submission.tensors.push_back(
      {nullptr, nullptr, DataType::Int64, std::move(ranks), nullptr, true});
  return static_cast<int>(run(engine, std::move(submission))->value);
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Mismatch& error) {
    return std::string("Mismatch: ") + error.what();
  } catch (const Joined& error) {
    return std::string("Joined: ") + error.what();
  } catch (const InvalidArgument& error) {
    return std::string("InvalidArgument: ") + error.what();
  }
  return "none";
}

}  // namespace

TEST_CASE(
    "alltoall: every rank gets its rows from every rank, in their order, and learns how many") {
  each_world([](ThreadWorld& world, int n) {
    world.run([n](int rank, Engine& engine) {
      for (int round = 0; round < 3; ++round) {
        const auto rows = [&](int from, int to) { return (from * 2 + to + round) % 4; };
        std::vector<std::int64_t> splits;
        std::vector<std::int32_t> mine;
        for (int to = 0; to < n; ++to) {
          splits.push_back(rows(rank, to));
          for (int row = 0; row < 3 * rows(rank, to); ++row)
            mine.push_back(rank * 10000 + to * 100 + row);
        }
        mine.insert(mine.end(), 3, -1);  // a row that is not sent
        std::vector<std::int32_t> all;
        Submission submission = of_kind(OpKind::Alltoall, "exchange");
        submission.tensors.push_back({mine.data(),
                                      nullptr,
                                      DataType::Int32,
                                      {static_cast<std::int64_t>(mine.size()) / 3, 3},
                                      nullptr,
                                      true,
                                      splits});
        submission.allocate = [&all](std::size_t, std::int64_t count) {
          all.assign(static_cast<std::size_t>(count) * 3, -7);
          return static_cast<void*>(all.data());
        };
        const auto pending = run(engine, std::move(submission));
        std::vector<std::int32_t> expected;
        for (int from = 0; from < n; ++from) {
          CHECK(pending->rows.at(0).at(static_cast<std::size_t>(from)) == rows(from, rank));
          for (int row = 0; row < 3 * rows(from, rank); ++row)
            expected.push_back(from * 10000 + rank * 100 + row);
        }
        CHECK(all == expected);
      }
      Submission wrong = of_kind(OpKind::Alltoall, "exchange");
      wrong.tensors.push_back({nullptr,
                               nullptr,
                               DataType::Int32,
                               {2},
                               nullptr,
                               true,
                               std::vector<std::int64_t>(static_cast<std::size_t>(n), 3)});
      CHECK(error_of([&] {
              engine.submit(std::move(wrong));
            }).starts_with("InvalidArgument: alltoall 'exchange': the splits"));
    });
  });
}

TEST_CASE("reducescatter: the rows of the allreduce, bitwise, the first ranks one more") {
  each_world([](ThreadWorld& world, int n) {
    world.run([n](int rank, Engine& engine) {
      for (const std::int64_t rows : {0, 1, 3, 8, 29}) {
        std::vector<float> mine(static_cast<std::size_t>(rows) * 5);
        for (std::size_t i = 0; i < mine.size(); ++i)
          mine[i] = 0.1F * static_cast<float>(i + 1) / static_cast<float>(rank + 3);
        auto whole = mine;
        run(engine, allreduce_of(whole, "whole", DataType::Float32, ReduceOp::Average));
        std::vector<float> own;
        Submission submission = of_kind(OpKind::Reducescatter, "rows");
        submission.op = ReduceOp::Average;
        submission.tensors.push_back(
            {mine.data(), nullptr, DataType::Float32, {rows, 5}, nullptr, true});
        submission.allocate = [&own](std::size_t, std::int64_t count) {
          own.assign(static_cast<std::size_t>(count) * 5, -7);
          return static_cast<void*>(own.data());
        };
        run(engine, std::move(submission));
        std::int64_t begin = 0;
        for (int r = 0; r < rank; ++r)
          begin += scattered_rows(rows, static_cast<std::size_t>(n), static_cast<std::size_t>(r));
        const std::int64_t count =
            scattered_rows(rows, static_cast<std::size_t>(n), static_cast<std::size_t>(rank));
        CHECK(own ==
              std::vector<float>(whole.begin() + begin * 5, whole.begin() + (begin + count) * 5));
      }
    });
  });
}

TEST_CASE(
    "reducescatter by elements: each rank keeps what all have agreed, in place, and bitwise what "
    "an allreduce gives") {
  each_world([](ThreadWorld& world, int n) {
    world.run([n](int rank, Engine& engine) {
      const auto ranks = static_cast<std::size_t>(n);
      const auto self = static_cast<std::size_t>(rank);
      for (int round = 0; round < 3; ++round) {
        std::vector<std::int64_t> splits(ranks), none(ranks, 0);
        for (std::size_t r = 0; r < ranks; ++r)
          splits[r] = static_cast<std::int64_t>((r * 7 + static_cast<std::size_t>(round)) % 3 * 11);
        splits.back() += 40000;
        none[static_cast<std::size_t>(round) % ranks] = 5;
        const auto count = static_cast<std::size_t>(
            std::accumulate(splits.begin(), splits.end(), std::int64_t{0}));
        std::vector<float> mine(count), few(5);
        for (std::size_t i = 0; i < count; ++i)
          mine[i] = 0.1F * static_cast<float>(i % 997 + 1) / static_cast<float>(rank + 3);
        for (std::size_t i = 0; i < few.size(); ++i)
          few[i] = static_cast<float>(rank * 10) + static_cast<float>(i);
        auto whole = mine;
        const auto sent = few;
        run(engine, allreduce_of(whole, "whole", DataType::Float32, ReduceOp::Average));
        const auto begin = static_cast<std::size_t>(
            std::accumulate(splits.begin(), splits.begin() + rank, std::int64_t{0}));
        Submission submission = of_kind(OpKind::Reducescatter, "elements");
        submission.op = ReduceOp::Average;
        submission.tensors.push_back({mine.data(),
                                      mine.data() + begin,
                                      DataType::Float32,
                                      {static_cast<std::int64_t>(count)},
                                      nullptr,
                                      true,
                                      splits});
        submission.tensors.push_back(
            {few.data(), few.data(), DataType::Float32, {1, 5}, nullptr, true, none});
        run(engine, std::move(submission));
        const auto own = static_cast<std::size_t>(splits[self]);
        CHECK(std::equal(whole.begin() + static_cast<std::ptrdiff_t>(begin),
                         whole.begin() + static_cast<std::ptrdiff_t>(begin + own),
                         mine.begin() + static_cast<std::ptrdiff_t>(begin)));
        for (std::size_t i = 0; i < few.size(); ++i)
          CHECK(few[i] == (none[self] == 0 ? sent[i]
                                           : doctest::Approx(static_cast<float>((n - 1) * 5) +
                                                             static_cast<float>(i))));
      }
    });
  });
}

TEST_CASE(
    "reducescatter by elements: splits that differ are a Mismatch on all ranks, those that do not "
    "fit are refused at the call") {
  each_world([](ThreadWorld& world, int n) {
    world.run([n](int rank, Engine& engine) {
      std::vector<float> values(12, 1), own(12);
      const auto scatter = [&](std::vector<std::int64_t> splits) {
        Submission submission = of_kind(OpKind::Reducescatter, "elements");
        submission.op = ReduceOp::Sum;
        submission.tensors.push_back({values.data(),
                                      own.data(),
                                      DataType::Float32,
                                      {3, 4},
                                      nullptr,
                                      true,
                                      std::move(splits)});
        run(engine, std::move(submission));
      };
      std::vector<std::int64_t> all_to_first(static_cast<std::size_t>(n), 0),
          too_few(static_cast<std::size_t>(n), 0);
      all_to_first.front() = 12;
      too_few.front() = 11;
      auto all_to_last = all_to_first;
      std::swap(all_to_last.front(), all_to_last.back());
      if (n > 1) {
        const std::string error =
            error_of([&] { scatter(rank == 0 ? all_to_first : all_to_last); });
        CHECK(error.starts_with(
            "Mismatch: reducescatter 'elements': the splits differ between ranks: rank 0: [12"));
        CHECK(error_of([&] {
                scatter(rank == 0 ? std::vector<std::int64_t>{} : all_to_last);
              }).find("rank 0: by rows; rank") != std::string::npos);
      }
      CHECK(error_of([&] { scatter(too_few); }).find("are not all 12 elements of the tensor") !=
            std::string::npos);
      all_to_first.push_back(0);
      CHECK(error_of([&] {
              scatter(all_to_first);
            }).starts_with("InvalidArgument: reducescatter 'elements': the splits"));
      all_to_first.pop_back();
      scatter(all_to_first);
      if (rank == 0) CHECK(own == std::vector<float>(12, static_cast<float>(n)));
    });
  });
}

TEST_CASE("a rank that has joined counts as zeros, and the one that joins last is named on all") {
  each_world([](ThreadWorld& world, int n) {
    world.run([n](int rank, Engine& engine) {
      for (int round = 0; round < 3; ++round) {
        // Rank r takes part in r + 1 allreduces and then joins; rank n - 1 is the last.
        for (int step = 0; step <= rank; ++step) {
          std::vector<float> values(1000, static_cast<float>(rank + 1));
          run(engine, allreduce_of(values, "grad", DataType::Float32));
          float expected = 0;
          for (int r = step; r < n; ++r) expected += static_cast<float>(r + 1);
          CHECK(values == std::vector<float>(1000, expected));
          std::vector<std::int32_t> least{rank + 1};
          run(engine, allreduce_of(least, "least", DataType::Int32, ReduceOp::Min));
          CHECK(least[0] == (step == 0 ? 1 : 0));
        }
        if (rank == n - 1 && n > 1) {
          std::vector<float> values{1};
          Submission broadcast = of_kind(OpKind::Broadcast, "lonely");
          broadcast.root = rank;
          broadcast.tensors.push_back(
              {values.data(), values.data(), DataType::Float32, {1}, nullptr, true});
          const std::string said = error_of([&] { run(engine, std::move(broadcast)); });
          CHECK(said.starts_with("Joined: broadcast 'lonely': rank"));
        }
        CHECK(join(engine) == n - 1);
        CHECK(engine.negotiator().sets().joins(0) == static_cast<std::uint64_t>(round + 1));
        std::vector<float> values{1};
        run(engine, allreduce_of(values, "after", DataType::Float32));
        CHECK(values[0] == static_cast<float>(n));
      }
    });
  });
}

TEST_CASE("process sets made and removed while the world runs") {
  each_world([](ThreadWorld& world, int n) {
    world.run([n](int rank, Engine& engine) {
      for (int round = 0; round < 3; ++round) {
        Shape odd;
        for (int r = 1; r < n; r += 2) odd.push_back(r);
        if (odd.empty()) odd.push_back(0);
        const int set = add_set(engine, odd);
        CHECK(set == round + 1);
        const bool included = std::find(odd.begin(), odd.end(), rank) != odd.end();
        std::vector<float> values{static_cast<float>(rank)};
        Submission sum = allreduce_of(values, "in the set", DataType::Float32);
        sum.process_set = set;
        if (included) {
          run(engine, std::move(sum));
          float expected = 0;
          for (const auto r : odd) expected += static_cast<float>(r);
          CHECK(values[0] == expected);
        } else {
          CHECK(error_of([&] { run(engine, std::move(sum)); }).starts_with("InvalidArgument"));
        }
        Submission removal = of_kind(OpKind::Control, std::string(kRemoveProcessSet));
        removal.root = set;
        removal.tensors.push_back({nullptr, nullptr, DataType::Int64, odd, nullptr, true});
        run(engine, std::move(removal));
        Submission late = allreduce_of(values, "in the set", DataType::Float32);
        late.process_set = set;
        CHECK(error_of([&] { run(engine, std::move(late)); }).find("there is no process set") !=
              std::string::npos);
      }
      if (n > 1) {
        const std::string said = error_of([&] { add_set(engine, {rank == 0 ? 0 : 1}); });
        CHECK(said.find("rank 0: ranks [0]; rank") != std::string::npos);
      }
    });
  });
}

TEST_CASE(
    "different operations under one name: in any order where all ranks do both, a Mismatch on all "
    "where they cannot meet") {
  each_world([](ThreadWorld& world, int n) {
    if (n == 1) return;
    world.run([n](int rank, Engine& engine) {
      const auto sum = [&](std::vector<float>& values) {
        return allreduce_of(values, "x", DataType::Float32);
      };
      const auto copy = [&](std::vector<float>& values) {
        Submission broadcast = of_kind(OpKind::Broadcast, "x");
        broadcast.tensors.push_back(
            {values.data(), values.data(), DataType::Float32, {1}, nullptr, true});
        return broadcast;
      };
      std::vector<float> a{1};
      std::vector<float> b{static_cast<float>(rank + 5)};
      const auto first = engine.submit(rank % 2 == 0 ? sum(a) : copy(b));
      const auto second = engine.submit(rank % 2 == 0 ? copy(b) : sum(a));
      engine.wait(*first);
      engine.wait(*second);
      CHECK(a[0] == static_cast<float>(n));
      CHECK(b[0] == 5);
      for (int round = 0; round < 2; ++round) {
        const std::string said = error_of([&] { run(engine, rank == 1 ? copy(b) : sum(a)); });
        CHECK(said.find("'x': the operation differs between ranks: rank") != std::string::npos);
        CHECK(said.find("rank 1: broadcast") != std::string::npos);
        const auto asked = engine.submit(rank == 1 ? copy(b) : sum(a));
        const bool only_asks = round == 0 || rank == 1;  // all, or one while the others wait
        while (only_asks && !engine.poll(*asked)) std::this_thread::sleep_for(1ms);
        CHECK(error_of([&] {
                engine.wait(*asked);
              }).find("'x': the operation differs between ranks: rank") != std::string::npos);
        a = {1};
        run(engine, sum(a));
        CHECK(a[0] == static_cast<float>(n));
      }
    });
  });
}

TEST_CASE(
    "adasum: orthogonal vectors add, parallel ones average, for any number of ranks and near the "
    "end of the range") {
  each_world([](ThreadWorld& world, int n) {
    world.run([n](int rank, Engine& engine) {
      std::vector<double> orthogonal(8, 0.0);
      orthogonal[static_cast<std::size_t>(rank)] = 1e200;
      run(engine, allreduce_of(orthogonal, "orthogonal", DataType::Float64, ReduceOp::Adasum));
      for (std::size_t i = 0; i < 8; ++i)
        CHECK(orthogonal[i] == doctest::Approx(i < static_cast<std::size_t>(n) ? 1e200 : 0.0));
      std::vector<float> parallel(1000, 3.0F);
      run(engine, allreduce_of(parallel, "parallel", DataType::Float32, ReduceOp::Adasum));
      for (const float value : parallel) CHECK(value == doctest::Approx(3.0));
    });
  });
}

TEST_CASE(
    "shutdown with work pending, across domains: what all ranks have submitted is done, the rest "
    "fails, on every rank") {
  for (int repetition = 0; repetition < 20; ++repetition)
    each_world([](ThreadWorld& world, int n) {
      std::vector<std::vector<float>> both(static_cast<std::size_t>(n), {1.0F});
      std::vector<std::vector<float>> alone(static_cast<std::size_t>(n), {1.0F});
      std::vector<std::shared_ptr<HandleState>> done(static_cast<std::size_t>(n));
      std::vector<std::shared_ptr<HandleState>> lost(static_cast<std::size_t>(n));
      world.run(
          [&](int rank, Engine& engine) {
            const auto at = static_cast<std::size_t>(rank);
            if (rank > 0)
              lost[at] = engine.submit(allreduce_of(alone[at], "alone", DataType::Float32));
            done[at] = engine.submit(allreduce_of(both[at], "both", DataType::Float32));
            CHECK(engine.shutdown());
          },
          false);
      for (int rank = 0; rank < n; ++rank) {
        const auto at = static_cast<std::size_t>(rank);
        REQUIRE(done[at]->done);
        CHECK(done[at]->status.text() == "");
        CHECK(both[at][0] == static_cast<float>(n));
        if (rank == 0) continue;
        REQUIRE(lost[at]->done);
        CHECK(lost[at]->status.code() == Status::Code::Shutdown);
      }
    });
}

}  // namespace hvd::test
