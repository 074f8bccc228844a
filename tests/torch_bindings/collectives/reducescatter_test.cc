// Reducescatter of tensors.
#include <utility>

#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kBool;
using hvd::ReduceOp;
using Tensors = std::vector<at::Tensor>;

/// Of a first dimension, where the rows of this rank begin after a reducescatter, and how many they
/// are.
std::pair<std::int64_t, std::int64_t> scattered(std::int64_t count) {
  std::int64_t begin = 0;
  const std::int64_t each = count / hvd::size();
  const std::int64_t more = count % hvd::size();
  for (int r = 0; r < hvd::rank(); ++r) begin += each + (r < more ? 1 : 0);
  return {begin, each + (hvd::rank() < more ? 1 : 0)};
}

TEST_CASE("reducescatter: every type, any number of rows; the rows of the allreduce") {
  for (const auto type : kTypes) {
    for (const auto op : {ReduceOp::Average, ReduceOp::Sum, ReduceOp::Max}) {
      CAPTURE(std::string(at::toString(type)));
      CAPTURE(static_cast<int>(op));
      if (type == kBool || op == ReduceOp::Max) {
        CHECK_THROWS_AS(hvd::reducescatter(data({4}, type, hvd::rank()), {.op = op}),
                        hvd::InvalidArgument);
        continue;
      }
      for (const std::int64_t count : {0, 1, 4, 7}) {
        const auto [begin, own] = scattered(count);
        const at::Tensor whole = reduced(all_data({count, 3}, type, everyone()), op);
        const at::Tensor given = data({count, 3}, type, hvd::rank());
        CHECK(same(hvd::reducescatter(given, {.op = op}),
                   whole.slice(0, begin, begin + own).contiguous()));
        CHECK(same(hvd::reducescatter_async(given, {.name = "rs", .op = op}).wait(),
                   whole.slice(0, begin, begin + own).contiguous()));
        const Tensors group = hvd::grouped_reducescatter({given, torch::ones({count})}, {.op = op});
        CHECK(same(group[0], whole.slice(0, begin, begin + own).contiguous()));
        CHECK(group[1].size(0) == own);
      }
    }
  }
  const at::Tensor scaled =
      hvd::reducescatter(torch::ones({hvd::size()}),
                         {.op = ReduceOp::Sum, .prescale_factor = 0.5, .postscale_factor = 4});
  CHECK(same(scaled, torch::full({1}, 2.0F * static_cast<float>(hvd::size()))));
  CHECK_THROWS_AS(hvd::reducescatter(torch::tensor(1.0)), hvd::InvalidArgument);
}

TEST_CASE("reducescatter of element counts: every form, what is not contiguous, and its gradient") {
  const int ranks = hvd::size();
  std::vector<std::int64_t> counts(static_cast<std::size_t>(ranks), 2);
  counts.front() += 5;
  counts.back() += 4;
  const std::int64_t all = 2 * ranks + 9;
  const std::int64_t own = counts[static_cast<std::size_t>(hvd::rank())];
  std::int64_t begin = 0;
  for (int r = 0; r < hvd::rank(); ++r) begin += counts[static_cast<std::size_t>(r)];
  const auto of = [&](int rank) { return torch::arange(all, at::kDouble) * (rank + 1); };
  at::Tensor expected = torch::zeros({all}, at::kDouble);
  for (int r = 0; r < ranks; ++r) expected += of(r);
  expected = expected.slice(0, begin, begin + own).contiguous();
  const hvd::ReducescatterOptions options{
      .name = "rs.counts", .op = ReduceOp::Sum, .counts = counts};
  const at::Tensor strided =
      torch::stack({of(hvd::rank()), torch::zeros({all}, at::kDouble)}, 1).select(1, 0);
  for (int round = 0; round < 4; ++round) {
    CHECK(same(hvd::reducescatter(of(hvd::rank()), options), expected));
    CHECK(same(hvd::reducescatter(strided, options), expected));
    CHECK(same(hvd::reducescatter_async(of(hvd::rank()).reshape({1, all, 1}), options).wait(),
               expected));
    at::Tensor output = torch::full({own}, -1.0, at::kDouble);
    CHECK(same(hvd::reducescatter_into(output, of(hvd::rank()).reshape({all, 1}), options),
               expected));
    output.fill_(-1);
    CHECK(same(hvd::reducescatter_into_async(output, strided, options).wait(), expected));
  }
  at::Tensor output = torch::empty({own}, at::kDouble), input = torch::empty({all, 1}, at::kDouble);
  auto again = hvd::reducescatter_init(output, input, {.op = ReduceOp::Sum, .counts = counts});
  for (int round = 0; round < 4; ++round) {
    input.copy_(of(hvd::rank()).reshape({all, 1}) * round);
    again.start();
    CHECK(same(again.wait(), expected * round));
  }

  at::Tensor leaf = of(hvd::rank()).reshape({all, 1}).clone().requires_grad_(true);
  (hvd::reducescatter(
       leaf, {.name = "rs.gradient", .op = ReduceOp::Sum, .prescale_factor = 3, .counts = counts}) *
   (hvd::rank() + 1))
      .sum()
      .backward();
  std::vector<at::Tensor> pieces;
  for (int r = 0; r < ranks; ++r)
    pieces.push_back(
        torch::full({counts[static_cast<std::size_t>(r)]}, 3.0 * ranks * (r + 1), at::kDouble));
  CHECK(same(leaf.grad(), torch::cat(pieces).reshape({all, 1})));

  CHECK_THROWS_AS(hvd::grouped_reducescatter({torch::ones({all}), torch::ones({all})}, options),
                  hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::reducescatter(torch::ones({all + 1}), options), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::reducescatter(at::Tensor(), options), hvd::InvalidArgument);
}

TEST_CASE("reducescatter: the whole shape must agree") {
  if (hvd::size() == 1) return;
  const auto said = error_of<hvd::Mismatch>([&] {
    hvd::reducescatter(last() ? torch::ones({17, 23, 57}) : torch::ones({17, 1311}),
                       {.name = "rs"});
  });
  CHECK(contains(said, grouping("float32 [17, 1311]", "float32 [17, 23, 57]")));
  CHECK(hvd::reducescatter(torch::ones({hvd::size()}), {.name = "rs"}).size(0) == 1);
}

}  // namespace
