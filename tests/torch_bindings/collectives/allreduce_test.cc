// Allreduce of tensors: types, operations, scales, compression, Adasum.
#include <optional>

#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kBFloat16, at::kBool, at::kByte, at::kChar, at::kComplexFloat, at::kDouble, at::kFloat,
    at::kHalf, at::kInt, at::kLong, at::kShort;
using hvd::ReduceOp;
using Tensors = std::vector<at::Tensor>;

const std::vector<ReduceOp> kOps{ReduceOp::Average, ReduceOp::Sum,     ReduceOp::Min,
                                 ReduceOp::Max,     ReduceOp::Product, ReduceOp::Adasum};

/// SEMANTICS, "Collectives"; nothing where it leaves the pair open.
std::optional<bool> allowed(at::ScalarType type, ReduceOp op) {
  if (op == ReduceOp::Adasum) return std::nullopt;
  const bool extreme = op == ReduceOp::Min || op == ReduceOp::Max;
  if (type == kBool) return extreme;
  if (at::isComplexType(type) && op == ReduceOp::Product) return std::nullopt;
  return !(at::isComplexType(type) && extreme);
}

TEST_CASE("allreduce: Adasum averages parallel vectors and adds orthogonal ones, of any ranks") {
  const int ranks = hvd::size();
  const at::Tensor parallel = torch::ones({5}, kDouble) * (hvd::rank() + 1);
  CHECK(torch::allclose(hvd::allreduce(parallel, {.op = ReduceOp::Adasum}),
                        torch::ones({5}, kDouble) * (ranks + 1) / 2));
  at::Tensor orthogonal = torch::zeros({ranks}, kFloat);
  orthogonal[hvd::rank()] = hvd::rank() + 2;
  CHECK(torch::allclose(hvd::allreduce(orthogonal, {.op = ReduceOp::Adasum}),
                        torch::arange(2, ranks + 2, kFloat)));
}

TEST_CASE("allreduce: every type and operation, in every form") {
  const std::vector<std::int64_t> sizes{3, 5};
  for (const auto type : kTypes) {
    for (const auto op : kOps) {
      CAPTURE(std::string(at::toString(type)));
      CAPTURE(static_cast<int>(op));
      const auto is_allowed = allowed(type, op);
      const at::Tensor given = data(sizes, type, hvd::rank());
      if (!is_allowed) continue;
      if (!*is_allowed) {
        const auto before = hvd::stats();
        CHECK_THROWS_AS(hvd::allreduce(given, {.name = "refused", .op = op}), hvd::InvalidArgument);
        CHECK_THROWS_AS(hvd::allreduce_(given, {.op = op}), hvd::InvalidArgument);
        CHECK_THROWS_AS(hvd::allreduce_async(given, {.name = "refused", .op = op}),
                        hvd::InvalidArgument);
        CHECK_THROWS_AS(hvd::allreduce_async_(given, {.op = op}), hvd::InvalidArgument);
        CHECK_THROWS_AS(hvd::grouped_allreduce({given, given}, {.op = op}), hvd::InvalidArgument);
        CHECK(hvd::stats().tensors_submitted == before.tensors_submitted);
        CHECK(hvd::stats().bytes_reduced == before.bytes_reduced);
        continue;
      }
      const at::Tensor expected = reduced(all_data(sizes, type, everyone()), op);
      const at::Tensor fresh = hvd::allreduce(given, {.op = op});
      CHECK(same(fresh, expected));
      CHECK(same(given, data(sizes, type, hvd::rank())));
      at::Tensor changed = given.clone();
      CHECK(hvd::allreduce_(changed, {.op = op}).is_same(changed));
      CHECK(same(changed, expected));
      CHECK(same(hvd::allreduce_async(given, {.op = op}).wait(), expected));
      changed = given.clone();
      CHECK(hvd::allreduce_async_(changed, {.op = op}).wait().is_same(changed));
      CHECK(same(changed, expected));
      const Tensors group =
          hvd::grouped_allreduce({given, data({2}, type, hvd::rank(), 1)}, {.op = op});
      REQUIRE(group.size() == 2);
      CHECK(same(group[0], expected));
      CHECK(same(group[1], reduced(all_data({2}, type, everyone(), 1), op)));
    }
  }
  // The refusals have not advanced the numbers of unnamed calls.
  CHECK(same(hvd::allreduce(torch::ones({1}, kLong), {.op = ReduceOp::Sum}),
             torch::full({1}, hvd::size(), kLong)));
}

TEST_CASE("allreduce: large tensors and in place in grouped and asynchronous form") {
  const std::vector<std::int64_t> sizes{300001};
  const auto expected = [&](int variant) {
    return reduced(all_data(sizes, kFloat, everyone(), variant), ReduceOp::Average);
  };
  Tensors group{data(sizes, kFloat, hvd::rank(), 0), data(sizes, kFloat, hvd::rank(), 1)};
  const Tensors given = group;
  const Tensors results = hvd::grouped_allreduce_(group);
  for (int i = 0; i < 2; ++i) {
    CHECK(results[static_cast<std::size_t>(i)].is_same(given[static_cast<std::size_t>(i)]));
    CHECK(same(given[static_cast<std::size_t>(i)], expected(i)));
  }
  group = {data(sizes, kFloat, hvd::rank(), 2), data(sizes, kFloat, hvd::rank(), 3)};
  const auto handle = hvd::grouped_allreduce_async_(group);
  const auto fresh = hvd::grouped_allreduce_async({data(sizes, kFloat, hvd::rank(), 4)});
  CHECK(handle.wait()[1].is_same(group[1]));
  CHECK(same(group[0], expected(2)));
  CHECK(same(group[1], expected(3)));
  CHECK(same(fresh.wait()[0], expected(4)));
}

TEST_CASE("allreduce: integer averages are exact and truncate toward zero") {
  const int n = hvd::size();
  std::int64_t sum = 0;
  for (int r = 0; r < n; ++r) sum += -7 - r;
  for (const auto type : {kChar, kShort, kInt, kLong})
    CHECK(same(hvd::allreduce(torch::full({4}, -7 - hvd::rank(), type)),
               torch::full({4}, sum / n, type)));
  // The sum itself would not fit.
  CHECK(same(hvd::allreduce(torch::full({5}, 200, kByte)), torch::full({5}, 200, kByte)));
  CHECK(same(hvd::allreduce(torch::full({5}, -128, kChar)), torch::full({5}, -128, kChar)));
  const std::int64_t big = (std::int64_t{1} << 53) + 1;  // no double holds it
  CHECK(same(hvd::allreduce(torch::full({3}, big, kLong)), torch::full({3}, big, kLong)));
  CHECK(
      same(hvd::allreduce(torch::full({3}, 2147483647, kInt)), torch::full({3}, 2147483647, kInt)));
}

TEST_CASE("allreduce: scales") {
  const auto scaled = [](double value, double factor) {
    return static_cast<std::int64_t>(value * factor);
  };
  for (const double pre : {0.5, 1.0, -1.5}) {
    for (const double post : {1.0, 1.7}) {
      std::int64_t sum = 0;
      for (int r = 0; r < hvd::size(); ++r) sum += scaled(-5 + 3 * r, pre);
      for (const auto type : {kShort, kInt, kLong}) {
        const at::Tensor given = torch::full({5}, -5 + 3 * hvd::rank(), type);
        CHECK(same(
            hvd::allreduce(given,
                           {.op = ReduceOp::Sum, .prescale_factor = pre, .postscale_factor = post}),
            torch::full({5}, scaled(static_cast<double>(sum), post), type)));
        CHECK(same(hvd::allreduce(given, {.prescale_factor = pre, .postscale_factor = post}),
                   torch::full({5}, scaled(static_cast<double>(sum / hvd::size()), post), type)));
      }
    }
  }
  for (const auto type : {kHalf, kBFloat16, kFloat, kDouble}) {
    const double pre = 0.3;
    const double post = 1.1;
    at::Tensor sum;
    for (const auto& input : all_data({40}, type, everyone())) {
      const at::Tensor wide = input.to(arithmetic_type(type));
      const at::Tensor term = wide * torch::full_like(wide, pre);
      sum = sum.defined() ? sum + term : term;
    }
    const at::Tensor expected = (sum * torch::full_like(sum, post)).to(type);
    const at::Tensor got =
        hvd::allreduce(data({40}, type, hvd::rank()),
                       {.op = ReduceOp::Sum, .prescale_factor = pre, .postscale_factor = post});
    CHECK((got.scalar_type() == type));
    CHECK(torch::allclose(got.to(kDouble), expected.to(kDouble), type == kDouble ? 1e-15 : 1e-6,
                          type == kDouble ? 1e-15 : 1e-7));
  }
  const at::Tensor halves = hvd::allreduce(torch::full({3}, 40000.0, kHalf),
                                           {.op = ReduceOp::Sum, .prescale_factor = 0.1});
  CHECK(torch::allclose(halves.to(kFloat),
                        torch::full({3}, 4000.0F * static_cast<float>(hvd::size())), 1e-3));
}

TEST_CASE("allreduce: 16-bit floats are summed in fp32 and do not overflow on the way") {
  const at::Tensor given = torch::full({7}, hvd::rank() == 0 ? 2048.0 : 1.0, kHalf);
  CHECK(same(hvd::allreduce(given, {.op = ReduceOp::Sum}),
             torch::full({7}, 2048.0 + hvd::size() - 1, kFloat).to(kHalf)));
  CHECK(same(hvd::allreduce(torch::full({7}, 60000.0, kHalf)), torch::full({7}, 60000.0, kHalf)));
  CHECK(torch::isinf(hvd::allreduce(torch::full({7}, 60000.0, kHalf), {.op = ReduceOp::Sum}))
            .all()
            .item<bool>() == (hvd::size() > 1));
  const at::Tensor brain = torch::full({7}, hvd::rank() == 0 ? 256.0 : 1.0, kBFloat16);
  CHECK(same(hvd::allreduce(brain, {.op = ReduceOp::Sum}),
             torch::full({7}, 256.0 + hvd::size() - 1, kFloat).to(kBFloat16)));
}

TEST_CASE("allreduce: compression") {
  const std::pair<hvd::Compression, at::ScalarType> kinds[]{{hvd::Compression::fp16(), kHalf},
                                                            {hvd::Compression::bf16(), kBFloat16}};
  for (const auto& [compression, wire] : kinds) {
    for (const auto type : {kFloat, kDouble}) {
      Tensors rounded;
      for (const auto& input : all_data({33}, type, everyone()))
        rounded.push_back((input * 1.0123).to(wire));
      const at::Tensor given = data({33}, type, hvd::rank()) * 1.0123;
      const at::Tensor expected = reduced(rounded, ReduceOp::Average).to(type);
      CHECK(same(hvd::allreduce(given, {.compression = compression}), expected));
      const at::Tensor changed = given.clone();
      hvd::allreduce_(changed, {.compression = compression});
      CHECK(same(changed, expected));
      const at::Tensor strided = given.clone().reshape({11, 3}).t();
      hvd::allreduce_async_(strided, {.compression = compression}).wait();
      CHECK(same(strided.t().reshape({33}), expected));
    }
    const at::Tensor whole = data({9}, kInt, hvd::rank());
    CHECK(same(hvd::allreduce(whole, {.op = ReduceOp::Sum, .compression = compression}),
               reduced(all_data({9}, kInt, everyone()), ReduceOp::Sum)));
  }
  CHECK(same(hvd::allreduce(torch::full({2}, 60000.0), {.compression = hvd::Compression::fp16()}),
             torch::full({2}, 60000.0, kHalf).to(kFloat)));
  CHECK(hvd::Compression::none() == hvd::Compression());
}

TEST_CASE("adasum: orthogonal gradients add, parallel ones average; fp16 does not overflow") {
  const int n = hvd::size();
  at::Tensor orthogonal = torch::zeros({4});
  orthogonal[hvd::rank() % 4] = 3.0;
  at::Tensor expected = torch::zeros({4});
  for (int r = 0; r < n; ++r) expected[r % 4] += 3.0;
  if (n <= 4)
    CHECK(torch::allclose(hvd::allreduce(orthogonal, {.op = ReduceOp::Adasum}), expected));
  const at::Tensor parallel = torch::full({1001}, 300.0).to(kHalf);
  CHECK(same(hvd::allreduce(parallel, {.op = ReduceOp::Adasum}), parallel));
  const Tensors group =
      hvd::grouped_allreduce({orthogonal, torch::full({5}, 2.0)}, {.op = ReduceOp::Adasum});
  CHECK(torch::allclose(group[1], torch::full({5}, 2.0)));
  CHECK_THROWS_AS(hvd::allreduce(torch::ones({2}, kInt), {.op = ReduceOp::Adasum}),
                  hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::allreduce(torch::ones({2}, kComplexFloat), {.op = ReduceOp::Product}),
                  hvd::InvalidArgument);
}

}  // namespace
