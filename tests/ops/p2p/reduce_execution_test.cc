/// Allreduce across domains, end to end: engines over P2pTransport and P2pBackend, domains of one
/// and of several ranks, against what each rank computes alone from all ranks' patterns, bit for
/// bit.

#include "ops/p2p/reduce_execution.h"

#include <doctest/doctest.h>

#include <cmath>
#include <random>

#include "ops/host_ops.h"
#include "tests/support/mpi_cases.h"

namespace hvd::test {
namespace {
constexpr std::size_t kCounts[] = {0, 1, 17, 65537, std::size_t{1} << 20};
}  // namespace

TEST_CASE("allreduce: every type, operation and size" * doctest::timeout(280)) {
  on_all_layouts([](MpiWorld& world) {
    unsigned salt = 0;
    for (const DataType dtype :
         {DataType::Float32, DataType::Float64, DataType::Float16, DataType::BFloat16,
          DataType::Int32, DataType::Int64, DataType::UInt8, DataType::Bool, DataType::Complex64})
      for (const ReduceOp op :
           {ReduceOp::Average, ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product}) {
        BatchTraits traits;
        traits.dtype = dtype;
        traits.op = op;
        if (!host_supports(traits)) continue;
        for (const std::size_t count : kCounts) {
          // large ones: some of them
          if (count > 100000 && dtype != DataType::Float32 && op != ReduceOp::Average) continue;
          const std::string what = std::string(name_of(dtype)) + " " + std::string(name_of(op)) +
                                   " " + std::to_string(count);
          CAPTURE(what);
          const auto inputs = patterns(everyone(), count, dtype, ++salt);
          const Reducing how{dtype, op};
          Bytes values = inputs[static_cast<std::size_t>(mpi_rank())];
          Bytes output(values.size());
          run(world.engine(), reduction_of(what, values.data(), output.data(), count, how));
          const bool right = output == reduced(world.topology(), everyone(), inputs, how);
          CHECK(right);
          CHECK(values == inputs[static_cast<std::size_t>(mpi_rank())]);
        }
      }
  });
}

TEST_CASE(
    "allreduce: scales, once before and once after the sum; in place and not; in the arena and "
    "not") {
  on_all_layouts([](MpiWorld& world) {
    unsigned salt = 100;
    for (const DataType dtype : {DataType::Float32, DataType::Float16, DataType::Int32})
      for (const ReduceOp op : {ReduceOp::Average, ReduceOp::Sum, ReduceOp::Max})
        for (const auto& [before, after] :
             {std::pair{0.5, 3.0}, std::pair{1.0 / 3.0, 1.0}, std::pair{1.0, 0.1}})
          for (const std::size_t count : {std::size_t{17}, std::size_t{40000}}) {
            const auto inputs = patterns(everyone(), count, dtype, ++salt);
            const Reducing how{dtype, op, before, after};
            const Bytes& mine = inputs[static_cast<std::size_t>(mpi_rank())];
            const Bytes expected = reduced(world.topology(), everyone(), inputs, how);
            Bytes in_place = mine;
            run(world.engine(),
                reduction_of("in place", in_place.data(), in_place.data(), count, how));
            const bool right = in_place == expected;
            CHECK(right);
            std::byte* shared = world.arena().allocate(mine.size());
            std::memcpy(shared, mine.data(), mine.size());
            run(world.engine(), reduction_of("in the arena", shared, shared, count, how));
            const bool right_there = std::memcmp(shared, expected.data(), expected.size()) == 0;
            CHECK(right_there);
            world.arena().free(shared);
          }
  });
}

TEST_CASE("allreduce: a mean of large float16 values is finite, on whatever hosts they are") {
  on_all_layouts([](MpiWorld& world) {
    constexpr std::size_t kCount = 1000;
    std::vector<float> wide(kCount, 60000.F);
    Bytes values(kCount * 2);
    kernels::convert_scalar(values.data(), DataType::Float16, wide.data(), DataType::Float32,
                            kCount);
    const Bytes expected = values;
    run(world.engine(), reduction_of("large", values.data(), values.data(), kCount,
                                     {DataType::Float16, ReduceOp::Average}));
    CHECK(values == expected);
  });
}

TEST_CASE("allreduce: scaled sums of float16 overflow, or vanish, only where the result does") {
  on_all_layouts([](MpiWorld& world) {
    constexpr std::size_t kCount = 1000;
    const auto ranks = static_cast<float>(mpi_size());
    for (const auto& [value, before] : {std::pair{100.F, 1024.0}, std::pair{1e-3F, 1.0 / 1024}})
      for (int round = 0; round < 3; ++round) {  // the later ones may be the leaders' alone
        std::vector<float> wide(kCount, value * static_cast<float>(mpi_rank() + 1));
        Bytes values(kCount * 2);
        kernels::convert_scalar(values.data(), DataType::Float16, wide.data(), DataType::Float32,
                                kCount);
        run(world.engine(),
            reduction_of("scaled by " + std::to_string(before), values.data(), values.data(),
                         kCount, {DataType::Float16, ReduceOp::Sum, before, 1 / before}));
        kernels::convert_scalar(wide.data(), DataType::Float32, values.data(), DataType::Float16,
                                kCount);
        const float expected = value * ranks * (ranks + 1) / 2;
        for (const float got : {wide.front(), wide.back()})
          CHECK(std::abs(got / expected - 1) < 0x1p-9F);
      }
  });
}

TEST_CASE("allreduce: a result that overlaps a part of its input is what it is elsewhere") {
  on_all_layouts([](MpiWorld& world) {
    unsigned salt = 200;
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Adasum})
      for (const std::size_t count : {std::size_t{1000}, std::size_t{400000}})
        for (const std::size_t from : {std::size_t{0}, std::size_t{4}}) {
          const Reducing how{DataType::Float32, op};
          const Bytes mine = pattern(mpi_rank(), count, how.dtype, ++salt);
          Bytes expected(mine.size());
          run(world.engine(), reduction_of("apart", mine.data(), expected.data(), count, how));
          // From the second round on a repeated operation may do it, in the last two not on all
          // ranks.
          for (int round = 0; round < 4; ++round) {
            Bytes memory(mine.size() + 4), elsewhere(mine.size());
            std::byte* const input = memory.data() + from;
            const bool overlaps = round < 2 || mpi_rank() % 2 == round % 2;
            std::byte* const output = overlaps ? memory.data() + (4 - from) : elsewhere.data();
            std::memcpy(input, mine.data(), mine.size());
            run(world.engine(),
                reduction_of("overlaps " + std::to_string(salt), input, output, count, how));
            const bool right = std::memcmp(output, expected.data(), expected.size()) == 0;
            CHECK(right);
          }
        }
  });
}

TEST_CASE("allreduce: many tensors at once, in another order on every rank") {
  for (const std::uint64_t threshold :
       {std::uint64_t{0}, std::uint64_t{1} << 20, std::uint64_t{128} << 20}) {
    Config config;
    config.fusion_threshold_bytes = threshold;
    on_all_layouts(
        [](MpiWorld& world) {
          constexpr std::size_t kTensors = 300;
          std::mt19937 random(static_cast<unsigned>(mpi_rank()));
          for (unsigned round = 0; round < 2; ++round) {
            std::vector<std::size_t> order(kTensors);
            std::iota(order.begin(), order.end(), 0U);
            std::shuffle(order.begin(), order.end(), random);
            std::vector<Bytes> values(kTensors);
            std::vector<std::shared_ptr<HandleState>> pending(kTensors);
            const auto count_of = [](std::size_t tensor) {
              return tensor % 7 == 3 ? 0 : tensor * 37 % 2000;
            };
            const auto how_of = [](std::size_t tensor) {
              return Reducing{tensor % 5 == 0 ? DataType::Float64 : DataType::Float32,
                              tensor % 3 == 0 ? ReduceOp::Average : ReduceOp::Sum};
            };
            for (const std::size_t tensor : order) {
              values[tensor] = pattern(mpi_rank(), count_of(tensor), how_of(tensor).dtype,
                                       static_cast<unsigned>(tensor) + round);
              pending[tensor] = world.engine().submit(
                  reduction_of("t" + std::to_string(tensor), values[tensor].data(),
                               values[tensor].data(), count_of(tensor), how_of(tensor)));
            }
            for (const auto& one : pending) world.engine().wait(*one);
            std::size_t wrong = 0;
            for (std::size_t tensor = 0; tensor < kTensors; ++tensor) {
              const auto how = how_of(tensor);
              const auto inputs = patterns(everyone(), count_of(tensor), how.dtype,
                                           static_cast<unsigned>(tensor) + round);
              if (values[tensor] != reduced(world.topology(), everyone(), inputs, how)) ++wrong;
            }
            CHECK(wrong == 0);
          }
        },
        config);
  }
}

TEST_CASE("allreduce: a domain sends 2(h-1)/h of the data to the others") {
  if (mpi_size() != 4) return;
  for (const int ranks_per_domain : {1, 2}) {
    MpiWorld world({[&](int rank) { return rank / ranks_per_domain; }, {}, true});
    constexpr std::size_t kCount = 2000000;
    const Bytes mine = pattern(mpi_rank(), kCount, DataType::Float32, 9);
    Bytes values = mine;
    run(world.engine(), reduction_of("large", values.data(), values.data(), kCount, {}));
    std::uint64_t sent = world.engine().stats().bytes_to_other_hosts;
    std::uint64_t of_all = 0;
    MPI_Allreduce(&sent, &of_all, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    const auto domains = static_cast<std::uint64_t>(4 / ranks_per_domain);
    CHECK(of_all == 2 * (domains - 1) * kCount * 4);
  }
}

}  // namespace hvd::test
