// Persistent operations on tensors: values, layouts, types, what changes between starts, what
// autograd is told, and ends.
#include <optional>

#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat, at::kInt;
using hvd::ReduceOp;

constexpr int kRounds = 5;  // from the third start on a small one takes the fast path

at::Tensor sum_of(at::IntArrayRef sizes, at::ScalarType type, int variant) {
  return reduced(all_data(sizes, type, everyone(), variant), ReduceOp::Sum);
}

TEST_CASE("persistent: every type and size, all operations under way at once") {
  const int n = hvd::size();
  for (const auto type : kTypes)
    for (const std::int64_t width : {0, 1, 16384, 1 << 19}) {
      if (width > 1 && type != kFloat && type != at::kHalf) continue;
      CAPTURE(width);
      CAPTURE(at::toString(type));
      const auto empty = [&](std::int64_t rows) { return torch::zeros({rows, width}, type); };
      const auto kind = type == at::kBool ? ReduceOp::Max : ReduceOp::Sum;
      const at::Tensor combined = empty(1), root = empty(1), mine = empty(1), all = empty(n),
                       even = empty(n), exchanged = empty(n), own = empty(1);
      auto reduce = hvd::allreduce_init(combined, {.op = kind});
      auto send = hvd::broadcast_init(root, {.root_rank = n - 1});
      auto gather = hvd::allgather_init(all, mine);
      auto exchange = hvd::alltoall_init(exchanged, even);
      std::optional<hvd::PersistentHandle<at::Tensor>> scatter;
      if (type != at::kBool) scatter = hvd::reducescatter_init(own, even, {.op = ReduceOp::Sum});
      CHECK(reduce.done());
      CHECK(reduce.wait().is_same(combined));
      CHECK(exchange.wait().output.is_same(exchanged));
      for (int round = 0; round < kRounds; ++round) {
        for (const at::Tensor& given : {combined, root, mine, even})
          given.copy_(data(given.sizes(), type, hvd::rank(), round));
        const at::Tensor gathered = hvd::allgather(mine);
        const auto parts = hvd::alltoall(even);
        reduce.start();
        send.start();
        gather.start();
        exchange.start();
        if (scatter) scatter->start();
        CHECK(gather.wait().is_same(all));
        const auto received = exchange.wait();
        CHECK(send.wait().is_same(root));
        while (!reduce.done()) continue;
        CHECK(reduce.wait().is_same(combined));
        CHECK(same(combined, reduced(all_data({1, width}, type, everyone(), round), kind)));
        CHECK(same(root, data({1, width}, type, n - 1, round)));
        CHECK(same(all, gathered));
        CHECK(same(exchanged, parts.output));
        CHECK(same(received.received_splits, parts.received_splits));
        if (scatter)
          CHECK(same(scatter->wait(), sum_of({n, width}, type, round)[hvd::rank()].unsqueeze(0)));
      }
    }
}

TEST_CASE("persistent: layouts and compression go as the plain forms do; splits are read once") {
  for (const std::int64_t width : {3, 3000}) {
    at::Tensor turned = torch::zeros({width, 4}).t(),
               images = torch::zeros({2, 3, 4, width})
                            .to(at::kFloat, false, false, at::MemoryFormat::ChannelsLast);
    at::Tensor half = torch::zeros({width}),
               whole = torch::zeros({4 * hvd::size(), width}).slice(1, 0, width - 1);
    at::Tensor splits = torch::full({hvd::size()}, 1, kInt),
               rows = torch::zeros({hvd::size() + 2, 2}), got = torch::zeros({hvd::size(), 2});
    auto a = hvd::allreduce_init(turned, {.op = ReduceOp::Sum});
    auto b = hvd::broadcast_init(images);
    auto c =
        hvd::allreduce_init(half, {.op = ReduceOp::Sum, .compression = hvd::Compression::fp16()});
    const at::Tensor mine = whole.slice(0, 4 * hvd::rank(), 4 * hvd::rank() + 4);
    auto d = hvd::allgather_init(whole, mine);
    auto e = hvd::alltoall_init(got, rows, {.splits = splits});
    splits.zero_();
    for (int round = 0; round < kRounds; ++round) {
      for (const at::Tensor& given : {turned, images, half, mine, rows})
        given.copy_(data(given.sizes(), kFloat, hvd::rank(), round));
      a.start();
      b.start();
      c.start();
      d.start();
      e.start();
      CHECK(same(e.wait().received_splits, torch::ones({hvd::size()}, kInt)));
      d.wait();
      c.wait();
      b.wait();
      a.wait();
      CHECK(same(turned, sum_of(turned.sizes(), kFloat, round)));
      CHECK(same(images, data(images.sizes(), kFloat, 0, round)));
      CHECK(same(half, sum_of(half.sizes(), kFloat, round)));
      CHECK(same(whole, torch::cat(all_data(mine.sizes(), kFloat, everyone(), round))));
      for (int from = 0; from < hvd::size(); ++from)
        CHECK(same(got[from], data(rows.sizes(), kFloat, from, round)[hvd::rank()]));
    }
  }
}

TEST_CASE("persistent: names, made up or shared with plain calls, in any order") {
  at::Tensor first = torch::zeros({2}), second = torch::zeros({2}), named = torch::zeros({4});
  auto a = hvd::allreduce_init(first, {.op = ReduceOp::Sum});
  auto b = hvd::allreduce_init(second, {.op = ReduceOp::Sum});
  auto c = hvd::allreduce_init(named, {.name = "shared", .op = ReduceOp::Sum});
  for (int round = 0; round < 3 * kRounds; ++round) {
    for (const at::Tensor& given : {first, second, named})
      given.copy_(data(given.sizes(), kFloat, hvd::rank(), round));
    const bool turned = (round + hvd::rank()) % 2 == 0;
    (turned ? a : b).start();
    (turned ? b : a).start();
    if ((round + hvd::rank()) % 3 == 0) {
      hvd::allreduce_(named, {.name = "shared", .op = ReduceOp::Sum});
    } else {
      c.start();
      c.wait();
    }
    b.wait();
    a.wait();
    CHECK(same(first, sum_of({2}, kFloat, round)));
    CHECK(same(second, sum_of({2}, kFloat, round)));
    CHECK(same(named, sum_of({4}, kFloat, round)));
  }
}

TEST_CASE("persistent: without an output, one is made for as many rows from each rank") {
  const int size = hvd::size(), rank = hvd::rank();
  const at::Tensor rows = torch::zeros({2, 3}), to_all = torch::zeros({2 * size, 3}),
                   summed = torch::zeros({size + 1, 2}, kDouble);
  auto gather = hvd::allgather_init(rows);
  auto exchange = hvd::alltoall_init(to_all, {.name = "exchange"});
  auto scatter = hvd::reducescatter_init(summed, {.op = ReduceOp::Sum});
  auto counted = hvd::reducescatter_init(summed, {.op = ReduceOp::Sum, .counts = [&] {
                                                    std::vector<std::int64_t> counts(
                                                        static_cast<std::size_t>(size), 2);
                                                    counts.back() += 2;
                                                    return counts;
                                                  }()});
  for (int round = 0; round < 3; ++round) {
    CAPTURE(round);
    rows.fill_(rank + round);
    to_all.copy_(torch::arange(2 * size, kFloat).reshape({2 * size, 1}).expand({2 * size, 3}) +
                 100 * rank + round);
    summed.fill_(rank + round);
    gather.start();
    exchange.start();
    scatter.start();
    counted.start();
    const at::Tensor gathered = gather.wait();
    CHECK(gathered.size(0) == 2 * size);
    for (int from = 0; from < size; ++from)
      CHECK(same(gathered.narrow(0, 2 * from, 2), torch::full({2, 3}, 1.0F * (from + round))));
    const auto exchanged = exchange.wait();
    CHECK(exchanged.output.size(0) == 2 * size);
    for (int from = 0; from < size; ++from)
      CHECK(
          same(exchanged.output[2 * from], torch::full({3}, 2.0F * rank + 100.0F * from + round)));
    const double sum = size * (size - 1) / 2.0 + size * round;
    CHECK(same(scatter.wait(), torch::full({rank == 0 ? 2 : 1, 2}, sum, kDouble)));
    CHECK(same(counted.wait(), torch::full({rank == size - 1 ? 4 : 2}, sum, kDouble)));
  }
  CHECK(contains(error_of<hvd::InvalidArgument>(
                     [&] { hvd::alltoall_init(to_all, {.splits = torch::tensor({1})}); }),
                 "with splits"));
  CHECK(contains(error_of<hvd::InvalidArgument>([] { hvd::allgather_init(at::Tensor()); }),
                 "undefined"));
  CHECK(contains(error_of<hvd::InvalidArgument>([] { hvd::allgather_init(torch::tensor(1.0F)); }),
                 "scalar"));
  if (size == 1) return;
  auto uneven = hvd::allgather_init(torch::ones({rank == 0 ? 2 : 1}), {.name = "uneven"});
  uneven.start();
  CHECK_THROWS_AS(uneven.wait(), hvd::Mismatch);
}

TEST_CASE("persistent: what this rank can see is refused at once") {
  const at::Tensor tensor = torch::ones({2, 2});
  const auto refusal = [](const at::Tensor& given, const hvd::AllreduceOptions& options = {}) {
    return error_of<hvd::InvalidArgument>([&] { hvd::allreduce_init(given, options); });
  };
  CHECK(contains(refusal(at::Tensor()), "undefined"));
  CHECK(contains(refusal(torch::eye(3).to_sparse()), "layout"));
  CHECK(contains(refusal(torch::ones({1}).expand({4})), "share memory"));
  CHECK(contains(refusal(torch::ones({2}, at::kBool)), "not supported"));
  CHECK(contains(refusal(tensor, {.process_set = hvd::ProcessSet(99)}), "99"));
  CHECK(contains(refusal(tensor, {.compression = hvd::Compression::int8()}), "int8"));
  CHECK(contains(error_of<hvd::InvalidArgument>(
                     [&] { hvd::broadcast_init(tensor, {.name = "x", .root_rank = -1}); }),
                 "root rank"));
  CHECK(contains(error_of<hvd::InvalidArgument>([&] {
                   hvd::allgather_init(torch::ones({0, 2}), tensor);
                 }),
                 "rows"));
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::allgather_init(at::Tensor(), tensor); }),
                 "undefined"));
  CHECK(contains(
      error_of<hvd::InvalidArgument>([&] { hvd::alltoall_init(tensor, torch::tensor(1.0F)); }),
      "scalar"));
  CHECK(contains(error_of<hvd::InvalidArgument>([&] {
                   hvd::reducescatter_init(torch::ones({9, 2}), tensor);
                 }),
                 "rows"));
}

TEST_CASE("persistent: a tensor that is not what it was is refused at the start") {
  for (const std::int64_t count : {4, 1 << 18}) {
    at::Tensor tensor = torch::ones({count});
    auto op = hvd::allreduce_init(tensor, {.name = "x"});
    op.start();
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { op.start(); }), "call wait() first"));
    op.wait();
    const at::Tensor before = tensor.detach();
    tensor.set_data(torch::ones({count}));
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { op.start(); }),
                   "make the persistent operation anew"));
    CHECK(op.done());
    tensor.set_data(before);
    op.start();
    op.wait();
    tensor.resize_({count / 2});
    CHECK_THROWS_AS(op.start(), hvd::InvalidArgument);
    at::Tensor square = torch::ones({2, 2});
    auto turned = hvd::broadcast_init(square);
    square.t_();
    CHECK_THROWS_AS(turned.start(), hvd::InvalidArgument);
    at::Tensor output = torch::zeros({hvd::size()}), input = torch::ones({1});
    auto gather = hvd::allgather_init(output, input);
    input.set_data(torch::ones({1}));
    CHECK_THROWS_AS(gather.start(), hvd::InvalidArgument);
  }
}

TEST_CASE(
    "persistent: a start is a change for autograd, and gradients follow where they do so for the "
    "plain form") {
  for (int round = 0; round < kRounds; ++round) {
    at::Tensor saved = torch::full({3}, 2.0), weight = torch::ones({3}, at::requires_grad());
    auto op = hvd::allreduce_init(saved, {.name = "saved"});
    const at::Tensor loss = (weight * saved).sum();
    const auto version = saved._version();
    op.start();
    CHECK(saved._version() > version);
    CHECK_THROWS_AS(loss.backward(), c10::Error);
    const at::Tensor meanwhile = (weight * saved).sum();
    op.wait();
    CHECK_THROWS_AS(loss.backward(), c10::Error);
    CHECK_THROWS_AS(meanwhile.backward(), c10::Error);

    // A leaf is changed as data are; what a leaf gave is another function of it afterwards.
    auto leaf = hvd::allreduce_init(weight, {.name = "leaf"});
    leaf.start();
    leaf.wait();
    CHECK(weight.is_leaf());
    at::Tensor middle = weight * static_cast<double>(hvd::rank() + 1);
    auto through = hvd::allreduce_init(middle, {.op = ReduceOp::Sum});
    through.start();
    CHECK(same(through.wait().detach(), torch::full({3}, hvd::size() * (hvd::size() + 1) / 2.0)));
    middle.sum().backward();
    CHECK(same(weight.grad(),
               torch::full({3}, static_cast<double>(hvd::size() * (hvd::rank() + 1)))));
    weight.mutable_grad() = at::Tensor();

    const at::Tensor gathered = torch::zeros({3 * hvd::size()});
    auto gather = hvd::allgather_init(gathered, weight, {.name = "g"});
    gather.start();
    gather.wait().sum().backward();
    CHECK(same(weight.grad(), torch::ones({3})));
    const torch::NoGradGuard no_gradient;
    auto data_only = hvd::allgather_init(torch::zeros({3 * hvd::size()}), weight, {.name = "h"});
    data_only.start();
    CHECK(!data_only.wait().requires_grad());
  }
}

TEST_CASE("persistent: errors come from wait(), and it may be started again") {
  for (int round = 0; round < 2 * kRounds; ++round) {
    at::Tensor right = torch::ones({3});
    auto op = hvd::allreduce_init(hvd::size() > 1 && last() ? torch::ones({4}) : right,
                                  {.name = "wrong"});
    if (hvd::size() > 1)
      for (int again = 0; again < 2; ++again) {
        op.start();
        CHECK(contains(error_of<hvd::Mismatch>([&] { op.wait(); }), "'wrong'"));
        CHECK(op.done());
      }
    op = hvd::allreduce_init(right, {.name = "wrong", .op = ReduceOp::Sum});
    op.start();
    op.wait();
    CHECK(same(right, torch::full({3}, static_cast<double>(hvd::size()))));
  }
}

TEST_CASE("persistent: ends while it is under way wait for nothing, and the memory stays") {
  for (const int before : {0, kRounds}) {  // submitted; on the fast path
    const bool leaves = hvd::rank() == 0;
    const auto name = [&](const char* what) { return what + std::to_string(before); };
    at::Tensor few = torch::ones({3}), many = torch::ones({300'000});
    std::optional<hvd::PersistentHandle<at::Tensor>> small =
        hvd::allreduce_init(few, {.name = name("left small")});
    std::optional<hvd::PersistentHandle<at::Tensor>> large =
        hvd::allreduce_init(many, {.name = name("left large")});
    for (int round = 0; round < before; ++round) {
      small->start();
      small->wait();
    }
    if (leaves) {
      small->start();
      large->start();
      small.reset();
      large.reset();
      few = many = at::Tensor();
    }
    hvd::barrier();  // rank 0 has not waited for the others
    if (leaves) continue;
    small->start();
    large->start();
    large->wait();
    small->wait();
    CHECK(same(few, torch::ones({3})));
    CHECK(same(many, torch::ones({300'000})));
  }
}

TEST_CASE("persistent: shutdown() ends what is under way; another world needs another operation") {
  at::Tensor tensor = torch::ones({3}), other = torch::ones({3});
  auto op = hvd::allreduce_init(tensor, {.name = "x"});
  auto idle = hvd::allreduce_init(other, {.name = "y"});
  // which are started as the `_async` forms
  auto turned = hvd::allreduce_init(torch::ones({3, 2}).t(), {.name = "z"});
  auto followed = hvd::allgather_init(torch::ones({3}).requires_grad_(), {.name = "w"});
  const bool starts = hvd::rank() == 0 && hvd::size() > 1;
  if (starts) op.start();
  {
    const Restarted again{hvd::Config()};
    if (starts) CHECK_THROWS_AS(op.wait(), hvd::Shutdown);
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { idle.start(); }), "anew"));
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { turned.start(); }), "anew"));
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { followed.start(); }), "anew"));
    auto fresh = hvd::allreduce_init(other, {.name = "y"});
    fresh.start();
    CHECK(same(fresh.wait(), torch::ones({3})));
  }
  CHECK_THROWS_AS(op.start(), hvd::InvalidArgument);
}

}  // namespace
