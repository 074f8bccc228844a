// Gradients of the collectives.
#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kBool, at::kDouble, at::kLong;
using hvd::ReduceOp;
using Tensors = std::vector<at::Tensor>;

TEST_CASE("gradients") {
  const int n = hvd::size();
  const auto weight = [](int rank) { return data({4, 3}, kDouble, rank, 3); };
  Tensors weights;
  for (int r = 0; r < n; ++r) weights.push_back(weight(r));
  const auto input = [] { return data({4, 3}, kDouble, hvd::rank()).requires_grad_(); };

  for (const auto op : {ReduceOp::Average, ReduceOp::Sum}) {
    at::Tensor x = input();
    (hvd::allreduce(x, {.op = op, .prescale_factor = 0.5, .postscale_factor = 3}) *
     weight(hvd::rank()))
        .sum()
        .backward();
    CHECK(torch::allclose(x.grad(), reduced(weights, op) * 1.5, 1e-14, 1e-14));
    x = input();
    (hvd::allreduce_async(x, {.name = "gradient", .op = op}).wait() * weight(hvd::rank()))
        .sum()
        .backward();
    CHECK(same(x.grad(), reduced(weights, op)));
  }
  {  // a group of which one result is not used, and one input needs no gradient
    const at::Tensor x = input();
    const at::Tensor y = input();
    const Tensors results = hvd::grouped_allreduce(
        {x, torch::ones({2}), y, torch::ones({2}, kLong)}, {.op = ReduceOp::Sum});
    (results[0] * weight(hvd::rank())).sum().backward();
    CHECK(same(x.grad(), reduced(weights, ReduceOp::Sum)));
    CHECK((!y.grad().defined() || same(y.grad(), torch::zeros_like(y))));
    CHECK(!results[3].requires_grad());
  }
  {  // through a computation on both sides
    const at::Tensor x = input();
    (hvd::allreduce(x * x, {.op = ReduceOp::Sum}) * weight(hvd::rank())).sum().backward();
    CHECK(
        torch::allclose(x.grad(), 2 * x.detach() * reduced(weights, ReduceOp::Sum), 1e-14, 1e-14));
  }
  {  // allgather: rank r gives r + 1 rows
    const at::Tensor x = data({hvd::rank() + 1, 3}, kDouble, hvd::rank()).requires_grad_();
    const at::Tensor all = hvd::allgather(x);
    CHECK(all.requires_grad());
    Tensors given;
    for (int r = 0; r < n; ++r) given.push_back(data({all.size(0), 3}, kDouble, r, 5));
    (all * given[static_cast<std::size_t>(hvd::rank())]).sum().backward();
    const std::int64_t begin = hvd::rank() * (hvd::rank() + 1) / 2;
    CHECK(
        same(x.grad(), reduced(given, ReduceOp::Average).slice(0, begin, begin + hvd::rank() + 1)));
  }
  for (int root = 0; root < n; ++root) {
    const at::Tensor x = input();
    (hvd::broadcast(x, {.root_rank = root}) * weight(hvd::rank())).sum().backward();
    CHECK(same(x.grad(), hvd::rank() == root ? reduced(weights, ReduceOp::Average)
                                             : torch::zeros({4, 3}, kDouble)));
  }
  CHECK(!hvd::allreduce(torch::ones({2})).requires_grad());
  const torch::NoGradGuard no_gradient;
  CHECK(!hvd::allreduce(input()).requires_grad());
}

TEST_CASE("gradients of groups: masks and integers that travel with features have none") {
  const int n = hvd::size();
  const auto rows = [](std::int64_t count, at::ScalarType type) {
    return data({count, 2}, type, hvd::rank());
  };
  {
    const at::Tensor mask = torch::ones({2, 2}, kBool);
    const at::Tensor a = rows(hvd::rank() + 1, kDouble).requires_grad_();
    const at::Tensor b = rows(3, at::kFloat).requires_grad_();
    const Tensors all = hvd::grouped_allgather({mask, a, rows(1, kLong), b});
    CHECK(all[0].size(0) == 2 * n);
    CHECK(!all[0].requires_grad());
    (all[1].sum() + 2 * all[3].sum()).backward();
    CHECK(same(a.grad(), torch::ones_like(a)));
    CHECK(same(b.grad(), torch::full_like(b, 2)));
  }
  for (const auto op : {ReduceOp::Average, ReduceOp::Sum}) {
    const at::Tensor x = rows(2 * n + 1, kDouble).requires_grad_();
    const Tensors own = hvd::grouped_reducescatter({rows(n, kLong), x}, {.op = op});
    own[1].sum().backward();
    CHECK(same(x.grad(), torch::full_like(x, op == ReduceOp::Sum ? n : 1)));
  }
}

TEST_CASE("gradients: 16- and 32-bit floats") {
  for (const auto type : {at::kHalf, at::kBFloat16, at::kFloat}) {
    const auto input = [&] { return data({2 * hvd::size()}, type, hvd::rank()).requires_grad_(); };
    const auto check = [&](const at::Tensor& x, const at::Tensor& result, double expected) {
      result.sum().backward();
      CHECK((x.grad().scalar_type() == type));
      CHECK(same(x.grad(), torch::full_like(x, expected)));
    };
    at::Tensor x = input();
    check(x, hvd::allreduce(x, {.op = ReduceOp::Sum}), hvd::size());
    x = input();
    check(x, hvd::allgather(x), 1);
    x = input();
    check(x, hvd::alltoall(x).output, 1);
    x = input();
    check(x, hvd::reducescatter(x, {.op = ReduceOp::Sum}), hvd::size());
    x = input();
    check(x, hvd::broadcast(x, {.root_rank = 0}), hvd::rank() == 0 ? 1 : 0);
  }
}

}  // namespace
