// Alltoall, reducescatter, sparse allreduce, Adasum, join and process sets made later, on at::Tensor.
#include <numeric>
#include <thread>

#include "tests/torch/support.h"

namespace {

using namespace hvd::test;
using at::kBFloat16, at::kBool, at::kByte, at::kChar, at::kComplexDouble, at::kComplexFloat, at::kDouble, at::kFloat, at::kHalf, at::kInt,
    at::kLong, at::kShort;
using hvd::ReduceOp;
using Tensors = std::vector<at::Tensor>;

at::Tensor ints(const std::vector<std::int64_t>& values, at::ScalarType type = kInt) { return torch::tensor(values).to(type); }

/// Rows that `from` sends to `to`.
std::int64_t rows(int from, int to) { return (from * 2 + to) % 3; }
std::vector<std::int64_t> rows_from(int from) {
  std::vector<std::int64_t> all;
  for (int to = 0; to < hvd::size(); ++to) all.push_back(rows(from, to));
  return all;
}
std::int64_t sum(const std::vector<std::int64_t>& values) { return std::accumulate(values.begin(), values.end(), std::int64_t{0}); }

/// Of a first dimension, where the rows of this rank begin after a reducescatter, and how many they are.
std::pair<std::int64_t, std::int64_t> scattered(std::int64_t count) {
  std::int64_t begin = 0;
  const std::int64_t each = count / hvd::size();
  const std::int64_t more = count % hvd::size();
  for (int r = 0; r < hvd::rank(); ++r) begin += each + (r < more ? 1 : 0);
  return {begin, each + (hvd::rank() < more ? 1 : 0)};
}

TEST_CASE("alltoall: every type, even and uneven, with a tail that is not sent") {
  const int n = hvd::size();
  for (const auto type : kTypes) {
    CAPTURE(std::string(at::toString(type)));
    Tensors parts;
    for (int from = 0; from < n; ++from) parts.push_back(data({2 * n, 3}, type, from).slice(0, 2 * hvd::rank(), 2 * hvd::rank() + 2));
    const auto even = hvd::alltoall(data({2 * n, 3}, type, hvd::rank()));
    CHECK(same(even.output, torch::cat(parts)));
    CHECK(same(even.received_splits, torch::full({n}, 2, kInt)));

    const auto given = [&](int from) { return data({sum(rows_from(from)) + 1, 2}, type, from, 2); };
    parts.clear();
    std::vector<std::int64_t> received;
    for (int from = 0; from < n; ++from) {
      std::int64_t before = 0;
      for (int to = 0; to < hvd::rank(); ++to) before += rows(from, to);
      parts.push_back(given(from).slice(0, before, before + rows(from, hvd::rank())));
      received.push_back(rows(from, hvd::rank()));
    }
    for (const auto splits_type : {kInt, kLong}) {
      const auto uneven = hvd::alltoall(given(hvd::rank()), {.name = "uneven", .splits = ints(rows_from(hvd::rank()), splits_type)});
      CHECK(same(uneven.output, torch::cat(parts)));
      CHECK(same(uneven.received_splits, ints(received)));
    }
    const auto later = hvd::alltoall_async(given(hvd::rank()), {.splits = ints(rows_from(hvd::rank()))});
    CHECK(same(later.wait().output, torch::cat(parts)));
    CHECK(same(later.wait().received_splits, ints(received)));
  }
}

TEST_CASE("alltoall: wrong splits are refused at the call and leave no trace") {
  const int n = hvd::size();
  const at::Tensor tensor = torch::ones({4 * n + (n > 1 ? 1 : 0)});
  const auto refused = [&](const at::Tensor& splits) {
    return error_of<hvd::InvalidArgument>([&] { hvd::alltoall(tensor, {.name = "s", .splits = splits}); });
  };
  CHECK(contains(refused(ints(std::vector<std::int64_t>(static_cast<std::size_t>(n), 9))), "do not fit into the"));
  CHECK(contains(refused(ints(std::vector<std::int64_t>(static_cast<std::size_t>(n + 1), 0))), "splits for"));
  CHECK(contains(refused(ints(std::vector<std::int64_t>(static_cast<std::size_t>(n), -1))), "splits"));
  CHECK(contains(refused(torch::ones({n, 1}, kInt)), "1-D"));
  CHECK(contains(refused(torch::ones({n}, kFloat)), "int32"));
  if (n > 1) CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::alltoall(tensor); }), "cannot be divided evenly"));
  CHECK_THROWS_AS(hvd::alltoall(torch::tensor(1.0)), hvd::InvalidArgument);
  CHECK(hvd::alltoall(torch::ones({n})).output.sizes() == at::IntArrayRef({n}));
}

TEST_CASE("alltoall: dimensions after the first must agree") {
  if (hvd::size() == 1) return;
  const at::Tensor tensor = last() ? torch::ones({hvd::size(), 3}) : torch::ones({hvd::size(), 2});
  const auto said = error_of<hvd::Mismatch>([&] { hvd::alltoall(tensor, {.name = "dims"}); });
  CHECK(contains(said, "alltoall 'dims': the shape differs between ranks: "));
  const std::string n = std::to_string(hvd::size());
  CHECK(contains(said, grouping("float32 [" + n + ", 2]", "float32 [" + n + ", 3]")));
  CHECK(hvd::alltoall(torch::ones({hvd::size(), 2}), {.name = "dims"}).output.size(0) == hvd::size());
}

TEST_CASE("reducescatter: every type, any number of rows; the rows of the allreduce") {
  for (const auto type : kTypes) {
    for (const auto op : {ReduceOp::Average, ReduceOp::Sum, ReduceOp::Max}) {
      CAPTURE(std::string(at::toString(type)));
      CAPTURE(static_cast<int>(op));
      if (type == kBool || op == ReduceOp::Max) {
        CHECK_THROWS_AS(hvd::reducescatter(data({4}, type, hvd::rank()), {.op = op}), hvd::InvalidArgument);
        continue;
      }
      for (const std::int64_t count : {0, 1, 4, 7}) {
        const auto [begin, own] = scattered(count);
        const at::Tensor whole = reduced(all_data({count, 3}, type, everyone()), op);
        const at::Tensor given = data({count, 3}, type, hvd::rank());
        CHECK(same(hvd::reducescatter(given, {.op = op}), whole.slice(0, begin, begin + own).contiguous()));
        CHECK(same(hvd::reducescatter_async(given, {.name = "rs", .op = op}).wait(), whole.slice(0, begin, begin + own).contiguous()));
        const Tensors group = hvd::grouped_reducescatter({given, torch::ones({count})}, {.op = op});
        CHECK(same(group[0], whole.slice(0, begin, begin + own).contiguous()));
        CHECK(group[1].size(0) == own);
      }
    }
  }
  const at::Tensor scaled =
      hvd::reducescatter(torch::ones({hvd::size()}), {.op = ReduceOp::Sum, .prescale_factor = 0.5, .postscale_factor = 4});
  CHECK(same(scaled, torch::full({1}, 2.0F * static_cast<float>(hvd::size()))));
  CHECK_THROWS_AS(hvd::reducescatter(torch::tensor(1.0)), hvd::InvalidArgument);
}

TEST_CASE("reducescatter: the whole shape must agree") {
  if (hvd::size() == 1) return;
  const auto said = error_of<hvd::Mismatch>([&] {
    hvd::reducescatter(last() ? torch::ones({17, 23, 57}) : torch::ones({17, 1311}), {.name = "rs"});
  });
  CHECK(contains(said, grouping("float32 [17, 1311]", "float32 [17, 23, 57]")));
  CHECK(hvd::reducescatter(torch::ones({hvd::size()}), {.name = "rs"}).size(0) == 1);
}

TEST_CASE("gradients of alltoall and reducescatter") {
  const int n = hvd::size();
  const auto splits = rows_from(hvd::rank());
  at::Tensor x = data({sum(splits) + 2, 2}, kDouble, hvd::rank()).requires_grad_(true);
  const auto exchanged = hvd::alltoall(x, {.splits = ints(splits)});
  (exchanged.output * (hvd::rank() + 1)).sum().backward();
  Tensors expected;
  for (int to = 0; to < n; ++to) expected.push_back(torch::full({rows(hvd::rank(), to), 2}, to + 1.0, kDouble));
  expected.push_back(torch::zeros({2, 2}, kDouble));
  CHECK(same(x.grad(), torch::cat(expected)));

  for (const auto op : {ReduceOp::Average, ReduceOp::Sum}) {
    const std::int64_t count = 2 * n + 1;
    at::Tensor y = data({count}, kDouble, hvd::rank()).requires_grad_(true);
    (hvd::reducescatter(y, {.op = op, .prescale_factor = 0.5, .postscale_factor = 3}) * (hvd::rank() + 1)).sum().backward();
    Tensors parts;
    for (int r = 0; r < n; ++r) parts.push_back(torch::full({count / n + (r < count % n ? 1 : 0)}, r + 1.0, kDouble));
    CHECK(same(y.grad(), torch::cat(parts) * (1.5 * (op == ReduceOp::Sum ? n : 1))));
  }
}

TEST_CASE("sparse allreduce: the sum of what is where, as dense would give") {
  for (const auto type : {kFloat, kDouble, kHalf, kLong}) {
    for (const auto op : {ReduceOp::Average, ReduceOp::Sum}) {
      CAPTURE(std::string(at::toString(type)));
      const auto of = [&](int r) {
        at::Tensor dense = data({6, 4, 2}, type, r);
        dense.index_put_({torch::arange(6).add(r).remainder(3).ne(0)}, 0);
        return dense;
      };
      Tensors all;
      for (int r = 0; r < hvd::size(); ++r) all.push_back(of(r));
      const at::Tensor expected = reduced(all, op);
      for (const int dims : {1, 2, 3}) {
        const at::Tensor result = hvd::sparse_allreduce(of(hvd::rank()).to_sparse(dims), {.name = "sp", .op = op});
        CHECK(result.is_sparse());
        CHECK(same(result.to_dense(), expected));
      }
      CHECK(same(hvd::sparse_allreduce_async(of(hvd::rank()).to_sparse(), {.op = op}).wait().to_dense(), expected));
    }
  }
  CHECK_THROWS_AS(hvd::sparse_allreduce(torch::ones({2})), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::sparse_allreduce(torch::ones({2}).to_sparse(), {.op = ReduceOp::Max}), hvd::InvalidArgument);
  if (hvd::size() == 1) return;
  const auto said = error_of<hvd::Mismatch>([&] { hvd::sparse_allreduce(torch::ones({last() ? 3 : 2}).to_sparse(), {.name = "sized"}); });
  CHECK(contains(said, "'sized'"));
  CHECK(contains(said, "[3]"));
}

TEST_CASE("adasum: orthogonal gradients add, parallel ones average; fp16 does not overflow") {
  const int n = hvd::size();
  at::Tensor orthogonal = torch::zeros({4});
  orthogonal[hvd::rank() % 4] = 3.0;
  at::Tensor expected = torch::zeros({4});
  for (int r = 0; r < n; ++r) expected[r % 4] += 3.0;
  if (n <= 4) CHECK(torch::allclose(hvd::allreduce(orthogonal, {.op = ReduceOp::Adasum}), expected));
  const at::Tensor parallel = torch::full({1001}, 300.0).to(kHalf);
  CHECK(same(hvd::allreduce(parallel, {.op = ReduceOp::Adasum}), parallel));
  const Tensors group = hvd::grouped_allreduce({orthogonal, torch::full({5}, 2.0)}, {.op = ReduceOp::Adasum});
  CHECK(torch::allclose(group[1], torch::full({5}, 2.0)));
  CHECK_THROWS_AS(hvd::allreduce(torch::ones({2}, kInt), {.op = ReduceOp::Adasum}), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::allreduce(torch::ones({2}, kComplexFloat), {.op = ReduceOp::Product}), hvd::InvalidArgument);
}

TEST_CASE("join: uneven numbers of steps") {
  const int n = hvd::size();
  for (int step = 0; step <= hvd::rank(); ++step) {
    const at::Tensor mean = hvd::allreduce(torch::full({3}, 6.0), {.name = "grad"});
    CHECK(torch::allclose(mean, torch::full({3}, 6.0 * (n - step) / n)));
  }
  if (last() && n > 1) {
    CHECK(contains(error_of<hvd::Joined>([] { hvd::allgather(torch::ones({1}), {.name = "g"}); }), "allgather 'g'"));
    CHECK_THROWS_AS(hvd::alltoall(torch::ones({hvd::size()}), {.name = "a"}), hvd::Joined);
    CHECK_THROWS_AS(hvd::reducescatter(torch::ones({1}), {.name = "r"}), hvd::Joined);
    hvd::barrier();
  }
  CHECK(hvd::join() == n - 1);
  CHECK(hvd::allgather(torch::ones({1}), {.name = "g"}).size(0) == n);
}

TEST_CASE("process sets made and removed later, each operation on one") {
  const int n = hvd::size();
  if (n == 1) return;
  std::vector<int> some{0, n - 1};
  const hvd::ProcessSet set = hvd::add_process_set({n - 1, 0});
  CHECK(set.ranks() == some);
  CHECK(set.size() == 2);
  const bool included = hvd::rank() == 0 || last();
  CHECK(set.included() == included);
  CHECK(set.rank() == (hvd::rank() == 0 ? 0 : last() ? 1 : -1));
  const at::Tensor mine = torch::full({2}, hvd::rank() + 1.0);
  if (included) {
    CHECK(same(hvd::allreduce(mine, {.op = ReduceOp::Sum, .process_set = set}), torch::full({2}, n + 1.0)));
    CHECK(same(hvd::broadcast(mine, {.root_rank = n - 1, .process_set = set}), torch::full({2}, static_cast<double>(n))));
    CHECK(hvd::allgather(mine, {.process_set = set}).size(0) == 4);
    CHECK(same(hvd::alltoall(mine, {.process_set = set}).output, torch::tensor({1.0F, static_cast<float>(n)})));
    CHECK(same(hvd::reducescatter(mine, {.op = ReduceOp::Sum, .process_set = set}), torch::full({1}, n + 1.0)));
    CHECK(same(hvd::sparse_allreduce(mine.to_sparse(), {.op = ReduceOp::Sum, .process_set = set}).to_dense(), torch::full({2}, n + 1.0)));
    CHECK(hvd::join(set) >= 0);
    hvd::barrier(set);
    if (n > 2) CHECK_THROWS_AS(hvd::broadcast(mine, {.root_rank = 1, .process_set = set}), hvd::InvalidArgument);
  } else {
    CHECK_THROWS_AS(hvd::allreduce(mine, {.process_set = set}), hvd::InvalidArgument);
  }
  hvd::remove_process_set(set);
  CHECK_THROWS_AS(hvd::allreduce(mine, {.process_set = set}), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::add_process_set({0, n}), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::add_process_set({0, 0}), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::remove_process_set(hvd::global_process_set()), hvd::InvalidArgument);
}

TEST_CASE("one name, different operations: a Mismatch on every rank") {
  if (hvd::size() == 1) return;
  const at::Tensor tensor = torch::ones({2});
  const auto said =
      error_of<hvd::Mismatch>([&] { last() ? hvd::broadcast(tensor, {.name = "x"}) : hvd::allreduce(tensor, {.name = "x"}); });
  CHECK(contains(said, "'x': the operation differs between ranks: " + grouping("allreduce", "broadcast")));
  CHECK(same(hvd::allreduce(tensor, {.name = "x"}), tensor));
}

}  // namespace
