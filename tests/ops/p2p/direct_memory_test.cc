/// Small operations that come back, which the leaders end among themselves, end to end: engines over P2pTransport and P2pBackend, domains
/// of one and of several ranks. Each must give the bits of the long way.

#include "ops/p2p/direct_memory.h"

#include <doctest/doctest.h>

#include <random>

#include "hvd/base/text.h"
#include "ops/host_ops.h"
#include "tests/support/mpi_cases.h"

namespace hvd::test {
namespace {

constexpr int kDirectTestRounds = 6;  // the first two make it a persistent operation

/// Returns whether it took the fast path.
bool run_again(Engine& engine, const Submission& submission) {
  if (engine.try_fast_path(call_of(submission))) return true;
  run(engine, submission);
  return false;
}

bool has_domains(const MpiWorld& world) { return world.topology().domains > 1; }

}  // namespace

TEST_CASE("direct memory: allreduce of every type and operation, scaled and not, has the bits of the long way") {
  on_all_layouts([](MpiWorld& world) {
    unsigned salt = 0;
    int fast = 0;
    for (const DataType dtype : {DataType::Float32, DataType::Float64, DataType::Float16, DataType::BFloat16, DataType::Int32,
                                 DataType::UInt8, DataType::Bool, DataType::Complex64})
      for (const ReduceOp op : {ReduceOp::Average, ReduceOp::Sum, ReduceOp::Min, ReduceOp::Product}) {
        BatchTraits traits;
        traits.dtype = dtype;
        traits.op = op;
        if (!host_supports(traits)) continue;
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{17}, std::size_t{1000}}) {
          Reducing how{dtype, op};
          if (count == 17 && (dtype == DataType::Float32 || dtype == DataType::Float16)) how = {dtype, op, 0.5, 3};
          const std::string name = formatted("{} {} {}", name_of(dtype), name_of(op), count);
          CAPTURE(name);
          for (int round = 0; round < kDirectTestRounds; ++round) {
            const auto inputs = patterns(everyone(), count, dtype, ++salt);
            Bytes values = inputs[static_cast<std::size_t>(mpi_rank())];
            fast += run_again(world.engine(), reduction_of(name, values.data(), values.data(), count, how)) ? 1 : 0;
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
      group.tensors.push_back({second.data(), second.data(), DataType::Float32, {70}, nullptr, true});
      const std::vector<SmallTensor> members{{first.data(), first.data(), group.tensors[0].shape},
                                             {second.data(), second.data(), group.tensors[1].shape}};
      SmallCall call = call_of(group);
      call.group = members;
      const bool grouped = world.engine().try_fast_path(call);
      if (!grouped) run(world.engine(), group);
      fast += grouped ? 1 : 0;
      const bool group_right = first == reduced(world.topology(), everyone(), patterns(everyone(), 5, DataType::Float32, salt), {}) &&
                               second == reduced(world.topology(), everyone(), patterns(everyone(), 70, DataType::Float32, salt + 50), {});
      CHECK(group_right);

      const Bytes row = pattern(rank, 3, DataType::Int64, salt);
      Bytes all(row.size() * static_cast<std::size_t>(mpi_size()));
      Submission gather = submission_of(OpKind::Allgather, "gather", row.data(), nullptr, 3, DataType::Int64);
      gather.allocate = [&all](std::size_t /*index*/, std::int64_t /*rows*/) { return static_cast<void*>(all.data()); };
      SmallCall gathering = call_of(gather);
      gathering.output = all.data();
      gathering.output_rows = 3 * mpi_size();
      if (world.engine().try_fast_path(gathering)) {
        ++fast;
      } else {
        run(world.engine(), gather);
      }
      Bytes wanted;
      for (const int of : everyone()) {
        const Bytes part = pattern(of, 3, DataType::Int64, salt);
        wanted.insert(wanted.end(), part.begin(), part.end());
      }
      CHECK((all == wanted));

      for (int root = 0; root < mpi_size(); ++root) {
        Bytes values = pattern(rank, 33, DataType::Float64, salt);
        auto sending =
            submission_of(OpKind::Broadcast, "from " + std::to_string(root), values.data(), values.data(), 33, DataType::Float64);
        sending.root = root;
        fast += run_again(world.engine(), sending) ? 1 : 0;
        CHECK((values == pattern(root, 33, DataType::Float64, salt)));
      }

      Submission barrier;
      barrier.kind = OpKind::Barrier;
      barrier.name = "barrier";
      fast += run_again(world.engine(), barrier) ? 1 : 0;
    }
    if (has_domains(world)) CHECK(fast > 15);
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
