// Allreduce of sparse tensors.
#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat, at::kHalf, at::kLong;
using hvd::ReduceOp;
using Tensors = std::vector<at::Tensor>;

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
        const at::Tensor result =
            hvd::sparse_allreduce(of(hvd::rank()).to_sparse(dims), {.name = "sp", .op = op});
        CHECK(result.is_sparse());
        CHECK(same(result.to_dense(), expected));
      }
      CHECK(same(
          hvd::sparse_allreduce_async(of(hvd::rank()).to_sparse(), {.op = op}).wait().to_dense(),
          expected));
    }
  }
  // Sums of 16-bit floats and of integers do not overflow on the way, and integers are scaled in
  // double.
  const auto one_of = [](double value, at::ScalarType type, const hvd::AllreduceOptions& options) {
    return hvd::sparse_allreduce(torch::full({1}, value, at::kDouble).to(type).to_sparse(), options)
        .to_dense()
        .item<double>();
  };
  CHECK(one_of(60000, kHalf, {.name = "half"}) == 60000);
  CHECK(one_of(100, at::kChar, {.name = "char"}) == 100);
  CHECK(one_of(16777217, kLong, {.name = "long", .op = ReduceOp::Sum, .prescale_factor = 2}) ==
        33554434.0 * hvd::size());
  CHECK(one_of(16777217, kLong, {.name = "after", .op = ReduceOp::Sum, .postscale_factor = 2}) ==
        33554434.0 * hvd::size());
  CHECK_THROWS_AS(hvd::sparse_allreduce(torch::ones({2})), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::sparse_allreduce(torch::ones({2}).to_sparse(), {.op = ReduceOp::Max}),
                  hvd::InvalidArgument);
  if (hvd::size() == 1) return;
  const auto said = error_of<hvd::Mismatch>(
      [&] { hvd::sparse_allreduce(torch::ones({last() ? 3 : 2}).to_sparse(), {.name = "sized"}); });
  CHECK(contains(said, "'sized'"));
  CHECK(contains(said, grouping("float32 [2]", "float32 [3]")));
  const at::Tensor two = torch::ones({2}).to_sparse();
  const auto op = error_of<hvd::Mismatch>([&] {
    hvd::sparse_allreduce(two, {.name = "op", .op = last() ? ReduceOp::Sum : ReduceOp::Average});
  });
  CHECK(contains(op, "reduce op"));
  CHECK(contains(op, grouping("average * 1 * 1", "sum * 1 * 1")));
  const auto type = error_of<hvd::Mismatch>([&] {
    hvd::sparse_allreduce(two.to(last() ? kDouble : kFloat),
                          {.name = "type", .compression = hvd::Compression::fp16()});
  });
  CHECK(contains(type, "'type'"));
  CHECK(contains(type, grouping("float32 [2]", "float64 [2]")));
  CHECK_THROWS_AS(
      hvd::sparse_allreduce(two, {.name = "scale", .prescale_factor = last() ? 2.0 : 1.0}),
      hvd::Mismatch);
}

}  // namespace
