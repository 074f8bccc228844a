// Allreduce of tensors with compression that leaves out values: int8, topk, powersgd.
#include <cmath>
#include <limits>

#include "tests/torch_bindings/support.h"

namespace compressed_allreduce_test {
namespace {

using namespace hvd::test;
using at::kBFloat16, at::kDouble, at::kFloat, at::kHalf, at::kInt;
using hvd::AllreduceOptions;
using hvd::Compression;
using hvd::Mismatch;
using hvd::ReduceOp;
using Tensors = std::vector<at::Tensor>;

at::Tensor noise(at::IntArrayRef sizes, at::ScalarType type, int rank, int variant = 0) {
  return torch::randn(
             sizes,
             at::detail::createCPUGenerator(static_cast<std::uint64_t>(rank * 1000 + variant + 1)),
             at::TensorOptions(kDouble))
      .to(type);
}
at::Tensor sum_of(at::IntArrayRef sizes, at::ScalarType type, int variant = 0) {
  at::Tensor sum = at::zeros(sizes, kDouble);
  for (const int rank : everyone()) sum.add_(noise(sizes, type, rank, variant));
  return sum;
}
/// One matrix of rank 1 for each rank.
at::Tensor outer(int rank, at::ScalarType type = kFloat) {
  return noise({30, 1}, kDouble, rank).mm(noise({1, 41}, kDouble, rank, 7)).to(type);
}
/// The half of the values that is largest.
at::Tensor half_of(const at::Tensor& values) {
  const at::Tensor flat = values.flatten();
  const at::Tensor places = std::get<1>(flat.abs().topk((flat.numel() + 1) / 2));
  return at::zeros_like(flat).index_copy(0, places, flat.index_select(0, places)).view_as(values);
}
double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(kDouble) - b.to(kDouble)).abs().max().item<double>();
}
/// Half a step of the scale of each rank's block, and what the type rounds.
double bound(at::IntArrayRef sizes, at::ScalarType type, int variant = 0) {
  double all = 0;
  for (const int rank : everyone())
    all += noise(sizes, type, rank, variant).abs().max().item<double>() / 254 * 1.01;
  return all + (type == kFloat || type == kDouble ? 0 : 0.02 * hvd::size());
}

TEST_CASE("compressed allreduce: int8 is off by half a step, in every form, type and layout") {
  const std::vector<std::int64_t> sizes{7, 3, 5, 9};
  for (const auto type : {kFloat, kDouble, kHalf, kBFloat16}) {
    CAPTURE(std::string(at::toString(type)));
    const at::Tensor given = noise(sizes, type, hvd::rank());
    const at::Tensor expected = sum_of(sizes, type);
    const AllreduceOptions options{.op = ReduceOp::Sum, .compression = Compression::int8()};
    const auto check = [&](const at::Tensor& result) {
      CHECK((result.scalar_type() == type));
      CHECK((result.sizes() == given.sizes()));
      CHECK(largest_difference(result, expected) <= bound(sizes, type));
      CHECK(same_on_all_ranks(result));
    };
    const at::Tensor first = hvd::allreduce(given, options);
    check(first);
    check(hvd::allreduce_async(given, options).wait());
    check(hvd::grouped_allreduce({given}, options).front());
    CHECK(same(given, noise(sizes, type, hvd::rank())));
    at::Tensor changed = given.clone();
    CHECK(hvd::allreduce_(changed, options).is_same(changed));
    CHECK(same(changed, first));
    changed = given.contiguous(at::MemoryFormat::ChannelsLast);
    CHECK(hvd::allreduce_async_(changed, options).wait().is_same(changed));
    CHECK(same(changed, first));
    const at::Tensor wide = at::zeros({7, 3, 5, 18}, given.options());
    at::Tensor gaps = wide.slice(3, 0, 18, 2);
    gaps.copy_(given);
    hvd::grouped_allreduce_({gaps}, options);
    CHECK(same(gaps, first));
    CHECK(wide.slice(3, 1, 18, 2).abs().max().item<double>() == 0);
  }
}

TEST_CASE("compressed allreduce: topk adds up each rank's largest values, powersgd low ranks") {
  const at::Tensor given = noise({33, 5}, kDouble, hvd::rank());
  at::Tensor expected = at::zeros({33, 5}, kDouble);
  for (const int rank : everyone()) expected.add_(half_of(noise({33, 5}, kDouble, rank)));
  CHECK(largest_difference(hvd::allreduce(given, {.compression = Compression::topk(0.5)}),
                           expected / hvd::size()) < 1e-12);
  CHECK(largest_difference(
            hvd::allreduce(given, {.op = ReduceOp::Sum, .compression = Compression::topk(1)}),
            sum_of({33, 5}, kDouble)) < 1e-12);
  at::Tensor matrices = at::zeros({30, 41}, kDouble);
  for (const int rank : everyone()) matrices.add_(outer(rank));
  const at::Tensor low = hvd::allreduce(
      outer(hvd::rank()), {.op = ReduceOp::Sum, .compression = Compression::powersgd(1)});
  CHECK(largest_difference(low, matrices) < 1e-4);
  CHECK(same_on_all_ranks(low));
  // too small to gain, no matrix: as they are
  for (const auto& sizes : {std::vector<std::int64_t>{2, 2}, {50}, {}}) {
    const at::Tensor whole = hvd::allreduce(noise(sizes, kFloat, hvd::rank()),
                                            {.compression = Compression::powersgd(2)});
    CHECK(largest_difference(whole, sum_of(sizes, kFloat) / hvd::size()) < 1e-6);
  }
}

TEST_CASE("compressed allreduce: scales, groups, what is empty or not finite, process sets") {
  const AllreduceOptions scaled{.op = ReduceOp::Sum,
                                .prescale_factor = 3,
                                .postscale_factor = -0.5,
                                .compression = Compression::int8()};
  CHECK(largest_difference(hvd::allreduce(noise({600}, kFloat, hvd::rank()), scaled),
                           sum_of({600}, kFloat) * -1.5) <= 1.5 * bound({600}, kFloat));
  for (const auto& way : {Compression::int8(), Compression::topk(0.5), Compression::powersgd(1)}) {
    CAPTURE(static_cast<int>(way.kind()));
    const AllreduceOptions options{.compression = way};
    const Tensors group = hvd::grouped_allreduce(
        {outer(hvd::rank()), at::zeros({0, 4}), at::ones({}, kDouble), at::ones({3}, kHalf)},
        options);
    REQUIRE(group.size() == 4);
    CHECK((group[1].sizes() == at::IntArrayRef({0, 4})));
    CHECK(largest_difference(group[2], at::ones({}, kDouble)) < 1e-6);
    CHECK((group[3].scalar_type() == kHalf));
    CHECK(hvd::allreduce(at::zeros({40, 40}), options).abs().max().item<double>() == 0);
    at::Tensor bad = outer(hvd::rank());
    if (last()) bad[2][3] = std::numeric_limits<float>::infinity();
    CHECK_FALSE(hvd::allreduce(bad, options).isfinite().all().item<bool>());
    // types that are not encoded travel as without it
    CHECK(same(
        hvd::allreduce(at::full({3}, hvd::rank(), kInt), {.op = ReduceOp::Max, .compression = way}),
        at::full({3}, hvd::size() - 1, kInt)));
    const Tensors mixed = hvd::grouped_allreduce({at::ones({3}), at::ones({3}, kInt)}, options);
    CHECK(same(mixed[0], at::ones({3})));
    CHECK(same(mixed[1], at::ones({3}, kInt)));
    const at::Tensor own = noise({9}, kFloat, hvd::rank());
    for (const auto op : {ReduceOp::Max, ReduceOp::Product, ReduceOp::Adasum})
      CHECK(same(hvd::allreduce(own, {.op = op, .compression = way}),
                 hvd::allreduce(own, {.op = op})));
    const hvd::ProcessSet set = hvd::add_process_set({hvd::size() - 1});
    if (last())
      CHECK(largest_difference(
                hvd::allreduce(outer(2), {.process_set = set, .compression = Compression::topk(1)}),
                outer(2)) == 0);
    hvd::remove_process_set(set);
  }
}

TEST_CASE("compressed allreduce: autocast changes nothing, nor do very large and small values") {
  const AllreduceOptions options{.op = ReduceOp::Sum, .compression = Compression::powersgd(1)};
  const at::Tensor plain = hvd::allreduce(outer(hvd::rank()), options);
  {
    const hvd::AutocastGuard autocast(at::kCPU, kBFloat16);
    CHECK(same(hvd::allreduce(outer(hvd::rank()), options), plain));
  }
  for (const double factor : {1e30, 1e-30}) {
    const at::Tensor scaled = hvd::allreduce(outer(hvd::rank()) * factor, options) / factor;
    CHECK(largest_difference(scaled, plain) < 1e-3);
  }
}

TEST_CASE("compressed allreduce: gradients are the same allreduce, and handles keep their result") {
  const at::Tensor given = noise({300}, kDouble, hvd::rank()).requires_grad_();
  const AllreduceOptions options{.op = ReduceOp::Sum, .compression = Compression::topk(1)};
  (hvd::allreduce(given, options) * noise({300}, kDouble, hvd::rank(), 3)).sum().backward();
  CHECK(largest_difference(given.grad(), sum_of({300}, kDouble, 3)) < 1e-12);
  auto first =
      hvd::allreduce_async(given.detach(), {.name = "one", .compression = Compression::int8()});
  auto second =
      hvd::allreduce_async(given.detach(), {.name = "two", .compression = Compression::int8()});
  // in an order of its own on each rank
  const bool turned = hvd::rank() % 2 == 1;
  const at::Tensor early = (turned ? second : first).wait(),
                   late = (turned ? first : second).wait();
  CHECK(same(early, late));
  CHECK(first.wait().is_same(first.wait()));
}

TEST_CASE("compressed allreduce: what differs between ranks is told on all, and is over then") {
  if (hvd::size() < 2) return;
  const auto told = [](const at::Tensor& tensor, const AllreduceOptions& options,
                       const std::vector<std::string>& words) {
    const auto text = error_of<Mismatch>([&] { hvd::allreduce(tensor, options); });
    CAPTURE(text);
    for (const auto& word : words) CHECK(contains(text, word));
    const at::Tensor good = hvd::allreduce(
        at::ones({4, 6}), {.name = options.name, .compression = Compression::int8()});
    CHECK(largest_difference(good, at::ones({4, 6})) < 1e-6);
  };
  const auto int8 = Compression::int8();
  const at::Tensor same_bytes = last() ? at::ones({24, 16}) : at::ones({16, 24});
  told(same_bytes, {.name = "g", .compression = int8}, {"'g'", "[24, 16]", "[16, 24]"});
  told(at::ones({9}, last() ? kDouble : kFloat), {.name = "g", .compression = int8},
       {"float64", "float32"});
  told(at::ones({9}),
       {.name = "g", .op = last() ? ReduceOp::Sum : ReduceOp::Average, .compression = int8},
       {"sum", "average"});
  told(at::ones({9}), {.name = "g", .prescale_factor = last() ? 2.0 : 1.0, .compression = int8},
       {"scales 2 and 1"});
  told(at::ones({90}), {.name = "g", .compression = Compression::topk(last() ? 0.5 : 0.25)},
       {"topk(0.5)", "topk(0.25)"});
  told(at::ones({90}), {.name = "g", .compression = last() ? int8 : Compression::none()}, {"g"});
  told(at::ones({90}), {.name = "g", .compression = last() ? int8 : Compression::topk(0.25)},
       {"'g'", "int8", "topk(0.25)"});
  told(last() ? at::ones({2, 2}) : at::ones({40, 40}),
       {.name = "g", .compression = Compression::powersgd(1)}, {"'g'", "[2, 2]", "[40, 40]"});
  const Tensors some(last() ? 3 : 2, at::ones({5}));
  auto handle = hvd::grouped_allreduce_async(some, {.name = "g", .compression = int8});
  for (int again = 0; again < 2; ++again)
    CHECK(contains(error_of<Mismatch>([&] { handle.wait(); }), "3 tensors by int8"));
  Tensors two{at::ones({5}), last() ? at::ones({6}) : at::ones({7})};
  CHECK(contains(
      error_of<Mismatch>([&] { hvd::grouped_allreduce_(two, {.name = "g", .compression = int8}); }),
      "tensor 1 of the group"));
  CHECK(same(two[0], at::ones({5})));
}

}  // namespace
}  // namespace compressed_allreduce_test
