/// Small operations that come back, which the leaders end among themselves, end to end: engines
/// over P2pTransport and P2pBackend, domains of one and of several ranks. Each must give the bits
/// of the long way.

#include "ops/p2p/direct_memory.h"

#include <doctest/doctest.h>

#include <random>

#include "hvd/base/text.h"
#include "ops/host_ops.h"
#include "tests/support/mpi_cases.h"

namespace hvd::test {
namespace {

constexpr int kDirectTestRounds = 6;  // the first two make it a repeated operation

/// Returns whether it took the fast path.
bool run_again(Engine& engine, const Submission& submission) {
  if (engine.small_calls().try_run(call_of(submission))) return true;
  run(engine, submission);
  return false;
}

bool has_domains(const MpiWorld& world) { return world.topology().domains > 1; }

}  // namespace

TEST_CASE(
    "direct memory: allreduce of every type and operation, scaled and not, has the bits of the "
    "long way") {
  on_all_layouts([](MpiWorld& world) {
    unsigned salt = 0;
    int fast = 0;
    for (const DataType dtype :
         {DataType::Float32, DataType::Float64, DataType::Float16, DataType::BFloat16,
          DataType::Int32, DataType::UInt8, DataType::Bool, DataType::Complex64})
      for (const ReduceOp op :
           {ReduceOp::Average, ReduceOp::Sum, ReduceOp::Min, ReduceOp::Product}) {
        BatchTraits traits;
        traits.dtype = dtype;
        traits.op = op;
        if (!host_supports(traits)) continue;
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{17},
                                        std::size_t{1000}, std::size_t{7001}}) {
          Reducing how{dtype, op};
          if (count == 17 && (dtype == DataType::Float32 || dtype == DataType::Float16))
            how = {dtype, op, 0.5, 3};
          const std::string name = formatted("{} {} {}", name_of(dtype), name_of(op), count);
          CAPTURE(name);
          for (int round = 0; round < kDirectTestRounds; ++round) {
            const auto inputs = patterns(everyone(), count, dtype, ++salt);
            Bytes values = inputs[static_cast<std::size_t>(mpi_rank())];
            fast += run_again(world.engine(),
                              reduction_of(name, values.data(), values.data(), count, how))
                        ? 1
                        : 0;
            const bool right = values == reduced(world.topology(), everyone(), inputs, how);
            CHECK(right);
          }
        }
      }
    if (has_domains(world)) CHECK(fast > 100);
  });
}

TEST_CASE("direct memory: groups, allgather, broadcast from every root, barrier") {
  on_all_layouts([](MpiWorld& world) {
    int fast = 0;
    for (int round = 0; round < 8; ++round) {
      const auto salt = static_cast<unsigned>(1000 + round);
      const int rank = mpi_rank();
      Bytes first = pattern(rank, 5, DataType::Float32, salt);
      Bytes second = pattern(rank, 70, DataType::Float32, salt + 50);
      Submission group = reduction_of("group", first.data(), first.data(), 5, {});
      group.tensors.push_back(
          {second.data(), second.data(), DataType::Float32, {70}, nullptr, true});
      const std::vector<SmallTensor> members{
          {first.data(), first.data(), group.tensors[0].shape},
          {second.data(), second.data(), group.tensors[1].shape}};
      SmallCall call = call_of(group);
      call.group = members;
      const bool grouped = world.engine().small_calls().try_run(call);
      if (!grouped) run(world.engine(), group);
      fast += grouped ? 1 : 0;
      const bool group_right =
          first == reduced(world.topology(), everyone(),
                           patterns(everyone(), 5, DataType::Float32, salt), {}) &&
          second == reduced(world.topology(), everyone(),
                            patterns(everyone(), 70, DataType::Float32, salt + 50), {});
      CHECK(group_right);

      // also more than a block within a host has
      const std::int64_t rows = round % 2 == 0 ? 3 : 1000;
      const std::size_t count = round % 2 == 0 ? 33 : 4001;
      const std::string size = std::to_string(round % 2);
      const Bytes row = pattern(rank, static_cast<std::size_t>(rows), DataType::Int64, salt);
      Bytes all(row.size() * static_cast<std::size_t>(mpi_size()));
      Submission gather = submission_of(OpKind::Allgather, "gather" + size, row.data(), nullptr,
                                        rows, DataType::Int64);
      gather.allocate = [&all](std::size_t /*index*/, std::int64_t /*rows*/) {
        return static_cast<void*>(all.data());
      };
      SmallCall gathering = call_of(gather);
      gathering.output = all.data();
      gathering.output_rows = rows * mpi_size();
      if (world.engine().small_calls().try_run(gathering)) {
        ++fast;
      } else {
        run(world.engine(), gather);
      }
      Bytes wanted;
      for (const int of : everyone()) {
        const Bytes part = pattern(of, static_cast<std::size_t>(rows), DataType::Int64, salt);
        wanted.insert(wanted.end(), part.begin(), part.end());
      }
      CHECK((all == wanted));

      for (int root = 0; root < mpi_size(); ++root) {
        Bytes values = pattern(rank, count, DataType::Float64, salt);
        auto sending =
            submission_of(OpKind::Broadcast, size + " from " + std::to_string(root), values.data(),
                          values.data(), static_cast<std::int64_t>(count), DataType::Float64);
        sending.root = root;
        fast += run_again(world.engine(), sending) ? 1 : 0;
        CHECK((values == pattern(root, count, DataType::Float64, salt)));
      }

      Submission barrier;
      barrier.kind = OpKind::Barrier;
      barrier.name = "barrier";
      fast += run_again(world.engine(), barrier) ? 1 : 0;
    }
    if (has_domains(world)) CHECK(fast > 15);
  });
}

TEST_CASE("direct memory: alltoall, in parts of any size, has the rows of each rank") {
  on_all_layouts([](MpiWorld& world) {
    const int rank = mpi_rank();
    const auto ranks = static_cast<std::size_t>(mpi_size());
    int fast = 0;
    for (const bool is_even : {true, false})
      for (unsigned round = 0; round < kDirectTestRounds; ++round) {
        std::vector<std::int64_t> splits(ranks, 2), received(ranks);
        for (std::size_t to = 0; !is_even && to < ranks; ++to)
          splits[to] = static_cast<std::int64_t>(3 * to % 4);
        const auto rows_before = [&](int of) {
          return std::accumulate(splits.begin(), splits.begin() + of, std::int64_t{0});
        };
        const auto rows = static_cast<std::size_t>(rows_before(mpi_size()));
        const auto own = static_cast<std::size_t>(splits[static_cast<std::size_t>(rank)]);
        const Bytes input = pattern(rank, rows * 3, DataType::Int64, round);
        Bytes output(own * ranks * 24, std::byte{0xee});
        auto submission = submission_of(OpKind::Alltoall, is_even ? "even" : "uneven", input.data(),
                                        nullptr, rows, DataType::Int64);
        submission.tensors.front().shape.push_back(3);
        submission.tensors.front().splits = splits;
        submission.allocate = [&output](std::size_t /*index*/, std::int64_t /*rows*/) {
          return static_cast<void*>(output.data());
        };
        SmallCall call = call_of(submission);
        call.output = output.data();
        call.received = received;
        if (world.engine().small_calls().try_run(call)) {
          ++fast;
          CHECK(received == std::vector<std::int64_t>(ranks, static_cast<std::int64_t>(own)));
        } else {
          run(world.engine(), submission);
        }
        Bytes wanted;
        for (const int of : everyone()) {
          const Bytes all = pattern(of, rows * 3, DataType::Int64, round);
          const auto begin = all.begin() + rows_before(rank) * 24;
          wanted.insert(wanted.end(), begin, begin + static_cast<std::ptrdiff_t>(own * 24));
        }
        CHECK((output == wanted));
      }
    if (has_domains(world)) CHECK(fast >= 6);
  });
}

TEST_CASE("direct memory: reducescatter has the bits of an allreduce") {
  on_all_layouts([](MpiWorld& world) {
    const auto place = static_cast<std::size_t>(mpi_rank());
    const auto ranks = static_cast<std::size_t>(mpi_size());
    int fast = 0;
    for (const DataType dtype : {DataType::Float32, DataType::Float16, DataType::Int32})
      for (const std::size_t rows : {std::size_t{1}, std::size_t{7}, std::size_t{200}})
        for (unsigned round = 0; round < kDirectTestRounds; ++round) {
          const Reducing how{dtype, ReduceOp::Average};
          const auto inputs = patterns(everyone(), rows * 2, dtype, 300 + round);
          const Bytes all = reduced(world.topology(), everyone(), inputs, how);
          const std::size_t row = all.size() / rows;
          const std::size_t begin = rows / ranks * place + std::min(place, rows % ranks);
          const std::size_t own = rows / ranks + (place < rows % ranks ? 1 : 0);
          Bytes output(own * row, std::byte{0xee});
          auto submission = reduction_of(formatted("{} {}", name_of(dtype), rows),
                                         inputs[place].data(), output.data(), rows, how);
          submission.kind = OpKind::Reducescatter;
          submission.tensors.front().shape.push_back(2);
          submission.allocate = [&output](std::size_t /*index*/, std::int64_t /*rows*/) {
            return static_cast<void*>(output.data());
          };
          fast += run_again(world.engine(), submission) ? 1 : 0;
          CHECK(std::equal(output.begin(), output.end(),
                           all.begin() + static_cast<std::ptrdiff_t>(begin * row)));
        }
    if (has_domains(world)) CHECK(fast >= 20);
  });
}

TEST_CASE(
    "direct memory: a reducescatter of parts that the caller has said is not repeated as one by "
    "rows") {
  on_all_layouts([](MpiWorld& world) {
    const auto ranks = static_cast<std::int64_t>(mpi_size());
    const auto rows = static_cast<std::size_t>(ranks);
    Bytes input = pattern(mpi_rank(), rows, DataType::Float32, 1), output(rows * 4);
    auto submission = reduction_of("parts", input.data(), output.data(), rows, {});
    submission.kind = OpKind::Reducescatter;
    submission.allocate = [&output](std::size_t /*index*/, std::int64_t /*rows*/) {
      return static_cast<void*>(output.data());
    };
    const Submission by_rows = submission;
    auto& splits = submission.tensors.front().splits;
    splits.assign(rows, 0);
    splits.front() = ranks;  // the first rank keeps all
    for (int round = 0; round < 4; ++round) run(world.engine(), submission);
    CHECK_FALSE(world.engine().small_calls().try_run(call_of(by_rows)));
  });
}

TEST_CASE("direct memory: ranks that go this way and that, in one order of names") {
  on_all_layouts([](MpiWorld& world) {
    std::mt19937 common(3), own(100 + static_cast<unsigned>(mpi_rank()));
    for (unsigned round = 0; round < 400; ++round) {
      const std::size_t count = common() % 5 == 0 ? 700 : 9;
      const std::string name = std::to_string(count) + (common() % 2 == 0 ? " a" : " b");
      const auto inputs = patterns(everyone(), count, DataType::Float32, round);
      Bytes values = inputs[static_cast<std::size_t>(mpi_rank())];
      const auto submission = reduction_of(name, values.data(), values.data(), count, {});
      if (own() % 12 == 0) {
        world.engine().wait(*world.engine().submit(submission, After::Return));
      } else {
        run_again(world.engine(), submission);
      }
      const bool right = values == reduced(world.topology(), everyone(), inputs, {});
      CHECK(right);
    }
  });
}

}  // namespace hvd::test
