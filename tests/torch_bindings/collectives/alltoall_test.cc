// Alltoall of tensors, and its gradients with those of reducescatter.
#include <cstdint>
#include <limits>
#include <numeric>

#include "tests/torch_bindings/support.h"
#include "torch_bindings/collectives/in_place.h"

namespace alltoall_test {
namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat, at::kInt, at::kLong;
using hvd::ReduceOp;
using Tensors = std::vector<at::Tensor>;

at::Tensor ints(const std::vector<std::int64_t>& values, at::ScalarType type = kInt) {
  return torch::tensor(values).to(type);
}

/// Rows that `from` sends to `to`.
std::int64_t rows(int from, int to) { return (from * 2 + to) % 3; }
std::vector<std::int64_t> rows_from(int from) {
  std::vector<std::int64_t> all;
  for (int to = 0; to < hvd::size(); ++to) all.push_back(rows(from, to));
  return all;
}
std::int64_t sum(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

TEST_CASE("alltoall: every type, even and uneven, with a tail that is not sent") {
  const int n = hvd::size();
  for (const auto type : kTypes) {
    CAPTURE(std::string(at::toString(type)));
    Tensors parts;
    for (int from = 0; from < n; ++from)
      parts.push_back(data({2 * n, 3}, type, from).slice(0, 2 * hvd::rank(), 2 * hvd::rank() + 2));
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
      const auto uneven =
          hvd::alltoall(given(hvd::rank()),
                        {.name = "uneven", .splits = ints(rows_from(hvd::rank()), splits_type)});
      CHECK(same(uneven.output, torch::cat(parts)));
      CHECK(same(uneven.received_splits, ints(received)));
    }
    const auto later =
        hvd::alltoall_async(given(hvd::rank()), {.splits = ints(rows_from(hvd::rank()))});
    CHECK(same(later.wait().output, torch::cat(parts)));
    CHECK(same(later.wait().received_splits, ints(received)));
  }
}

TEST_CASE("alltoall: wrong splits are refused at the call and leave no trace") {
  const int n = hvd::size();
  const at::Tensor tensor = torch::ones({4 * n + (n > 1 ? 1 : 0)});
  const auto refused = [&](const at::Tensor& splits) {
    return error_of<hvd::InvalidArgument>(
        [&] { hvd::alltoall(tensor, {.name = "s", .splits = splits}); });
  };
  CHECK(contains(refused(ints(std::vector<std::int64_t>(static_cast<std::size_t>(n), 9))),
                 "do not fit into the"));
  CHECK(contains(refused(ints(std::vector<std::int64_t>(static_cast<std::size_t>(n + 1), 0))),
                 "splits for"));
  CHECK(contains(refused(ints(std::vector<std::int64_t>(static_cast<std::size_t>(n), -1))),
                 "splits"));
  CHECK(contains(refused(torch::ones({n, 1}, kInt)), "1-D"));
  CHECK(contains(refused(torch::ones({n}, kFloat)), "int32"));
  if (n > 1)
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::alltoall(tensor); }),
                   "cannot be divided evenly"));
  const at::Tensor scalar = torch::tensor(1.0);
  const at::Tensor wanted = torch::tensor(1.0).requires_grad_();
  CHECK_THROWS_AS(hvd::alltoall(scalar), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::alltoall(wanted), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::alltoall_async(wanted), hvd::InvalidArgument);
  CHECK(hvd::alltoall(torch::ones({n})).output.sizes() == at::IntArrayRef({n}));
}

TEST_CASE("alltoall: received splits are int32, and int64 where they do not fit") {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const at::Tensor fits = hvd::detail::received_splits({3, kMost}, at::kCPU);
  CHECK((fits.scalar_type() == at::kInt));
  CHECK(fits[1].item<std::int64_t>() == kMost);
  const at::Tensor wide = hvd::detail::received_splits({3, kMost + 1}, at::kCPU);
  CHECK((wide.scalar_type() == at::kLong));
  CHECK(wide[1].item<std::int64_t>() == kMost + 1);
}

TEST_CASE("alltoall: dimensions after the first must agree") {
  if (hvd::size() == 1) return;
  const at::Tensor tensor = last() ? torch::ones({hvd::size(), 3}) : torch::ones({hvd::size(), 2});
  const auto said = error_of<hvd::Mismatch>([&] { hvd::alltoall(tensor, {.name = "dims"}); });
  CHECK(contains(said, "alltoall 'dims': the shape differs between ranks: "));
  const std::string n = std::to_string(hvd::size());
  CHECK(contains(said, grouping("float32 [" + n + ", 2]", "float32 [" + n + ", 3]")));
  CHECK(hvd::alltoall(torch::ones({hvd::size(), 2}), {.name = "dims"}).output.size(0) ==
        hvd::size());
}

TEST_CASE("gradients of alltoall and reducescatter") {
  const int n = hvd::size();
  const auto splits = rows_from(hvd::rank());
  at::Tensor x = data({sum(splits) + 2, 2}, kDouble, hvd::rank()).requires_grad_(true);
  const auto exchanged = hvd::alltoall(x, {.splits = ints(splits)});
  (exchanged.output * (hvd::rank() + 1)).sum().backward();
  Tensors expected;
  for (int to = 0; to < n; ++to)
    expected.push_back(torch::full({rows(hvd::rank(), to), 2}, to + 1.0, kDouble));
  expected.push_back(torch::zeros({2, 2}, kDouble));
  CHECK(same(x.grad(), torch::cat(expected)));

  for (const auto op : {ReduceOp::Average, ReduceOp::Sum}) {
    const std::int64_t count = 2 * n + 1;
    at::Tensor y = data({count}, kDouble, hvd::rank()).requires_grad_(true);
    (hvd::reducescatter(y, {.op = op, .prescale_factor = 0.5, .postscale_factor = 3}) *
     (hvd::rank() + 1))
        .sum()
        .backward();
    Tensors parts;
    for (int r = 0; r < n; ++r)
      parts.push_back(torch::full({count / n + (r < count % n ? 1 : 0)}, r + 1.0, kDouble));
    CHECK(same(y.grad(), torch::cat(parts) * (1.5 * (op == ReduceOp::Sum ? n : 1))));
  }
}

}  // namespace

}  // namespace alltoall_test
