/// Alltoall, reducescatter and Adasum across domains, and ranks that have joined, end to end:
/// engines over P2pTransport and P2pBackend, domains of one and of several ranks, against what each
/// rank computes alone from all ranks' patterns.

#include <doctest/doctest.h>

#include <array>
#include <cmath>

#include "ops/kernels/adasum.h"
#include "ops/p2p/backend.h"
#include "tests/support/mpi_cases.h"

namespace hvd::test {
namespace {

std::size_t rank_index() { return static_cast<std::size_t>(mpi_rank()); }
std::size_t ranks() { return static_cast<std::size_t>(mpi_size()); }

/// Where the output of a submission goes whose size is not known before.
std::function<void*(std::size_t, std::int64_t)> into(Bytes& output, std::size_t row_bytes) {
  return [&output, row_bytes](std::size_t /*index*/, std::int64_t rows) {
    output.assign(static_cast<std::size_t>(rows) * row_bytes, std::byte{0x5a});
    return static_cast<void*>(output.data());
  };
}

Bytes slice(const Bytes& bytes, std::size_t begin, std::size_t count) {
  return {bytes.begin() + static_cast<std::ptrdiff_t>(begin),
          bytes.begin() + static_cast<std::ptrdiff_t>(begin + count)};
}

Submission scattering(std::string name, const Bytes& input, std::size_t rows, std::size_t columns,
                      const Reducing& how, Bytes& output) {
  auto submission = reduction_of(std::move(name), input.data(), nullptr, rows, how);
  submission.kind = OpKind::Reducescatter;
  submission.tensors.front().shape.push_back(static_cast<std::int64_t>(columns));
  submission.allocate = into(output, columns * element_bytes(how.dtype));
  return submission;
}

/// This rank's rows of a tensor that everybody has.
Bytes own_rows(const Bytes& whole, std::size_t rows, std::size_t row_bytes) {
  const auto rows_of = [&](std::size_t rank) {
    return static_cast<std::size_t>(scattered_rows(static_cast<std::int64_t>(rows), ranks(), rank));
  };
  std::size_t before = 0;
  for (std::size_t rank = 0; rank < rank_index(); ++rank) before += rows_of(rank);
  return slice(whole, before * row_bytes, rows_of(rank_index()) * row_bytes);
}

/// Neighbours are combined, and their results again: ranks within their domains, then the domains.
Bytes adasum_of(const Topology& topology, const std::vector<Bytes>& inputs, const Reducing& how) {
  const std::size_t count = inputs.front().size() / element_bytes(how.dtype);
  std::vector<int> numbers;
  std::vector<Bytes> results;
  std::vector<double> ranks;  // that each stands for
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    const int domain = topology.domain_of_rank[rank];
    if (std::find(numbers.begin(), numbers.end(), domain) != numbers.end()) continue;
    numbers.push_back(domain);
    std::vector<const void*> in;
    for (std::size_t other = rank; other < inputs.size(); ++other)
      if (topology.domain_of_rank[other] == domain) in.push_back(inputs[other].data());
    ranks.push_back(static_cast<double>(in.size()));
    std::array<void*, 1> out{results.emplace_back(inputs.front().size()).data()};
    kernels::adasum(
        {how.dtype, ReduceOp::Adasum, how.prescale, topology.domains > 1 ? 1 : how.postscale}, in,
        out, count);
  }
  while (results.size() > 1) {
    std::vector<Bytes> next;
    std::vector<double> sums;
    for (std::size_t i = 0; i + 1 < results.size(); i += 2) {
      const std::array<double, 2> of{ranks[i], ranks[i + 1]};
      sums.push_back(of[0] + of[1]);
      std::array<void*, 1> out{next.emplace_back(inputs.front().size()).data()};
      kernels::adasum({how.dtype, ReduceOp::Adasum, 1, results.size() == 2 ? how.postscale : 1},
                      std::array<const void*, 2>{results[i].data(), results[i + 1].data()}, out,
                      count, of);
    }
    if (results.size() % 2 == 1) {
      next.push_back(results.back());
      sums.push_back(ranks.back());
    }
    results = std::move(next);
    ranks = std::move(sums);
  }
  return results.front();
}

std::uint64_t sent_by_all(MpiWorld& world) {
  std::uint64_t sent = world.engine().stats().bytes_to_other_hosts;
  std::uint64_t of_all = 0;
  MPI_Allreduce(&sent, &of_all, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
  return of_all;
}

}  // namespace

TEST_CASE(
    "Adasum averages parallel vectors and adds orthogonal ones, however many ranks each is of") {
  for (std::size_t n = 1; n <= 9; ++n) {
    std::vector<float> parallel(n), all(n * n), result(n);
    std::vector<const void*> in, orthogonal;
    std::vector<double> ranks;
    double sum = 0, number = 0;
    for (std::size_t i = 0; i < n; ++i) {
      parallel[i] = static_cast<float>(i + 1);
      all[i * n + i] = parallel[i];
      ranks.push_back(static_cast<double>(i % 3 + 1));
      sum += ranks.back() * static_cast<double>(i + 1);
      number += ranks.back();
      in.push_back(&parallel[i]);
      orthogonal.push_back(&all[i * n]);
    }
    const std::array<void*, 1> out{result.data()};
    const kernels::Reduction how{DataType::Float32, ReduceOp::Adasum};
    kernels::adasum(how, in, out, 1);
    CHECK(result[0] == doctest::Approx(static_cast<double>(n + 1) / 2));
    kernels::adasum(how, in, out, 1, ranks);
    CHECK(result[0] == doctest::Approx(sum / number));
    kernels::adasum(how, orthogonal, out, n, ranks);
    CHECK(result == parallel);
  }
}

TEST_CASE("alltoall: uneven splits, nothing for some, rows that are not sent; many at once" *
          doctest::timeout(280)) {
  on_all_layouts([](MpiWorld& world) {
    const std::vector<DataType> types{DataType::Float32, DataType::Bool, DataType::BFloat16,
                                      DataType::Int64, DataType::Complex128};
    constexpr std::size_t kTensors = 30;
    constexpr std::size_t kUnsent = 2;
    const auto rows_of = [](std::size_t from, std::size_t to, std::size_t tensor) -> std::size_t {
      if (tensor == 0 || (from * 2 + to + tensor) % 4 == 0) return 0;
      return (tensor == 5 ? 150001 : tensor * tensor * 5) / (from + to * 2 + 1);
    };
    for (unsigned round = 0; round < 2; ++round) {
      std::vector<Bytes> inputs(kTensors);
      std::vector<Bytes> outputs(kTensors);
      std::vector<std::byte*> in_arena;
      std::vector<std::shared_ptr<HandleState>> pending;
      const auto input_of = [&](std::size_t from, std::size_t tensor) {
        std::size_t rows = kUnsent;
        for (std::size_t to = 0; to < ranks(); ++to) rows += rows_of(from, to, tensor);
        return pattern(static_cast<int>(from), rows * 3, types[tensor % types.size()],
                       static_cast<unsigned>(tensor) + round);
      };
      for (std::size_t tensor = 0; tensor < kTensors; ++tensor) {
        const DataType dtype = types[tensor % types.size()];
        inputs[tensor] = input_of(rank_index(), tensor);
        const void* input = inputs[tensor].data();
        if (tensor % 3 == 1) {
          in_arena.push_back(world.arena().allocate(inputs[tensor].size()));
          std::memcpy(in_arena.back(), input, inputs[tensor].size());
          input = in_arena.back();
        }
        const std::size_t row_bytes = 3 * element_bytes(dtype);
        auto submission = submission_of(OpKind::Alltoall, "x" + std::to_string(tensor), input,
                                        nullptr, inputs[tensor].size() / row_bytes, dtype);
        submission.tensors.front().shape.push_back(3);
        for (std::size_t to = 0; to < ranks(); ++to)
          submission.tensors.front().splits.push_back(
              static_cast<std::int64_t>(rows_of(rank_index(), to, tensor)));
        submission.allocate = into(outputs[tensor], row_bytes);
        pending.push_back(world.engine().submit(std::move(submission)));
      }
      for (const auto& one : pending) world.engine().wait(*one);
      std::size_t wrong = 0;
      for (std::size_t tensor = 0; tensor < kTensors; ++tensor) {
        const std::size_t row_bytes = 3 * element_bytes(types[tensor % types.size()]);
        Bytes expected;
        for (std::size_t from = 0; from < ranks(); ++from) {
          std::size_t before = 0;
          for (std::size_t to = 0; to < rank_index(); ++to) before += rows_of(from, to, tensor);
          const Bytes part = slice(input_of(from, tensor), before * row_bytes,
                                   rows_of(from, rank_index(), tensor) * row_bytes);
          expected.insert(expected.end(), part.begin(), part.end());
        }
        if (outputs[tensor] != expected) ++wrong;
      }
      CHECK(wrong == 0);
      for (std::byte* block : in_arena) world.arena().free(block);
    }
  });
}

TEST_CASE("reducescatter: the rows of an allreduce, bit for bit" * doctest::timeout(280)) {
  on_all_layouts([](MpiWorld& world) {
    unsigned salt = 200;
    for (const DataType dtype : {DataType::Float32, DataType::Float16, DataType::BFloat16,
                                 DataType::Int32, DataType::UInt8, DataType::Complex64})
      for (const ReduceOp op : {ReduceOp::Average, ReduceOp::Sum})
        for (const std::size_t rows : {std::size_t{0}, std::size_t{1}, std::size_t{6},
                                       std::size_t{1001}, std::size_t{150000}}) {
          // large ones: some of them
          if (rows > 100000 && dtype != DataType::Float32 && dtype != DataType::Int32) continue;
          const Reducing how{dtype, op, rows == 6 ? 0.5 : 1, rows == 6 ? 3.0 : 1};
          const std::string what = std::string(name_of(dtype)) + " " + std::string(name_of(op)) +
                                   " " + std::to_string(rows);
          CAPTURE(what);
          const auto inputs = patterns(everyone(), rows * 3, dtype, ++salt);
          Bytes output;
          run(world.engine(), scattering(what, inputs[rank_index()], rows, 3, how, output));
          const Bytes expected = own_rows(reduced(world.topology(), everyone(), inputs, how), rows,
                                          3 * element_bytes(dtype));
          const bool right = output == expected;
          CHECK(right);
          Bytes whole = inputs[rank_index()];
          run(world.engine(),
              reduction_of("whole " + what, whole.data(), whole.data(), rows * 3, how));
          const bool same_as_allreduce = output == own_rows(whole, rows, 3 * element_bytes(dtype));
          CHECK(same_as_allreduce);
        }
  });
}

TEST_CASE("reducescatter: many at once, some of them where they are in the arena") {
  on_all_layouts([](MpiWorld& world) {
    constexpr std::size_t kTensors = 100;
    const auto rows_of = [](std::size_t tensor) { return tensor % 9 == 2 ? 0 : tensor * 7; };
    std::vector<Bytes> inputs(kTensors);
    std::vector<Bytes> outputs(kTensors);
    std::vector<std::shared_ptr<HandleState>> pending;
    for (std::size_t tensor = 0; tensor < kTensors; ++tensor) {
      inputs[tensor] = pattern(mpi_rank(), rows_of(tensor) * 5, DataType::Float32,
                               static_cast<unsigned>(tensor));
      pending.push_back(world.engine().submit(
          scattering("s" + std::to_string(tensor), inputs[tensor], rows_of(tensor), 5,
                     {DataType::Float32, ReduceOp::Average}, outputs[tensor])));
    }
    for (const auto& one : pending) world.engine().wait(*one);
    std::size_t wrong = 0;
    for (std::size_t tensor = 0; tensor < kTensors; ++tensor) {
      const auto all = patterns(everyone(), rows_of(tensor) * 5, DataType::Float32,
                                static_cast<unsigned>(tensor));
      const Bytes whole =
          reduced(world.topology(), everyone(), all, {DataType::Float32, ReduceOp::Average});
      if (outputs[tensor] != own_rows(whole, rows_of(tensor), 20)) ++wrong;
    }
    CHECK(wrong == 0);
    constexpr std::size_t kRows = 50000;
    const auto all = patterns(everyone(), kRows, DataType::Float32, 1);
    std::byte* shared = world.arena().allocate(kRows * 4);
    std::memcpy(shared, all[rank_index()].data(), kRows * 4);
    Bytes output;
    auto submission = scattering("in the arena", {}, kRows, 1, {}, output);
    submission.tensors.front().input = shared;
    run(world.engine(), std::move(submission));
    const bool right = output == own_rows(reduced(world.topology(), everyone(), all, {}), kRows, 4);
    CHECK(right);
    CHECK(std::memcmp(shared, all[rank_index()].data(), kRows * 4) == 0);
    world.arena().free(shared);
  });
}

TEST_CASE("Adasum: the ranks of a domain in pairs, then the domains in pairs, tensor by tensor") {
  on_all_layouts([](MpiWorld& world) {
    unsigned salt = 300;
    for (const DataType dtype :
         {DataType::Float32, DataType::Float64, DataType::Float16, DataType::BFloat16}) {
      const std::vector<std::size_t> counts{
          17, 0, 1, 65537, dtype == DataType::Float32 ? std::size_t{1200000} : std::size_t{3000}};
      const Reducing how{dtype, ReduceOp::Adasum, salt == 300 ? 0.5 : 1, salt == 300 ? 3.0 : 1};
      std::vector<Bytes> values;
      std::vector<std::shared_ptr<HandleState>> pending;
      for (const std::size_t count : counts)
        values.push_back(pattern(mpi_rank(), count, dtype, salt + static_cast<unsigned>(count)));
      for (std::size_t i = 0; i < counts.size(); ++i)
        pending.push_back(world.engine().submit(
            reduction_of("a" + std::to_string(salt) + "." + std::to_string(i), values[i].data(),
                         values[i].data(), counts[i], how)));
      for (const auto& one : pending) world.engine().wait(*one);
      for (std::size_t i = 0; i < counts.size(); ++i) {
        const auto inputs =
            patterns(everyone(), counts[i], dtype, salt + static_cast<unsigned>(counts[i]));
        CAPTURE(std::string(name_of(dtype)));
        CAPTURE(counts[i]);
        const bool right = values[i] == adasum_of(world.topology(), inputs, how);
        CHECK(right);
      }
      salt += 10;
    }
  });
}

TEST_CASE("Adasum: orthogonal vectors add, parallel ones average, in the arena and not") {
  on_all_layouts([](MpiWorld& world) {
    constexpr std::size_t kCount = 1000;
    std::vector<float> own(kCount, 0.F);
    for (std::size_t i = rank_index(); i < kCount; i += ranks()) own[i] = static_cast<float>(i + 1);
    auto* shared = reinterpret_cast<float*>(world.arena().allocate(kCount * 4));
    std::fill(shared, shared + kCount, 3.F);
    auto first = world.engine().submit(reduction_of("orthogonal", own.data(), own.data(), kCount,
                                                    {DataType::Float32, ReduceOp::Adasum}));
    auto second = world.engine().submit(
        reduction_of("parallel", shared, shared, kCount, {DataType::Float32, ReduceOp::Adasum}));
    world.engine().wait(*first);
    world.engine().wait(*second);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < kCount; ++i) {
      if (std::abs(own[i] - static_cast<float>(i + 1)) > 1e-3F) ++wrong;
      if (std::abs(shared[i] - 3.F) > 1e-4F) ++wrong;
    }
    CHECK(wrong == 0);
    world.arena().free(reinterpret_cast<std::byte*>(shared));
  });
}

TEST_CASE("allreduce: ranks that have joined count as zeros, whoever is left in whatever domain" *
          doctest::timeout(280)) {
  on_all_layouts([](MpiWorld& world) {
    const std::vector<Reducing> ways{
        {DataType::Float32, ReduceOp::Average}, {DataType::Int32, ReduceOp::Average},
        {DataType::Float16, ReduceOp::Sum},     {DataType::Float32, ReduceOp::Min},
        {DataType::Int32, ReduceOp::Max},       {DataType::Float64, ReduceOp::Product},
        {DataType::Bool, ReduceOp::Min},        {DataType::Float32, ReduceOp::Adasum}};
    for (const bool upwards : {true, false}) {
      // One rank after the other joins.
      const int turn = upwards ? mpi_rank() : mpi_size() - 1 - mpi_rank();
      for (int step = 0; step <= turn; ++step) {
        std::vector<int> present;
        for (const int rank : everyone())
          if ((upwards ? rank : mpi_size() - 1 - rank) >= step) present.push_back(rank);
        const std::size_t absent = ranks() - present.size();
        for (std::size_t i = 0; i < ways.size(); ++i)
          for (const std::size_t count : {std::size_t{17}, std::size_t{70000}}) {
            const Reducing& how = ways[i];
            const std::string what = std::string(name_of(how.dtype)) + " " +
                                     std::string(name_of(how.op)) + " " + std::to_string(count);
            CAPTURE(what);
            CAPTURE(step);
            const auto inputs = patterns(present, count, how.dtype, static_cast<unsigned>(i));
            Bytes values = pattern(mpi_rank(), count, how.dtype, static_cast<unsigned>(i));
            run(world.engine(), reduction_of(what, values.data(), values.data(), count, how));
            if (how.op == ReduceOp::Adasum) {
              if (present.size() == 1) CHECK(values == inputs.front());
              continue;
            }
            const bool right = values == reduced(world.topology(), present, inputs, how, absent);
            CHECK(right);
          }
      }
      Submission join;
      join.kind = OpKind::Join;
      join.name = kJoin;
      const auto pending = world.engine().submit(std::move(join), After::Wait);
      world.engine().wait(*pending);
      CHECK(pending->value == (upwards ? mpi_size() - 1 : 0));
    }
  });
  for (const Layout& layout : layouts()) {
    CAPTURE(std::string(layout.name));
    MpiWorld world({layout.domain_of, {}, false, {}});
    // The last rank is left alone, with tensors that were brought into the arena where its domain
    // has others.
    if (mpi_rank() == mpi_size() - 1) {
      Bytes values = pattern(mpi_rank(), 5000, DataType::Float32, 1);
      const Bytes expected = values;
      run(world.engine(), reduction_of("alone", values.data(), values.data(), 5000,
                                       {DataType::Float32, ReduceOp::Sum}));
      CHECK(values == expected);
    }
    Submission join;
    join.kind = OpKind::Join;
    join.name = kJoin;
    run(world.engine(), std::move(join));
    CHECK(world.arena().used_bytes() == 0);
  }
}

TEST_CASE("what was staged is given back") {
  for (const Layout& layout : layouts()) {
    CAPTURE(std::string(layout.name));
    MpiWorld world({layout.domain_of, {}, false, {}});
    const Bytes input = pattern(mpi_rank(), 4000 * ranks(), DataType::Float32, 1);
    Bytes output;
    run(world.engine(), scattering("s", input, 4000 * ranks(), 1, {}, output));
    auto exchange = submission_of(OpKind::Alltoall, "x", input.data(), nullptr, 4000 * ranks(),
                                  DataType::Float32);
    exchange.tensors.front().splits.assign(ranks(), 4000);
    exchange.allocate = into(output, 4);
    run(world.engine(), std::move(exchange));
    Bytes values = input;
    run(world.engine(), reduction_of("a", values.data(), values.data(), 4000,
                                     {DataType::Float32, ReduceOp::Adasum}));
    CHECK(world.arena().used_bytes() == 0);
  }
}

TEST_CASE(
    "bytes to other hosts: what each needs and no more; none where all ranks are on one host") {
  if (mpi_size() != 4) return;
  constexpr std::size_t kRows = 400000;
  for (const int ranks_per_domain : {1, 2})
    for (const bool one_host : {false, true}) {
      CAPTURE(ranks_per_domain);
      const Dealing host = [one_host, ranks_per_domain](int rank) {
        return one_host ? 0 : rank / ranks_per_domain;
      };
      MpiWorld world({[&](int rank) { return rank / ranks_per_domain; }, {}, true, host});
      const auto domains = static_cast<std::uint64_t>(4 / ranks_per_domain);
      const Bytes input = pattern(mpi_rank(), kRows, DataType::Float32, 9);
      Bytes output;
      run(world.engine(), scattering("s", input, kRows, 1, {}, output));
      const std::uint64_t scattered = sent_by_all(world);
      CHECK(scattered == (one_host ? 0 : (domains - 1) * kRows * 4));
      auto exchange =
          submission_of(OpKind::Alltoall, "x", input.data(), nullptr, kRows, DataType::Float32);
      exchange.tensors.front().splits.assign(4, kRows / 4);
      exchange.allocate = into(output, 4);
      run(world.engine(), std::move(exchange));
      const auto others = static_cast<std::uint64_t>(4 - ranks_per_domain);
      CHECK(sent_by_all(world) - scattered == (one_host ? 0 : 4 * others * (kRows / 4) * 4));
    }
}

TEST_CASE("a failed world drops what it has begun of these, too") {
  if (mpi_size() < 2) return;
  for (const Layout& layout : layouts()) {
    CAPTURE(std::string(layout.name));
    {
      constexpr std::size_t kCount = 2000000;
      MpiWorld world({layout.domain_of, {}, false, {}});
      const Bytes values = pattern(mpi_rank(), kCount, DataType::Float32, 1);
      Bytes summed = values;
      Bytes scattered;
      Bytes exchanged;
      std::vector<std::shared_ptr<HandleState>> pending;
      pending.push_back(world.engine().submit(reduction_of(
          "adasum", summed.data(), summed.data(), kCount, {DataType::Float32, ReduceOp::Adasum})));
      pending.push_back(
          world.engine().submit(scattering("scatter", values, kCount, 1, {}, scattered)));
      auto exchange = submission_of(OpKind::Alltoall, "exchange", values.data(), nullptr, kCount,
                                    DataType::Float32);
      exchange.tensors.front().splits.assign(ranks(), static_cast<std::int64_t>(kCount / ranks()));
      exchange.allocate = into(exchanged, 4);
      pending.push_back(world.engine().submit(std::move(exchange)));
      MPI_Barrier(MPI_COMM_WORLD);
      if (mpi_rank() == mpi_size() - 1)
        world.board().set_failure({Status::Code::BackendError, "the test says so"});
      for (const auto& one : pending) {
        try {
          world.engine().wait(*one);
        } catch (const BackendError& error) {
          CHECK(std::string(error.what()).find("the test says so") != std::string::npos);
        }
      }
    }
    MpiWorld world({layout.domain_of, {}, false, {}});
    const Bytes input = pattern(mpi_rank(), 1000, DataType::Float32, 3);
    Bytes output;
    run(world.engine(), scattering("next", input, 1000, 1, {}, output));
    const auto all = patterns(everyone(), 1000, DataType::Float32, 3);
    CHECK(output == own_rows(reduced(world.topology(), everyone(), all, {}), 1000, 4));
  }
}

}  // namespace hvd::test
