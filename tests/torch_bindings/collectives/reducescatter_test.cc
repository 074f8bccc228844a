// Reducescatter of tensors.
#include <utility>

#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kBool;
using hvd::ReduceOp;
using Tensors = std::vector<at::Tensor>;

/// Of a first dimension, where the rows of this rank begin after a reducescatter, and how many they are.
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

}  // namespace
