// What all collectives on tensors have in common: layouts, names, handles, mismatches, groups,
// threads.
#include <atomic>
#include <thread>

#include "tests/torch_bindings/support.h"
#include "torch_bindings/collectives/operation.h"

namespace {

using namespace hvd::test;
using at::kBool, at::kComplexDouble, at::kDouble, at::kFloat, at::kHalf, at::kInt, at::kLong;
using hvd::ReduceOp;
using Tensors = std::vector<at::Tensor>;

/// A GPU that is full.
struct FullGpu final : hvd::detail::StreamPoint {
  [[nodiscard]] void* event() const override { return nullptr; }
  [[nodiscard]] at::Tensor allocate(const std::function<at::Tensor()>& /*make*/) override {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory");
  }
  [[nodiscard]] at::Tensor allocate_on_host(at::IntArrayRef sizes,
                                            const at::TensorOptions& options) override {
    return at::empty(sizes, options);
  }
  void hand_over(const std::vector<at::Tensor>& /*tensors*/,
                 const std::vector<hvd::HandleState::Completion>& /*completions*/) const override {}
};

TEST_CASE(
    "a rank whose GPU has no memory for a result takes part in the operation with memory of the "
    "host, and is to be told") {
  const auto operation = std::make_shared<hvd::detail::Operation>();
  operation->given = operation->sent = {torch::ones({2, 3})};
  operation->received.resize(1);
  operation->submission.kind = hvd::OpKind::Allgather;
  operation->submission.name = "rows";
  hvd::detail::allocate_rows(operation);
  operation->point = std::make_shared<FullGpu>();
  const auto submission = std::move(operation->submission);
  const void* const memory = submission.allocate(0, 5);
  CHECK(memory == operation->received.front().data_ptr());
  CHECK(operation->received.front().sizes() == at::IntArrayRef({5, 3}));
  CHECK(operation->lack.starts_with(
      "allgather 'rows': no memory for the result of [5, 3] on this rank: CUDA out of memory"));
}

TEST_CASE("a refused unnamed call on one rank does not put the ranks out of step") {
  if (last()) {
    CHECK_THROWS_AS(hvd::allreduce(torch::ones({2}, kBool), {.op = ReduceOp::Sum}),
                    hvd::InvalidArgument);
    CHECK_THROWS_AS(hvd::allgather(torch::tensor(1.0)), hvd::InvalidArgument);
    CHECK_THROWS_AS(hvd::broadcast(torch::ones({2}), {.root_rank = hvd::size()}),
                    hvd::InvalidArgument);
    CHECK_THROWS_AS(hvd::broadcast(torch::ones({2}), {.root_rank = -1}), hvd::InvalidArgument);
    CHECK_THROWS_AS(hvd::allreduce(at::Tensor()), hvd::InvalidArgument);
    CHECK_THROWS_AS(hvd::grouped_allreduce({}), hvd::InvalidArgument);
    CHECK_THROWS_AS(hvd::allreduce(torch::ones({2}), {.process_set = hvd::ProcessSet(7)}),
                    hvd::InvalidArgument);
    CHECK_THROWS_AS(hvd::grouped_allgather({torch::ones({2}), torch::tensor(1.0)}),
                    hvd::InvalidArgument);
  }
  CHECK(same(hvd::allreduce(rank_tensor(1), {.op = ReduceOp::Max}),
             torch::full({3}, static_cast<float>(hvd::size()))));
  CHECK(hvd::allgather(torch::ones({1})).size(0) == hvd::size());
  CHECK(same(hvd::broadcast(rank_tensor(0)), torch::zeros({3})));
}

TEST_CASE("conjugated and negated tensors are read and written by their values") {
  const int n = hvd::size(), next = (hvd::rank() + 1) % n, before = (hvd::rank() + n - 1) % n;
  const auto conjugated = +[](const at::Tensor& values) { return values.conj(); };
  const auto negated = +[](const at::Tensor& values) { return torch::imag(values.conj()); };
  for (const auto lazily : {conjugated, negated}) {
    const auto of = [&](int rank) { return lazily(data({n, 3}, kComplexDouble, rank)); };
    const auto room = [&](std::int64_t rows) {
      return lazily(torch::zeros({rows, 3}, kComplexDouble));
    };
    const at::Tensor mine = of(hvd::rank());
    REQUIRE((mine.is_conj() || mine.is_neg()));
    Tensors all, rows;
    for (const int rank : everyone()) {
      all.push_back(of(rank).clone().resolve_conj().resolve_neg());
      rows.push_back(all.back().narrow(0, hvd::rank(), 1));
    }
    const at::Tensor sum = reduced(all, ReduceOp::Sum), sum_row = reduced(rows, ReduceOp::Sum);
    CHECK(same(hvd::alltoall(mine).output, torch::cat(rows)));
    CHECK(same(hvd::reducescatter(mine, {.op = ReduceOp::Sum}), sum_row));
    CHECK(same(hvd::allgather_into(room(n * n), mine), torch::cat(all)));
    CHECK(same(hvd::alltoall_into(room(n), mine).output, torch::cat(rows)));
    CHECK(same(hvd::reducescatter_into(room(1), mine, {.op = ReduceOp::Sum}), sum_row));
    at::Tensor received = room(n);
    const auto sent = hvd::send_async(mine, {.peer = next});
    hvd::recv(received, {.peer = before});
    sent.wait();
    CHECK(same(received, all[static_cast<std::size_t>(before)]));

    const at::Tensor one = of(hvd::rank()), root = of(hvd::rank());
    const Tensors group{of(hvd::rank()), mine.clone()};
    hvd::grouped_allreduce_(group, {.op = ReduceOp::Sum});
    CHECK((same(group[0], sum) && same(group[1], sum)));
    auto reduce = hvd::allreduce_init(one, {.op = ReduceOp::Sum});
    auto send = hvd::broadcast_init(root, {.root_rank = n - 1});
    auto gather = hvd::allgather_init(room(n * n), mine);
    auto exchange = hvd::alltoall_init(room(n), mine);
    auto scatter = hvd::reducescatter_init(room(1), mine, {.op = ReduceOp::Sum});
    for (int round = 0; round < 4; ++round) {
      one.copy_(mine);
      root.copy_(mine);
      reduce.start();
      CHECK(same(reduce.wait(), sum));
      send.start();
      CHECK(same(send.wait(), all.back()));
      gather.start();
      CHECK(same(gather.wait(), torch::cat(all)));
      exchange.start();
      CHECK(same(exchange.wait().output, torch::cat(rows)));
      scatter.start();
      CHECK(same(scatter.wait(), sum_row));
    }
  }
  const at::Tensor parts = torch::imag(data({3}, kComplexDouble, 1).conj());
  CHECK(same(hvd::allreduce(parts, {.compression = hvd::Compression::bf16()}), parts));
  CHECK(same(hvd::broadcast_object(parts, 0), parts));
  CHECK(same(hvd::broadcast_object(data({3}, kComplexDouble, 1).conj(), 0),
             data({3}, kComplexDouble, 1).conj()));
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
    for (const auto& tensors : all)
      inputs.push_back(tensors[i].clone().resolve_conj().resolve_neg());
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

TEST_CASE("names: in flight once per operation and process set") {
  for (int early = 0; early < hvd::size() && hvd::size() > 1; ++early) {
    if (hvd::rank() == early) {
      const auto before = hvd::stats();
      const auto first =
          hvd::allreduce_async(rank_tensor(0), {.name = "name", .op = ReduceOp::Sum});
      const std::string text = error_of<hvd::DuplicateName>(
          [] { hvd::allreduce_async(torch::ones({3}), {.name = "name"}); });
      CHECK(contains(text, "'name'"));
      CHECK_THROWS_AS(hvd::grouped_allreduce_async({torch::ones({3})}, {.name = "name"}),
                      hvd::DuplicateName);
      // a DuplicateName is one
      CHECK_THROWS_AS(hvd::allreduce(torch::ones({3}), {.name = "name"}), hvd::InvalidArgument);
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
      CHECK(same(hvd::allreduce(rank_tensor(0), {.name = "name", .op = ReduceOp::Sum}),
                 reduced_ranks(ReduceOp::Sum)));
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
          hvd::allreduce_async(torch::full({i + 1}, i + hvd::rank(), kLong),
                               {.name = "name." + std::to_string(i), .op = ReduceOp::Max});
    }
    for (int i = 0; i < 10; ++i)
      CHECK(same(handles[static_cast<std::size_t>(i)].wait(),
                 torch::full({i + 1}, i + hvd::size() - 1, kLong)));
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

/// `call(differs)` runs on every rank, `differs` only on the last; then `good()` shows that nothing
/// stuck.
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
    REQUIRE(
        same(hvd::broadcast(rank_tensor(0, {17, 3}), {.name = "tensor"}), torch::zeros({17, 3})));
  };
  good();
  const auto shapes = [&](std::vector<std::int64_t> common, std::vector<std::int64_t> other) {
    return [=](bool differs) {
      hvd::allreduce(torch::ones(n(differs, common, other)), {.name = "tensor"});
    };
  };
  check_mismatch({"'tensor'", grouping("float32 [17, 3]", "float32 [18, 3]")},
                 shapes({17, 3}, {18, 3}), good);
  check_mismatch({"'tensor'", grouping("float32 [17, 1311]", "float32 [17, 23, 57]")},
                 shapes({17, 1311}, {17, 23, 57}), good);
  check_mismatch({grouping("float32 [3]", "float32 []")}, shapes({3}, {}), good);
  check_mismatch(
      {grouping("float32 [17, 3]", "int32 [17, 4]"), "type"},  // the type comes first
      [&](bool differs) {
        hvd::allreduce(differs ? torch::ones({17, 4}, kInt) : torch::ones({17, 3}),
                       {.name = "tensor"});
      },
      good);
  check_mismatch(
      {"'tensor'", grouping("average", "max")},
      [&](bool differs) {
        hvd::allreduce(torch::ones({17, 3}),
                       {.name = "tensor", .op = n(differs, ReduceOp::Average, ReduceOp::Max)});
      },
      good);
  check_mismatch(
      {"'tensor'", "0.25", "scale"},  // the scales before the operation
      [&](bool differs) {
        hvd::allreduce(torch::ones({17, 3}), {.name = "tensor",
                                              .op = n(differs, ReduceOp::Average, ReduceOp::Sum),
                                              .prescale_factor = n(differs, 1.0, 0.25)});
      },
      good);
  check_mismatch(
      {"'tensor'", "0.125"},
      [&](bool differs) {
        hvd::allreduce(torch::ones({17, 3}),
                       {.name = "tensor", .postscale_factor = n(differs, 1.0, 0.125)});
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
        hvd::allreduce(torch::ones({17, 3}), {.name = "tensor",
                                              .compression = n(differs, hvd::Compression::none(),
                                                               hvd::Compression::fp16())});
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

TEST_CASE("one name, different operations: a Mismatch on every rank") {
  if (hvd::size() == 1) return;
  const at::Tensor tensor = torch::ones({2});
  const auto said = error_of<hvd::Mismatch>([&] {
    last() ? hvd::broadcast(tensor, {.name = "x"}) : hvd::allreduce(tensor, {.name = "x"});
  });
  CHECK(contains(
      said, "'x': the operation differs between ranks: " + grouping("allreduce", "broadcast")));
  CHECK(same(hvd::allreduce(tensor, {.name = "x"}), tensor));
}

TEST_CASE("groups are all or nothing") {
  if (hvd::size() == 1) return;
  const Tensors given{rank_tensor(0, {4}), rank_tensor(0, {last() ? 5 : 6}), rank_tensor(0, {7})};
  const std::string text =
      error_of<hvd::Mismatch>([&] { hvd::grouped_allreduce_(given, {.name = "group"}); });
  CHECK(contains(text, "'group'"));
  CHECK(contains(text, "[5]"));
  CHECK(contains(text, "[6]"));
  CHECK(same(given[0], rank_tensor(0, {4})));
  CHECK(same(given[2], rank_tensor(0, {7})));
  CHECK(same(hvd::grouped_allreduce({rank_tensor(0), rank_tensor(1)},
                                    {.name = "group", .op = ReduceOp::Sum})[0],
             reduced_ranks(ReduceOp::Sum)));
  // Different numbers of members.
  const Tensors few{rank_tensor(0), rank_tensor(0)};
  CHECK_THROWS_AS(hvd::grouped_allreduce(last() ? Tensors{rank_tensor(0)} : few, {.name = "group"}),
                  hvd::Mismatch);
  // The difference is far behind: it must still be told.
  Tensors many(60, torch::ones({2}));
  many[50] = torch::ones({last() ? 3 : 4});
  const std::string late =
      error_of<hvd::Mismatch>([&] { hvd::grouped_allreduce(many, {.name = "many"}); });
  INFO(late);
  CHECK(contains(late, "float32 [3]"));
  CHECK(contains(late, "float32 [4]"));
  // Members of several types travel together.
  const Tensors mixed = hvd::grouped_allreduce(
      {rank_tensor(0), data({5}, kInt, hvd::rank()), data({5}, kHalf, hvd::rank())},
      {.op = ReduceOp::Sum});
  CHECK(same(mixed[1], reduced(all_data({5}, kInt, everyone()), ReduceOp::Sum)));
  CHECK(same(mixed[2], reduced(all_data({5}, kHalf, everyone()), ReduceOp::Sum)));
}

TEST_CASE("a group in braces is one of tensors; an empty one is refused") {
  CHECK_THROWS_AS(hvd::grouped_allreduce({}), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::grouped_allgather({}), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::grouped_allgather_async({}, {.name = "g"}), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::grouped_reducescatter({}), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::grouped_reducescatter_async({}), hvd::InvalidArgument);
  const at::Tensor rows = torch::ones({hvd::size(), 2});
  CHECK(same(hvd::grouped_allgather({rows, rows})[1], hvd::allgather(rows)));
  CHECK(same(hvd::grouped_reducescatter_async({rows}).wait()[0], torch::ones({1, 2})));
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
        const at::Tensor sum = hvd::allreduce(torch::full({50 + t}, i + t + hvd::rank(), kLong),
                                              {.name = name, .op = ReduceOp::Sum});
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

TEST_CASE(
    "then: a function that follows an operation on tensors has its result, and may go on with it") {
  const int n = hvd::size();
  const auto number = torch::full({3}, hvd::rank() + 1, kFloat);
  const at::Tensor sum = torch::full({3}, n * (n + 1) / 2, kFloat);
  for (int round = 0; round < 4; ++round) {
    std::atomic<int> called{0}, wrong{0};
    const auto check = [&](bool right) {
      wrong += right ? 0 : 1;
      ++called;
    };
    at::Tensor in_place = number.clone();
    const auto handle = hvd::allreduce_async(
        number, {.name = "then", .op = ReduceOp::Sum, .deadline = std::chrono::minutes(10)});
    handle.then([&](const hvd::Handle<at::Tensor>& ended) { check(same(ended.wait(), sum)); });
    hvd::allreduce_async_(in_place, {.name = "in place", .op = ReduceOp::Sum}).then([&] {
      check(same(in_place, sum));
    });
    hvd::grouped_allreduce_async({number, number * 2}, {.name = "group", .op = ReduceOp::Sum})
        .then([&](const auto& ended) { check(same(ended.wait()[1], sum * 2)); });
    hvd::allgather_async(number, {.name = "rows"}).then([&](const auto& ended) {
      // Of a tensor that the function alone knows.
      check(same(hvd::allreduce(ended.wait(), {.name = "of rows", .op = ReduceOp::Average}),
                 ended.wait()));
    });
    while (called < 4) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(wrong == 0);
    CHECK(same(handle.wait(), sum));
  }
}

}  // namespace
