// The collectives on at::Tensor: types, operations, layouts, gradients, names, errors, process sets, threads, objects.
#include <array>
#include <atomic>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <tuple>
#include <unordered_map>

#include "tests/torch/support.h"

namespace {

using namespace hvd::test;
using at::kBFloat16, at::kBool, at::kByte, at::kChar, at::kComplexDouble, at::kComplexFloat, at::kDouble, at::kFloat, at::kHalf, at::kInt,
    at::kLong, at::kShort;
using hvd::ReduceOp;
using Tensors = std::vector<at::Tensor>;

const std::vector<ReduceOp> kOps{ReduceOp::Average, ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product, ReduceOp::Adasum};

/// Returns what docs/semantics.md, "Arithmetic", says of the pair; nothing where Horovod leaves it open.
std::optional<bool> allowed(at::ScalarType type, ReduceOp op) {
  if (op == ReduceOp::Adasum) return std::nullopt;
  const bool extreme = op == ReduceOp::Min || op == ReduceOp::Max;
  if (type == kBool) return extreme;
  if (at::isComplexType(type) && op == ReduceOp::Product) return std::nullopt;
  return !(at::isComplexType(type) && extreme);
}

at::Tensor rank_tensor(double value, at::IntArrayRef sizes = {3}) { return torch::full(sizes, value + hvd::rank(), kFloat); }
/// The reduction of `rank_tensor(0)`.
at::Tensor reduced_ranks(ReduceOp op) {
  Tensors all;
  for (int r = 0; r < hvd::size(); ++r) all.push_back(torch::full({3}, r, kFloat));
  return reduced(all, op);
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
        CHECK_THROWS_AS(hvd::allreduce_async(given, {.name = "refused", .op = op}), hvd::InvalidArgument);
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
      const Tensors group = hvd::grouped_allreduce({given, data({2}, type, hvd::rank(), 1)}, {.op = op});
      REQUIRE(group.size() == 2);
      CHECK(same(group[0], expected));
      CHECK(same(group[1], reduced(all_data({2}, type, everyone(), 1), op)));
    }
  }
  // The refusals have not advanced the numbers of unnamed calls.
  CHECK(same(hvd::allreduce(torch::ones({1}, kLong), {.op = ReduceOp::Sum}), torch::full({1}, hvd::size(), kLong)));
}

TEST_CASE("a refused unnamed call on one rank does not put the ranks out of step") {
  if (last()) {
    CHECK_THROWS_AS(hvd::allreduce(torch::ones({2}, kBool), {.op = ReduceOp::Sum}), hvd::InvalidArgument);
    CHECK_THROWS_AS(hvd::allgather(torch::tensor(1.0)), hvd::InvalidArgument);
    CHECK_THROWS_AS(hvd::broadcast(torch::ones({2}), {.root_rank = hvd::size()}), hvd::InvalidArgument);
    CHECK_THROWS_AS(hvd::broadcast(torch::ones({2}), {.root_rank = -1}), hvd::InvalidArgument);
    CHECK_THROWS_AS(hvd::allreduce(at::Tensor()), hvd::InvalidArgument);
    CHECK_THROWS_AS(hvd::grouped_allreduce({}), hvd::InvalidArgument);
    CHECK_THROWS_AS(hvd::allreduce(torch::ones({2}), {.process_set = hvd::ProcessSet(7)}), hvd::InvalidArgument);
    CHECK_THROWS_AS(hvd::grouped_allgather({torch::ones({2}), torch::tensor(1.0)}), hvd::InvalidArgument);
  }
  CHECK(same(hvd::allreduce(rank_tensor(1), {.op = ReduceOp::Max}), torch::full({3}, static_cast<float>(hvd::size()))));
  CHECK(hvd::allgather(torch::ones({1})).size(0) == hvd::size());
  CHECK(same(hvd::broadcast(rank_tensor(0)), torch::zeros({3})));
}

TEST_CASE("allreduce: large tensors and in place in grouped and asynchronous form") {
  const std::vector<std::int64_t> sizes{300001};
  const auto expected = [&](int variant) { return reduced(all_data(sizes, kFloat, everyone(), variant), ReduceOp::Average); };
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
    CHECK(same(hvd::allreduce(torch::full({4}, -7 - hvd::rank(), type)), torch::full({4}, sum / n, type)));
  // The sum itself would not fit.
  CHECK(same(hvd::allreduce(torch::full({5}, 200, kByte)), torch::full({5}, 200, kByte)));
  CHECK(same(hvd::allreduce(torch::full({5}, -128, kChar)), torch::full({5}, -128, kChar)));
  const std::int64_t big = (std::int64_t{1} << 53) + 1;  // no double holds it
  CHECK(same(hvd::allreduce(torch::full({3}, big, kLong)), torch::full({3}, big, kLong)));
  CHECK(same(hvd::allreduce(torch::full({3}, 2147483647, kInt)), torch::full({3}, 2147483647, kInt)));
}

TEST_CASE("allreduce: scales") {
  const auto scaled = [](double value, double factor) { return static_cast<std::int64_t>(value * factor); };
  for (const double pre : {0.5, 1.0, -1.5}) {
    for (const double post : {1.0, 1.7}) {
      std::int64_t sum = 0;
      for (int r = 0; r < hvd::size(); ++r) sum += scaled(-5 + 3 * r, pre);
      for (const auto type : {kShort, kInt, kLong}) {
        const at::Tensor given = torch::full({5}, -5 + 3 * hvd::rank(), type);
        CHECK(same(hvd::allreduce(given, {.op = ReduceOp::Sum, .prescale_factor = pre, .postscale_factor = post}),
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
        hvd::allreduce(data({40}, type, hvd::rank()), {.op = ReduceOp::Sum, .prescale_factor = pre, .postscale_factor = post});
    CHECK((got.scalar_type() == type));
    CHECK(torch::allclose(got.to(kDouble), expected.to(kDouble), type == kDouble ? 1e-15 : 1e-6, type == kDouble ? 1e-15 : 1e-7));
  }
  const at::Tensor halves = hvd::allreduce(torch::full({3}, 40000.0, kHalf), {.op = ReduceOp::Sum, .prescale_factor = 0.1});
  CHECK(torch::allclose(halves.to(kFloat), torch::full({3}, 4000.0F * static_cast<float>(hvd::size())), 1e-3));
}

TEST_CASE("allreduce: 16-bit floats are summed in fp32 and do not overflow on the way") {
  const at::Tensor given = torch::full({7}, hvd::rank() == 0 ? 2048.0 : 1.0, kHalf);
  CHECK(same(hvd::allreduce(given, {.op = ReduceOp::Sum}), torch::full({7}, 2048.0 + hvd::size() - 1, kFloat).to(kHalf)));
  CHECK(same(hvd::allreduce(torch::full({7}, 60000.0, kHalf)), torch::full({7}, 60000.0, kHalf)));
  CHECK(torch::isinf(hvd::allreduce(torch::full({7}, 60000.0, kHalf), {.op = ReduceOp::Sum})).all().item<bool>() == (hvd::size() > 1));
  const at::Tensor brain = torch::full({7}, hvd::rank() == 0 ? 256.0 : 1.0, kBFloat16);
  CHECK(same(hvd::allreduce(brain, {.op = ReduceOp::Sum}), torch::full({7}, 256.0 + hvd::size() - 1, kFloat).to(kBFloat16)));
}

TEST_CASE("allreduce: compression") {
  const std::pair<hvd::Compression, at::ScalarType> kinds[]{{hvd::Compression::fp16(), kHalf}, {hvd::Compression::bf16(), kBFloat16}};
  for (const auto& [compression, wire] : kinds) {
    for (const auto type : {kFloat, kDouble}) {
      Tensors rounded;
      for (const auto& input : all_data({33}, type, everyone())) rounded.push_back((input * 1.0123).to(wire));
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

TEST_CASE("layouts: scalars, nothing, views, transposed, channels last, expanded, conjugated") {
  const auto layouts = [](int rank) {
    const at::Tensor image = data({2, 3, 4, 5}, kFloat, rank);
    const at::Tensor complex = data({6}, kComplexDouble, rank);
    return Tensors{torch::tensor(1.5 + rank),
                   torch::empty({0}),
                   torch::empty({0, 3}),
                   torch::empty({3, 0, 2}),
                   data({4, 6}, kFloat, rank).t(),
                   data({4, 6}, kFloat, rank).slice(1, 1, 6, 2),
                   image.contiguous(at::MemoryFormat::ChannelsLast),
                   image.permute({3, 1, 0, 2}),
                   data({2, 3, 2, 4, 5}, kFloat, rank).contiguous(at::MemoryFormat::ChannelsLast3d),
                   complex.conj(),
                   torch::imag(complex.clone().conj()),
                   data({5}, kFloat, rank).expand({3, 5})};
  };
  const Tensors given = layouts(hvd::rank());
  std::vector<Tensors> all;
  for (int r = 0; r < hvd::size(); ++r) all.push_back(layouts(r));
  for (std::size_t i = 0; i < given.size(); ++i) {
    CAPTURE(i);
    Tensors inputs;
    for (const auto& tensors : all) inputs.push_back(tensors[i].clone().resolve_conj().resolve_neg());
    const at::Tensor expected = reduced(inputs, ReduceOp::Sum);
    CHECK(same(hvd::allreduce(given[i], {.op = ReduceOp::Sum}), expected));
    CHECK(same(hvd::broadcast(given[i], {.root_rank = hvd::size() - 1}), inputs.back()));
    if (given[i].dim() > 0) CHECK(same(hvd::allgather(given[i]), torch::cat(inputs)));
    if (i + 1 == given.size()) break;  // expanded: no place for a result
    const at::Tensor sum = given[i];
    const auto strides = sum.strides().vec();
    hvd::allreduce_(sum, {.op = ReduceOp::Sum});
    CHECK(same(sum.resolve_conj().resolve_neg(), expected));
    CHECK(sum.strides() == at::IntArrayRef(strides));
    const at::Tensor copy = layouts(hvd::rank())[i];
    hvd::broadcast_(copy, {.root_rank = hvd::size() - 1});
    CHECK(same(copy.resolve_conj().resolve_neg(), inputs.back()));
  }
  CHECK_THROWS_AS(hvd::allreduce_(given.back()), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::broadcast_(given.back()), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::allreduce(torch::eye(3).to_sparse()), hvd::InvalidArgument);
  // Ranks may hold the same shape in different layouts.
  const at::Tensor image = data({2, 3, 4, 5}, kFloat, hvd::rank());
  CHECK(same(hvd::allreduce(last() ? image.contiguous(at::MemoryFormat::ChannelsLast) : image),
             reduced(all_data({2, 3, 4, 5}, kFloat, everyone()), ReduceOp::Average)));
}

TEST_CASE("in place on a view changes the view and nothing else") {
  const at::Tensor base = data({6, 4}, kFloat, hvd::rank());
  const at::Tensor untouched = base.clone();
  const at::Tensor rows = base.slice(0, 2, 4);
  const at::Tensor column = base.select(1, 1).slice(0, 0, 2);
  hvd::grouped_allreduce_({rows, column}, {.op = ReduceOp::Sum});
  const at::Tensor sum = reduced(all_data({6, 4}, kFloat, everyone()), ReduceOp::Sum);
  at::Tensor expected = untouched.clone();
  expected.slice(0, 2, 4).copy_(sum.slice(0, 2, 4));
  expected.select(1, 1).slice(0, 0, 2).copy_(sum.select(1, 1).slice(0, 0, 2));
  CHECK(same(base, expected));
}

TEST_CASE("broadcast: every type from every root") {
  for (int root = 0; root < hvd::size(); ++root) {
    for (const auto type : kTypes) {
      CAPTURE(std::string(at::toString(type)));
      const at::Tensor expected = data({2, 3}, type, root);
      const at::Tensor given = data({2, 3}, type, hvd::rank());
      CHECK(same(hvd::broadcast(given, {.root_rank = root}), expected));
      CHECK(same(given, data({2, 3}, type, hvd::rank())));
      CHECK(same(hvd::broadcast_async(given, {.root_rank = root}).wait(), expected));
      CHECK(hvd::broadcast_(given, {.root_rank = root}).is_same(given));
      CHECK(same(given, expected));
      const at::Tensor again = data({2, 3}, type, hvd::rank(), 1);
      CHECK(hvd::broadcast_async_(again, {.root_rank = root}).wait().is_same(again));
      CHECK(same(again, data({2, 3}, type, root, 1)));
    }
  }
}

TEST_CASE("allgather: every type, rows that differ by rank, none at all, groups") {
  for (const auto type : kTypes) {
    CAPTURE(std::string(at::toString(type)));
    Tensors parts;
    for (int r = 0; r < hvd::size(); ++r) parts.push_back(data({r, 2}, type, r));  // rank 0 has no rows
    CHECK(same(hvd::allgather(parts[static_cast<std::size_t>(hvd::rank())]), torch::cat(parts)));
    CHECK(same(hvd::allgather_async(parts[static_cast<std::size_t>(hvd::rank())]).wait(), torch::cat(parts)));
  }
  CHECK(same(hvd::allgather(torch::empty({0, 4})), torch::empty({0, 4})));
  CHECK(same(hvd::allgather(torch::empty({2, 0})), torch::empty({2 * hvd::size(), 0})));
  const auto mine = [](int r) { return Tensors{data({2, 3}, kFloat, r), data({4 - r % 3}, kLong, r, 1)}; };
  const Tensors group = hvd::grouped_allgather(mine(hvd::rank()));
  const Tensors later = hvd::grouped_allgather_async(mine(hvd::rank())).wait();
  for (std::size_t i = 0; i < 2; ++i) {
    Tensors parts;
    for (int r = 0; r < hvd::size(); ++r) parts.push_back(mine(r)[i]);
    CHECK(same(group[i], torch::cat(parts)));
    CHECK(same(later[i], torch::cat(parts)));
  }
  CHECK_THROWS_AS(hvd::allgather(torch::tensor(1.0)), hvd::InvalidArgument);
}

TEST_CASE("gradients") {
  const int n = hvd::size();
  const auto weight = [](int rank) { return data({4, 3}, kDouble, rank, 3); };
  Tensors weights;
  for (int r = 0; r < n; ++r) weights.push_back(weight(r));
  const auto input = [] { return data({4, 3}, kDouble, hvd::rank()).requires_grad_(); };

  for (const auto op : {ReduceOp::Average, ReduceOp::Sum}) {
    at::Tensor x = input();
    (hvd::allreduce(x, {.op = op, .prescale_factor = 0.5, .postscale_factor = 3}) * weight(hvd::rank())).sum().backward();
    CHECK(torch::allclose(x.grad(), reduced(weights, op) * 1.5, 1e-14, 1e-14));
    x = input();
    (hvd::allreduce_async(x, {.name = "gradient", .op = op}).wait() * weight(hvd::rank())).sum().backward();
    CHECK(same(x.grad(), reduced(weights, op)));
  }
  {  // a group of which one result is not used, and one input needs no gradient
    const at::Tensor x = input();
    const at::Tensor y = input();
    const Tensors results = hvd::grouped_allreduce({x, torch::ones({2}), y, torch::ones({2}, kLong)}, {.op = ReduceOp::Sum});
    (results[0] * weight(hvd::rank())).sum().backward();
    CHECK(same(x.grad(), reduced(weights, ReduceOp::Sum)));
    CHECK((!y.grad().defined() || same(y.grad(), torch::zeros_like(y))));
    CHECK(!results[3].requires_grad());
  }
  {  // through a computation on both sides
    const at::Tensor x = input();
    (hvd::allreduce(x * x, {.op = ReduceOp::Sum}) * weight(hvd::rank())).sum().backward();
    CHECK(torch::allclose(x.grad(), 2 * x.detach() * reduced(weights, ReduceOp::Sum), 1e-14, 1e-14));
  }
  {  // allgather: rank r gives r + 1 rows
    const at::Tensor x = data({hvd::rank() + 1, 3}, kDouble, hvd::rank()).requires_grad_();
    const at::Tensor all = hvd::allgather(x);
    CHECK(all.requires_grad());
    Tensors given;
    for (int r = 0; r < n; ++r) given.push_back(data({all.size(0), 3}, kDouble, r, 5));
    (all * given[static_cast<std::size_t>(hvd::rank())]).sum().backward();
    const std::int64_t begin = hvd::rank() * (hvd::rank() + 1) / 2;
    CHECK(same(x.grad(), reduced(given, ReduceOp::Average).slice(0, begin, begin + hvd::rank() + 1)));
  }
  for (int root = 0; root < n; ++root) {
    const at::Tensor x = input();
    (hvd::broadcast(x, {.root_rank = root}) * weight(hvd::rank())).sum().backward();
    CHECK(same(x.grad(), hvd::rank() == root ? reduced(weights, ReduceOp::Average) : torch::zeros({4, 3}, kDouble)));
  }
  CHECK(!hvd::allreduce(torch::ones({2})).requires_grad());
  const torch::NoGradGuard no_gradient;
  CHECK(!hvd::allreduce(input()).requires_grad());
}

TEST_CASE("names: in flight once per operation and process set") {
  for (int early = 0; early < hvd::size() && hvd::size() > 1; ++early) {
    if (hvd::rank() == early) {
      const auto before = hvd::stats();
      const auto first = hvd::allreduce_async(rank_tensor(0), {.name = "name", .op = ReduceOp::Sum});
      const std::string text = error_of<hvd::DuplicateName>([] { hvd::allreduce_async(torch::ones({3}), {.name = "name"}); });
      CHECK(contains(text, "'name'"));
      CHECK_THROWS_AS(hvd::grouped_allreduce_async({torch::ones({3})}, {.name = "name"}), hvd::DuplicateName);
      CHECK_THROWS_AS(hvd::allreduce(torch::ones({3}), {.name = "name"}), hvd::InvalidArgument);  // a DuplicateName is one
      CHECK(hvd::stats().tensors_submitted == before.tensors_submitted + 1);
      const auto other = hvd::broadcast_async(rank_tensor(0), {.name = "name", .root_rank = early});
      const auto third = hvd::allgather_async(rank_tensor(0), {.name = "name"});
      CHECK(!first.done());
      hvd::barrier();
      CHECK(same(first.wait(), reduced_ranks(ReduceOp::Sum)));
      CHECK(same(other.wait(), torch::full({3}, static_cast<float>(early))));
      CHECK(third.wait().size(0) == 3 * hvd::size());
    } else {
      hvd::barrier();
      const auto third = hvd::allgather_async(rank_tensor(0), {.name = "name"});
      const auto other = hvd::broadcast_async(rank_tensor(0), {.name = "name", .root_rank = early});
      CHECK(same(hvd::allreduce(rank_tensor(0), {.name = "name", .op = ReduceOp::Sum}), reduced_ranks(ReduceOp::Sum)));
      CHECK(same(other.wait(), torch::full({3}, static_cast<float>(early))));
      CHECK(third.wait().size(0) == 3 * hvd::size());
    }
  }
  // In any order, and again.
  for (int round = 0; round < 3; ++round) {
    std::vector<hvd::Handle<at::Tensor>> handles(10);
    for (int k = 0; k < 10; ++k) {
      const int i = (k * 3 + hvd::rank() * 7) % 10;
      handles[static_cast<std::size_t>(i)] =
          hvd::allreduce_async(torch::full({i + 1}, i + hvd::rank(), kLong), {.name = "name." + std::to_string(i), .op = ReduceOp::Max});
    }
    for (int i = 0; i < 10; ++i) CHECK(same(handles[static_cast<std::size_t>(i)].wait(), torch::full({i + 1}, i + hvd::size() - 1, kLong)));
  }
}

TEST_CASE("handles: done, poll, synchronize, waited for twice, copied, dropped") {
  const auto handle = hvd::allreduce_async(rank_tensor(0), {.op = ReduceOp::Sum});
  while (!handle.done()) std::this_thread::yield();  // polling alone gets there
  CHECK(hvd::poll(handle));
  const at::Tensor first = handle.wait();
  CHECK(handle.done());
  const auto copy = handle;
  CHECK(copy.wait().is_same(first));
  CHECK(hvd::synchronize(handle).is_same(first));
  CHECK(same(first, reduced_ranks(ReduceOp::Sum)));
  static_cast<void>(hvd::allreduce_async(rank_tensor(1), {.name = "dropped"}));
  CHECK(same(hvd::allreduce(rank_tensor(1), {.op = ReduceOp::Min}), torch::ones({3})));
  CHECK_THROWS_AS(hvd::Handle<at::Tensor>().wait(), hvd::InvalidArgument);
}

/// `call(differs)` runs on every rank, `differs` only on the last; then `good()` shows that nothing stuck.
template <class Call, class Good>
void check_mismatch(const std::vector<std::string>& parts, Call call, Good good) {
  const std::string text = error_of<hvd::Mismatch>([&] { call(last()); });
  for (const auto& part : parts) {
    INFO(text);
    CHECK(contains(text, part));
  }
  CHECK_NOTHROW(good());
}

TEST_CASE("mismatches: on every rank, with every rank's value, and not sticky") {
  if (hvd::size() == 1) return;
  const auto n = [](bool differs, auto common, auto other) { return differs ? other : common; };
  const auto good = [] {
    REQUIRE(same(hvd::allreduce(torch::ones({17, 3}), {.name = "tensor", .op = ReduceOp::Sum}),
                 torch::full({17, 3}, static_cast<float>(hvd::size()))));
    REQUIRE(hvd::allgather(torch::ones({2, 3}), {.name = "tensor"}).size(0) == 2 * hvd::size());
    REQUIRE(same(hvd::broadcast(rank_tensor(0, {17, 3}), {.name = "tensor"}), torch::zeros({17, 3})));
  };
  good();
  const auto shapes = [&](std::vector<std::int64_t> common, std::vector<std::int64_t> other) {
    return [=](bool differs) { hvd::allreduce(torch::ones(n(differs, common, other)), {.name = "tensor"}); };
  };
  check_mismatch({"'tensor'", grouping("float32 [17, 3]", "float32 [18, 3]")}, shapes({17, 3}, {18, 3}), good);
  check_mismatch({"'tensor'", grouping("float32 [17, 1311]", "float32 [17, 23, 57]")}, shapes({17, 1311}, {17, 23, 57}), good);
  check_mismatch({grouping("float32 [3]", "float32 []")}, shapes({3}, {}), good);
  check_mismatch(
      {grouping("float32 [17, 3]", "int32 [17, 4]"), "type"},  // the type comes first
      [&](bool differs) {
        hvd::allreduce(differs ? torch::ones({17, 4}, kInt) : torch::ones({17, 3}), {.name = "tensor"});
      },
      good);
  check_mismatch(
      {"'tensor'", grouping("average", "max")},
      [&](bool differs) {
        hvd::allreduce(torch::ones({17, 3}), {.name = "tensor", .op = n(differs, ReduceOp::Average, ReduceOp::Max)});
      },
      good);
  check_mismatch(
      {"'tensor'", "0.25", "scale"},  // the scales before the operation
      [&](bool differs) {
        hvd::allreduce(torch::ones({17, 3}),
                       {.name = "tensor", .op = n(differs, ReduceOp::Average, ReduceOp::Sum), .prescale_factor = n(differs, 1.0, 0.25)});
      },
      good);
  check_mismatch(
      {"'tensor'", "0.125"},
      [&](bool differs) {
        hvd::allreduce(torch::ones({17, 3}), {.name = "tensor", .postscale_factor = n(differs, 1.0, 0.125)});
      },
      good);
  check_mismatch(
      {"'tensor'", grouping("root 0", "root 1")},
      [&](bool differs) {
        hvd::broadcast(torch::ones({17, 3}), {.name = "tensor", .root_rank = n(differs, 0, 1)});
      },
      good);
  check_mismatch(
      {grouping("float32 [17, 3]", "float32 [3, 17]")},
      [&](bool differs) {
        hvd::broadcast(differs ? torch::ones({3, 17}) : torch::ones({17, 3}), {.name = "tensor"});
      },
      good);
  check_mismatch(
      {"'tensor'", grouping("float32 [2, 3]", "float32 [2, 4]")},
      [&](bool differs) {
        hvd::allgather(torch::ones({2, n(differs, 3, 4)}), {.name = "tensor"});
      },
      good);
  check_mismatch(
      {grouping("float32 [2, 3]", "float32 [6]")},
      [&](bool differs) {
        hvd::allgather(differs ? torch::ones({6}) : torch::ones({2, 3}), {.name = "tensor"});
      },
      good);
  check_mismatch(
      {"float32", "float64"},
      [&](bool differs) {
        hvd::allgather(torch::ones({2, 3}, n(differs, kFloat, kDouble)), {.name = "tensor"});
      },
      good);
  check_mismatch(
      {"float16", "float32"},
      [&](bool differs) {
        hvd::allreduce(torch::ones({17, 3}),
                       {.name = "tensor", .compression = n(differs, hvd::Compression::none(), hvd::Compression::fp16())});
      },
      good);
  // Asynchronous: at wait(), again at a second one, and done() is true.
  const auto handle = hvd::allreduce_async(torch::ones({n(last(), 2, 3)}), {.name = "tensor"});
  CHECK_THROWS_AS(handle.wait(), hvd::Mismatch);
  CHECK(handle.done());
  CHECK_THROWS_AS(handle.wait(), hvd::Mismatch);
  good();
  // Unnamed.
  CHECK_THROWS_AS(hvd::allreduce(torch::ones({n(last(), 2, 3)})), hvd::Mismatch);
  good();
  // A wrong call in place leaves the argument alone.
  const at::Tensor kept = rank_tensor(5, {n(last(), 2, 3)});
  CHECK_THROWS_AS(hvd::allreduce_(kept), hvd::Mismatch);
  CHECK(same(kept, rank_tensor(5, {n(last(), 2, 3)})));
}

TEST_CASE("groups are all or nothing") {
  if (hvd::size() == 1) return;
  const Tensors given{rank_tensor(0, {4}), rank_tensor(0, {last() ? 5 : 6}), rank_tensor(0, {7})};
  const std::string text = error_of<hvd::Mismatch>([&] { hvd::grouped_allreduce_(given, {.name = "group"}); });
  CHECK(contains(text, "'group'"));
  CHECK(contains(text, "[5]"));
  CHECK(contains(text, "[6]"));
  CHECK(same(given[0], rank_tensor(0, {4})));
  CHECK(same(given[2], rank_tensor(0, {7})));
  CHECK(same(hvd::grouped_allreduce({rank_tensor(0), rank_tensor(1)}, {.name = "group", .op = ReduceOp::Sum})[0],
             reduced_ranks(ReduceOp::Sum)));
  // Different numbers of members.
  const Tensors few{rank_tensor(0), rank_tensor(0)};
  CHECK_THROWS_AS(hvd::grouped_allreduce(last() ? Tensors{rank_tensor(0)} : few, {.name = "group"}), hvd::Mismatch);
  // The difference is far behind: it must still be told.
  Tensors many(60, torch::ones({2}));
  many[50] = torch::ones({last() ? 3 : 4});
  const std::string late = error_of<hvd::Mismatch>([&] { hvd::grouped_allreduce(many, {.name = "many"}); });
  INFO(late);
  CHECK(contains(late, "float32 [3]"));
  CHECK(contains(late, "float32 [4]"));
  // Members of several types travel together.
  const Tensors mixed =
      hvd::grouped_allreduce({rank_tensor(0), data({5}, kInt, hvd::rank()), data({5}, kHalf, hvd::rank())}, {.op = ReduceOp::Sum});
  CHECK(same(mixed[1], reduced(all_data({5}, kInt, everyone()), ReduceOp::Sum)));
  CHECK(same(mixed[2], reduced(all_data({5}, kHalf, everyone()), ReduceOp::Sum)));
}

TEST_CASE("several threads submit at once") {
  constexpr int kThreads = 4;
  constexpr int kRounds = 25;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([t, &wrong] {
      for (int i = 0; i < kRounds; ++i) {
        const std::string name = "thread." + std::to_string(t);
        const at::Tensor sum = hvd::allreduce(torch::full({50 + t}, i + t + hvd::rank(), kLong), {.name = name, .op = ReduceOp::Sum});
        const std::int64_t n = hvd::size();
        if (!same(sum, torch::full({50 + t}, n * (i + t) + n * (n - 1) / 2, kLong))) ++wrong;
        if (hvd::allgather(torch::ones({t + 1}), {.name = name}).size(0) != n * (t + 1)) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  // One handle, two threads.
  const auto handle = hvd::allreduce_async(rank_tensor(0).requires_grad_(), {.op = ReduceOp::Sum});
  at::Tensor first;
  std::thread other([&] { first = handle.wait(); });
  const at::Tensor second = handle.wait();
  other.join();
  CHECK(first.is_same(second));
}

TEST_CASE("stats count what was done") {
  const auto before = hvd::stats();
  hvd::allreduce(torch::ones({100}));
  hvd::grouped_allreduce({torch::ones({10}), torch::ones({20})});
  hvd::broadcast(torch::ones({7}));
  const auto after = hvd::stats();
  CHECK(after.tensors_submitted - before.tensors_submitted == 4);
  CHECK(after.bytes_reduced - before.bytes_reduced == 4 * 130);
  CHECK(after.batches_run - before.batches_run == 3);
  CHECK(after.tensors_fused - before.tensors_fused == 2);
  CHECK(after.negotiation_rounds >= before.negotiation_rounds);
  if (hvd::size() > 1) CHECK(after.negotiation_rounds - before.negotiation_rounds >= 3);
  CHECK(after.bytes_to_other_hosts == before.bytes_to_other_hosts);
}

TEST_CASE("life: init twice, topology, shutdown, init again") {
  const int rank = hvd::rank();
  const int size = hvd::size();
  hvd::init();
  CHECK(hvd::rank() == rank);
  CHECK(hvd::local_rank() == rank);
  CHECK(hvd::local_size() == size);
  CHECK(hvd::cross_rank() == 0);
  CHECK(hvd::cross_size() == 1);
  CHECK(hvd::is_homogeneous());
  CHECK(!hvd::backend_description().empty());
  CHECK(hvd::global_process_set().size() == size);
  CHECK(hvd::global_process_set().rank() == rank);
  CHECK(hvd::global_process_set().included());
  CHECK(hvd::global_process_set().id() == 0);

  const auto done = hvd::allreduce_async(rank_tensor(0), {.op = ReduceOp::Sum});
  const auto pending = hvd::allreduce_async(rank_tensor(0), {.name = "only rank " + std::to_string(rank), .op = ReduceOp::Sum});
  hvd::shutdown();
  CHECK(!hvd::is_initialized());
  CHECK(same(done.wait(), torch::full({3}, size * (size - 1) / 2, kFloat)));
  CHECK(pending.done());
  if (size > 1) {
    CHECK(contains(error_of<hvd::Shutdown>([&] { pending.wait(); }), "only rank " + std::to_string(rank)));
    CHECK_THROWS_AS(pending.wait(), hvd::Shutdown);
  }
  CHECK_THROWS_AS(hvd::rank(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::size(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::local_rank(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::local_size(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::cross_rank(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::cross_size(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::is_homogeneous(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::stats(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::barrier(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::allreduce(torch::ones({2})), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::allgather(torch::ones({2})), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::broadcast(torch::ones({2})), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::broadcast_object(1, 0), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::process_set(0), hvd::NotInitialized);
  hvd::init();
  CHECK(hvd::rank() == rank);
  CHECK(hvd::size() == size);
  CHECK(hvd::stats().tensors_submitted == 0);
  CHECK(same(hvd::allreduce(rank_tensor(0), {.op = ReduceOp::Sum}), reduced_ranks(ReduceOp::Sum)));
}

TEST_CASE("process sets of the configuration") {
  const int size = hvd::size();
  std::vector<int> even;
  std::vector<int> odd;
  for (int r = 0; r < size; ++r) (r % 2 == 0 ? even : odd).push_back(r);
  hvd::Config config;
  config.process_sets = {even, {size - 1}};
  if (!odd.empty()) config.process_sets.push_back(odd);
  const Restarted world(config);
  const auto sets = static_cast<int>(config.process_sets.size());
  CHECK_THROWS_AS(hvd::process_set(sets + 1), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::process_set(-1), hvd::InvalidArgument);
  for (int id = 1; id <= sets; ++id) {
    const auto& ranks = config.process_sets[static_cast<std::size_t>(id - 1)];
    const hvd::ProcessSet set = hvd::process_set(id);
    const auto place = std::find(ranks.begin(), ranks.end(), hvd::rank());
    CHECK(set.id() == id);
    CHECK(set.size() == static_cast<int>(ranks.size()));
    CHECK(set.included() == (place != ranks.end()));
    CHECK(set.ranks() == ranks);
    if (!set.included()) {
      CHECK_THROWS_AS(hvd::allreduce(torch::ones({2}), {.process_set = set}), hvd::InvalidArgument);
      CHECK_THROWS_AS(hvd::allgather(torch::ones({2}), {.process_set = set}), hvd::InvalidArgument);
      CHECK_THROWS_AS(hvd::broadcast(torch::ones({2}), {.root_rank = ranks[0], .process_set = set}), hvd::InvalidArgument);
      CHECK_THROWS_AS(hvd::barrier(set), hvd::InvalidArgument);
      continue;
    }
    CHECK(set.rank() == place - ranks.begin());
    hvd::barrier(set);
    CHECK(same(hvd::allreduce(data({5}, kDouble, hvd::rank()), {.name = "x", .process_set = set}),
               reduced(all_data({5}, kDouble, ranks), ReduceOp::Average)));
    CHECK(same(hvd::allgather(data({2}, kInt, hvd::rank()), {.name = "x", .process_set = set}), torch::cat(all_data({2}, kInt, ranks))));
    const int root = ranks.back();  // global
    CHECK(same(hvd::broadcast(data({5}, kInt, hvd::rank()), {.name = "x", .root_rank = root, .process_set = set}), data({5}, kInt, root)));
    for (int r = 0; r < size; ++r)
      if (std::find(ranks.begin(), ranks.end(), r) == ranks.end())
        CHECK_THROWS_AS(hvd::broadcast(torch::ones({2}), {.root_rank = r, .process_set = set}), hvd::InvalidArgument);
    CHECK(hvd::broadcast_object(hvd::rank() * 3, root, set) == root * 3);
    CHECK(hvd::allgather_object(hvd::rank(), set) == ranks);
    // Gradients stay in the set.
    const at::Tensor x = data({4}, kDouble, hvd::rank()).requires_grad_();
    (hvd::allgather(hvd::broadcast(x, {.root_rank = root, .process_set = set}), {.process_set = set}).sum() * (hvd::rank() + 1)).backward();
    double mean = 0;
    for (const int r : ranks) mean += static_cast<double>(r + 1) / static_cast<double>(ranks.size());
    CHECK(torch::allclose(x.grad(), torch::full({4}, hvd::rank() == root ? mean : 0.0, kDouble)));
    if (ranks.size() > 1)  // the text has global ranks
      CHECK(contains(
          error_of<hvd::Mismatch>([&] { hvd::allreduce(torch::ones({hvd::rank() == root ? 2 : 3}), {.name = "x", .process_set = set}); }),
          "rank " + std::to_string(root) + ": float32 [2]"));
  }
  // The same name in all sets at once; the global set works beside them.
  std::vector<std::pair<int, hvd::Handle<at::Tensor>>> handles;
  for (int id = 0; id <= sets; ++id)
    if (hvd::process_set(id).included())
      handles.emplace_back(
          id, hvd::allreduce_async(torch::ones({3}), {.name = "everywhere", .op = ReduceOp::Sum, .process_set = hvd::process_set(id)}));
  for (const auto& [id, handle] : handles) CHECK(same(handle.wait(), torch::full({3}, static_cast<float>(hvd::process_set(id).size()))));
  hvd::barrier();
}

struct Plain {
  int a;
  double b;
  bool operator==(const Plain&) const = default;
};

/// Both collectives carry `make(rank)`.
template <class Make>
void check_object(Make make) {
  const int root = hvd::size() - 1;
  CHECK(hvd::broadcast_object(make(hvd::rank()), root) == make(root));
  const auto all = hvd::allgather_object(make(hvd::rank()));
  REQUIRE(all.size() == static_cast<std::size_t>(hvd::size()));
  for (int r = 0; r < hvd::size(); ++r) CHECK(all[static_cast<std::size_t>(r)] == make(r));
}

TEST_CASE("objects") {
  using Map = std::map<std::string, std::vector<int>>;
  check_object([](int r) { return r * 7; });
  check_object([](int r) { return 0.1 * r; });
  check_object([](int r) { return Plain{r, r / 3.0}; });
  check_object([](int r) { return std::string(static_cast<std::size_t>(r * 1000), 'a') + '\0' + std::to_string(r); });
  check_object([](int r) { return std::string(static_cast<std::size_t>(r), 'x'); });  // empty on rank 0
  check_object([](int r) { return std::vector<std::string>(static_cast<std::size_t>(r), "rank " + std::to_string(r)); });
  check_object([](int r) { return std::vector<bool>{r % 2 == 0, true, false}; });
  check_object([](int r) { return Map{{"rank", {r, r + 1}}, {std::to_string(r), {}}}; });
  check_object([](int r) { return std::pair<int, std::string>{r, "x"}; });
  check_object([](int r) { return r == 0 ? std::nullopt : std::optional<std::string>(std::to_string(r)); });
  check_object([](int r) { return std::tuple<int, std::string, std::vector<double>>{r, "x", {0.5 * r}}; });
  check_object([](int r) { return std::set<std::string>{std::to_string(r), "x"}; });
  check_object([](int r) { return std::unordered_map<std::string, int>{{std::to_string(r), r}, {"x", 2}}; });
  check_object([](int r) { return std::array<std::string, 2>{std::to_string(r), "x"}; });

  for (const auto type : kTypes) {
    const at::Tensor mine = data({hvd::rank() + 1, 2}, type, hvd::rank());
    CHECK(same(hvd::broadcast_object(mine, hvd::size() - 1), data({hvd::size(), 2}, type, hvd::size() - 1)));
    CHECK(same(mine, data({hvd::rank() + 1, 2}, type, hvd::rank())));
    const Tensors all = hvd::allgather_object(mine);
    for (int r = 0; r < hvd::size(); ++r) CHECK(same(all[static_cast<std::size_t>(r)], data({r + 1, 2}, type, r)));
  }
  CHECK(same(hvd::broadcast_object(torch::tensor(2.5 + hvd::rank()), 0), torch::tensor(2.5)));
  const Tensors list = hvd::broadcast_object(Tensors(static_cast<std::size_t>(hvd::rank() + 2), rank_tensor(1)), 0);
  REQUIRE(list.size() == 2);
  CHECK(same(list[1], torch::ones({3})));

  torch::nn::Linear linear(3, 2);
  torch::nn::init::constant_(linear->weight, hvd::rank());
  const auto modules = hvd::allgather_object(linear);
  for (int r = 0; r < hvd::size(); ++r)
    CHECK(same(modules[static_cast<std::size_t>(r)]->weight.detach(), torch::full({2, 3}, static_cast<float>(r))));
  CHECK(same(linear->weight.detach(), torch::full({2, 3}, static_cast<float>(hvd::rank()))));
  const torch::nn::Linear received = hvd::broadcast_object(linear, hvd::size() - 1);
  CHECK(same(received->weight.detach(), torch::full({2, 3}, static_cast<float>(hvd::size() - 1))));
  const auto pair = hvd::broadcast_object(std::pair(rank_tensor(0), hvd::rank()), 0);  // tensors inside share nothing with the given ones
  CHECK(same(pair.first, torch::zeros({3})));
  CHECK_THROWS_AS(hvd::broadcast_object(1, hvd::size()), hvd::InvalidArgument);
}

}  // namespace
