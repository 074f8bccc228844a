// Allgather, alltoall and reducescatter into tensors that exist: values, layouts, what is refused,
// and what autograd is told.
#include <numeric>

#include "tests/torch_bindings/support.h"

namespace into_test {
namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat, at::kInt;
using hvd::ReduceOp;
using Tensors = std::vector<at::Tensor>;

at::Tensor ints(const std::vector<std::int64_t>& values) { return torch::tensor(values).to(kInt); }
at::Tensor old_values(at::IntArrayRef sizes, at::ScalarType type = kFloat) {
  return torch::full(sizes, 77, type);
}
std::int64_t rows(int from, int to) { return (from * 2 + to) % 3; }
std::vector<std::int64_t> rows_from(int from, int n) {
  std::vector<std::int64_t> all;
  for (int to = 0; to < n; ++to) all.push_back(rows(from, to));
  return all;
}
std::int64_t sum(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

/// An input and what the three forms must make of it.
struct Work {
  at::Tensor input;
  hvd::AlltoallOptions exchange;
  at::Tensor gathered, exchanged, scattered, received;
};
Work work(at::ScalarType type, std::int64_t width, int variant = 0) {
  const int n = hvd::size();
  const int self = hvd::rank();
  Work made;
  const auto given = [&](int rank) {
    return data({sum(rows_from(rank, n)) + n, width}, type, rank, variant);
  };
  made.input = given(self);
  made.exchange.splits = ints(rows_from(self, n));
  Tensors all, parts;
  std::vector<std::int64_t> received;
  for (int from = 0; from < n; ++from) {
    all.push_back(given(from));
    const auto of = rows_from(from, n);
    const auto before = std::accumulate(of.begin(), of.begin() + self, std::int64_t{0});
    parts.push_back(all.back().slice(0, before, before + of[static_cast<std::size_t>(self)]));
    received.push_back(of[static_cast<std::size_t>(self)]);
  }
  made.gathered = torch::cat(all);
  made.exchanged = torch::cat(parts);
  made.received = ints(received);
  return made;
}

TEST_CASE(
    "into: every type, small and large, at once and later, as the forms that make their result") {
  for (const auto type : kTypes)
    for (const std::int64_t width : {std::int64_t{3}, std::int64_t{30011}}) {
      if (width > 3 && type != kFloat && type != at::kHalf) continue;
      // from the third time on a small one goes another way
      for (int round = 0; round < 4; ++round) {
        const Work made = work(type, width, round);
        const at::Tensor whole = old_values(made.gathered.sizes(), type);
        const at::Tensor same_tensor = hvd::allgather_into(whole, made.input, {.name = "g"});
        CHECK(same_tensor.is_same(whole));
        CHECK(same(whole, made.gathered));
        const at::Tensor later = old_values(made.gathered.sizes(), type);
        CHECK(hvd::allgather_into_async(later, made.input).wait().is_same(later));
        CHECK(same(later, made.gathered));

        const at::Tensor part = old_values(made.exchanged.sizes(), type);
        const auto exchanged =
            hvd::alltoall_into(part, made.input, {.name = "a", .splits = made.exchange.splits});
        CHECK(exchanged.output.is_same(part));
        CHECK(same(part, made.exchanged));
        CHECK(same(exchanged.received_splits, made.received));
        part.fill_(0);
        CHECK(same(hvd::alltoall_into_async(part, made.input, made.exchange).wait().received_splits,
                   made.received));
        CHECK(same(part, made.exchanged));

        if (type == at::kBool) continue;
        const at::Tensor even = data({2 * hvd::size() + 1, width}, type, hvd::rank(), round);
        const at::Tensor own = hvd::reducescatter(even, {.op = ReduceOp::Sum});
        const at::Tensor scattered = old_values(own.sizes(), type);
        CHECK(hvd::reducescatter_into(scattered, even, {.name = "s", .op = ReduceOp::Sum})
                  .is_same(scattered));
        CHECK(same(scattered, own));
        scattered.fill_(0);
        hvd::reducescatter_into_async(scattered, even, {.op = ReduceOp::Sum}).wait();
        CHECK(same(scattered, own));
      }
    }
}

TEST_CASE("into: outputs that are strided, parts of others, or share memory with the input") {
  for (const std::int64_t width : {std::int64_t{4}, std::int64_t{20000}}) {
    const Work made = work(kFloat, width);
    const at::Tensor turned = old_values({width, made.gathered.size(0)}).t();
    hvd::allgather_into(turned, made.input);
    CHECK(same(turned, made.gathered));
    const at::Tensor around = old_values({made.gathered.size(0) + 2, width + 1});
    hvd::allgather_into(around.slice(0, 1, -1).slice(1, 0, width), made.input);
    CHECK(same(around.slice(0, 1, -1).slice(1, 0, width), made.gathered));
    CHECK(around[0].eq(77).all().item<bool>());
    CHECK(around.slice(1, width).eq(77).all().item<bool>());

    const at::Tensor whole = old_values({3 * hvd::size(), width});
    const at::Tensor mine = whole.slice(0, 3 * hvd::rank(), 3 * hvd::rank() + 3);
    mine.copy_(data({3, width}, kFloat, hvd::rank()));
    hvd::allgather_into(whole, mine);
    CHECK(same(whole, torch::cat(all_data({3, width}, kFloat, everyone()))));
    const at::Tensor before = whole.clone();
    const auto there = hvd::alltoall_into(whole, whole);
    CHECK(same(whole, hvd::alltoall(before).output));
    CHECK(same(there.received_splits, torch::full({hvd::size()}, 3, kInt)));
  }
}

TEST_CASE("into: process sets") {
  std::vector<int> others;
  for (int r = hvd::size() > 1 ? 1 : 0; r < hvd::size(); ++r) others.push_back(r);
  const auto set = hvd::add_process_set(others);
  const auto n = static_cast<std::int64_t>(others.size());
  if (set.included()) {
    const at::Tensor whole = old_values({2 * n, 3});
    hvd::allgather_into(whole, data({2, 3}, kFloat, hvd::rank()), {.process_set = set});
    CHECK(same(whole, torch::cat(all_data({2, 3}, kFloat, others))));
    const at::Tensor own = old_values({1});
    hvd::reducescatter_into(own, torch::ones({n}), {.op = ReduceOp::Sum, .process_set = set});
    CHECK(own.item<float>() == static_cast<float>(n));
  } else {
    CHECK_THROWS_AS(hvd::allgather_into(old_values({2}), torch::ones({2}), {.process_set = set}),
                    hvd::InvalidArgument);
  }
  hvd::remove_process_set(set);
}

TEST_CASE("into: what cannot fit is refused at the call, what does not fit on all ranks") {
  const int n = hvd::size();
  const at::Tensor input = torch::ones({n, 2});
  const auto refused = [&](const at::Tensor& output) {
    const auto text =
        error_of<hvd::InvalidArgument>([&] { hvd::allgather_into(output, input, {.name = "x"}); });
    CHECK(contains(text, "allgather_into"));
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::alltoall_into(output, input); }),
                   "alltoall_into"));
    CHECK(contains(error_of<hvd::InvalidArgument>([&] {
                     hvd::reducescatter_into_async(output, input, {.op = ReduceOp::Sum});
                   }),
                   "reducescatter_into"));
    return text;
  };
  CHECK(contains(refused(torch::ones({n * n, 2}, kDouble)), "float64"));
  CHECK(contains(refused(torch::ones({n * n, 3})), "must be equal"));
  CHECK(contains(refused(torch::ones({n * n})), "must be equal"));
  CHECK(contains(refused(torch::ones({0, 2})), "0 rows"));
  CHECK(contains(refused(at::Tensor()), "undefined"));
  if (n > 1) CHECK(contains(refused(torch::ones({1, 2}).expand({n * n, 2})), "share memory"));
  CHECK(contains(refused(torch::eye(3).to_sparse()), "layout"));
  CHECK_THROWS_AS(hvd::allgather_into(torch::ones({n}), torch::tensor(1.0F)), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::reducescatter_into(torch::ones({2, 2}), input), hvd::InvalidArgument);
  if (n > 1) {
    const at::Tensor wrong = old_values({n * n + (last() ? 1 : 0), 2});
    const auto said =
        error_of<hvd::Mismatch>([&] { hvd::allgather_into(wrong, input, {.name = "x"}); });
    CHECK(contains(said, "allgather 'x': the output does not have as many rows as come"));
    CHECK(contains(said, grouping(std::to_string(n * n) + " rows come, and the output has " +
                                      std::to_string(n * n),
                                  std::to_string(n * n) + " rows come, and the output has " +
                                      std::to_string(n * n + 1))));
    CHECK(wrong.eq(77).all().item<bool>());
    CHECK_THROWS_AS(hvd::alltoall_into(old_values({n + (last() ? 1 : 0), 2}), input),
                    hvd::Mismatch);
  }
  const at::Tensor right = old_values({n * n, 2});
  CHECK(same(hvd::allgather_into(right, input, {.name = "x"}), torch::ones({n * n, 2})));
}

TEST_CASE("into: gradients of the output go to the input as those of the plain forms do") {
  const int n = hvd::size();
  const auto factor = static_cast<double>(hvd::rank() + 1);
  const auto gradients = [&](const auto& into, const auto& plain, const at::Tensor& values,
                             at::IntArrayRef sizes) {
    const at::Tensor a = values.clone().requires_grad_(true);
    const at::Tensor b = values.clone().requires_grad_(true);
    const at::Tensor earlier = torch::ones(sizes, kDouble).requires_grad_(true);
    at::Tensor output = earlier * 2;  // what was in it before gets no gradient
    into(output, a * 3);
    CHECK(output.requires_grad());
    (output * output * factor).sum().backward();
    const at::Tensor expected = plain(b * 3);
    (expected * expected * factor).sum().backward();
    CHECK(same(output.detach(), expected.detach()));
    CHECK(same(a.grad(), b.grad()));
    CHECK((!earlier.grad().defined() || earlier.grad().eq(0).all().item<bool>()));
    at::Tensor fresh = torch::empty(sizes, kDouble);
    into(fresh, b.detach());
    CHECK_FALSE(fresh.requires_grad());
  };
  const at::Tensor values = data({2 * n, 3}, kDouble, hvd::rank());
  for (const bool async : {false, true}) {
    gradients(
        [&](at::Tensor& to, const at::Tensor& from) {
          async ? hvd::allgather_into_async(to, from).wait() : hvd::allgather_into(to, from);
        },
        [](const at::Tensor& from) { return hvd::allgather(from); }, values, {2 * n * n, 3});
    gradients(
        [&](at::Tensor& to, const at::Tensor& from) {
          async ? hvd::alltoall_into_async(to, from).wait() : hvd::alltoall_into(to, from);
        },
        [](const at::Tensor& from) { return hvd::alltoall(from).output; }, values, {2 * n, 3});
    gradients(
        [&](at::Tensor& to, const at::Tensor& from) {
          const hvd::ReducescatterOptions sum{.op = ReduceOp::Sum, .prescale_factor = 0.5};
          async ? hvd::reducescatter_into_async(to, from, sum).wait()
                : hvd::reducescatter_into(to, from, sum);
        },
        [](const at::Tensor& from) {
          return hvd::reducescatter(from, {.op = ReduceOp::Sum, .prescale_factor = 0.5});
        },
        values, {2, 3});
  }
}

TEST_CASE("into: a change of the output for autograd; leaves that require a gradient are refused") {
  const int n = hvd::size();
  const at::Tensor weight = torch::ones({n, 2}).requires_grad_(true);
  at::Tensor saved = torch::ones({n, 2});
  const auto version = saved._version();
  const at::Tensor product = (weight * saved).sum();
  hvd::allgather_into(saved, torch::full({1, 2}, 5.0F));
  CHECK(saved._version() > version);
  CHECK_THROWS_AS(product.backward(), c10::Error);

  const at::Tensor input = torch::full({1, 2}, 3.0F);
  CHECK(contains(
      error_of<hvd::InvalidArgument>([&] { hvd::allgather_into(weight, input, {.name = "leaf"}); }),
      "leaf"));
  CHECK_THROWS_AS(hvd::allgather_into(weight.view({n, 2}), input), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::alltoall_into(weight, torch::ones({n, 2})), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::allgather_into((weight * 2).chunk(2, 1)[0], torch::ones({1, 1})),
                  hvd::InvalidArgument);
  {
    const at::NoGradGuard no_gradient;
    hvd::allgather_into(weight, input);
  }
  CHECK(same(weight.detach(), torch::full({n, 2}, 3.0F)));
  CHECK(weight.is_leaf());
}

TEST_CASE("into: options reach the operation: a deadline is looked at, and kept to") {
  using namespace std::chrono_literals;
  const int n = hvd::size();
  const at::Tensor rows = torch::ones({n, 2});
  for (const auto deadline : {std::chrono::nanoseconds(-1ns), std::chrono::nanoseconds(1min)}) {
    const auto each = [&](const auto& work) {
      if (deadline < 0ns) {
        CHECK_THROWS_AS(work(), hvd::InvalidArgument);
      } else {
        work();
      }
    };
    at::Tensor gathered = old_values({n * n, 2}), exchanged = old_values({n, 2});
    at::Tensor scattered = old_values({1, 2});
    each([&] { hvd::allgather_into(gathered, rows, {.deadline = deadline}); });
    each([&] { hvd::allgather_into_async(gathered, rows, {.deadline = deadline}).wait(); });
    each([&] { hvd::alltoall_into(exchanged, rows, {.deadline = deadline}); });
    each([&] { hvd::alltoall_into_async(exchanged, rows, {.deadline = deadline}).wait(); });
    each([&] { hvd::reducescatter_into(scattered, rows, {.deadline = deadline}); });
    each([&] { hvd::reducescatter_into_async(scattered, rows, {.deadline = deadline}).wait(); });
    const float expected = deadline < 0ns ? 77.0F : 1.0F;
    CHECK(same(gathered, torch::full({n * n, 2}, expected)));
    CHECK(same(exchanged, torch::full({n, 2}, expected)));
    CHECK(same(scattered, torch::full({1, 2}, expected)));
  }
}

TEST_CASE("into: a rank that has joined is missed") {
  if (hvd::size() == 1) return;
  if (last()) {
    hvd::join();
    return;
  }
  CHECK_THROWS_AS(hvd::allgather_into(old_values({hvd::size()}), torch::ones({1})), hvd::Joined);
  CHECK_THROWS_AS(hvd::alltoall_into(old_values({hvd::size()}), torch::ones({hvd::size()})),
                  hvd::Joined);
  CHECK_THROWS_AS(hvd::reducescatter_into(old_values({1}), torch::ones({hvd::size()})),
                  hvd::Joined);
  hvd::join();
}

}  // namespace

}  // namespace into_test
