// What happens if I ... : collectives in place, on tensors that autograd looks after, and on what
// they cannot take.
#include <functional>

#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;
using hvd::ReduceOp;
using Tensors = std::vector<at::Tensor>;

struct InPlace {
  const char* name;
  std::function<void(const at::Tensor&)> call;
};
/// Every form that changes its argument.
std::vector<InPlace> forms() {
  return {
      {"allreduce_", [](const at::Tensor& x) { hvd::allreduce_(x); }},
      {"allreduce_ by name", [](const at::Tensor& x) { hvd::allreduce_(x, {.name = "in place"}); }},
      {"broadcast_ by name", [](const at::Tensor& x) { hvd::broadcast_(x, {.name = "in place"}); }},
      {"allreduce_ fp16",
       [](const at::Tensor& x) { hvd::allreduce_(x, {.compression = hvd::Compression::fp16()}); }},
      {"allreduce_async_", [](const at::Tensor& x) { hvd::allreduce_async_(x).wait(); }},
      {"grouped_allreduce_",
       [](const at::Tensor& x) {
         hvd::grouped_allreduce_({torch::zeros({3}), x});
       }},
      {"grouped_allreduce_async_",
       [](const at::Tensor& x) {
         hvd::grouped_allreduce_async_({x, torch::zeros({3})}).wait();
       }},
      {"broadcast_", [](const at::Tensor& x) { hvd::broadcast_(x); }},
      {"broadcast_async_", [](const at::Tensor& x) { hvd::broadcast_async_(x).wait(); }},
      {"broadcast_parameters", [](const at::Tensor& x) {
         hvd::broadcast_parameters({{"x", x}}, 0);
       }}};
}
const std::vector<std::vector<std::int64_t>> kSmallAndLarge{{4, 5}, {70, 80}};
at::Tensor leaf(at::IntArrayRef sizes, int variant = 0) {
  return data(sizes, kDouble, hvd::rank(), variant).requires_grad_();
}

// ---------------------------------------------------------------------------------------- autograd

TEST_CASE(
    "what happens if I change a tensor in place that backward still needs: backward says so, "
    "whatever the form") {
  for (const auto& form : forms()) {
    for (const auto& sizes : kSmallAndLarge) {
      for (const bool transposed : {false, true}) {
        for (int again = 0; again < 3; ++again) {  // small ones are fast from the second time on
          CAPTURE(form.name);
          CAPTURE(transposed);
          const at::Tensor x = leaf(sizes);
          const at::Tensor y = x.exp();  // its gradient is its result
          {
            const torch::NoGradGuard no_gradient;
            form.call(transposed ? y.t() : y);
          }
          const std::string text = error_of<c10::Error>([&] { y.sum().backward(); });
          CHECK(contains(text, "modified by an inplace operation"));
        }
      }
    }
  }
}

TEST_CASE("what happens if I call backward before I wait for what it needs: it says so") {
  for (const bool reduce : {true, false}) {
    const at::Tensor x = leaf({4, 5});
    const at::Tensor y = x.exp(), loss = y.sum();
    const auto handle = [&] {
      const torch::NoGradGuard no_gradient;
      return reduce ? hvd::allreduce_async_(y) : hvd::broadcast_async_(y);
    }();
    CHECK(contains(error_of<c10::Error>([&] { loss.backward(); }),
                   "modified by an inplace operation"));
    handle.wait();
  }
}

TEST_CASE("what happens if backward is shown a tensor that is on its way: it says so") {
  for (const bool reduce : {true, false}) {
    const at::Tensor x = data({4, 5}, kDouble, hvd::rank());
    const at::Tensor weight = leaf({4, 5}, 1);
    const auto handle = reduce ? hvd::allreduce_async_(x) : hvd::broadcast_async_(x);
    const at::Tensor early = x * weight;  // must not be read yet
    handle.wait();
    CHECK(contains(error_of<c10::Error>([&] { early.sum().backward(); }),
                   "modified by an inplace operation"));
    (x * weight).sum().backward();
    CHECK(torch::equal(weight.grad(), x));
    CHECK(handle.wait().is_same(x));  // waiting again is no other change
    (x * weight).sum().backward();
  }
}

TEST_CASE(
    "what happens if I change in place what has a history: gradients pass the collective as with "
    "the plain form") {
  const auto gradient = [](const std::function<at::Tensor(const at::Tensor&)>& call,
                           at::IntArrayRef sizes) {
    const at::Tensor x = leaf(sizes);
    const at::Tensor weight = data(sizes, kDouble, hvd::rank(), 3);
    const at::Tensor y = call(x * 2);
    (y * weight).sum().backward();
    return std::pair(x.grad(), y.detach());
  };
  const auto compare = [&](const std::function<at::Tensor(const at::Tensor&)>& plain,
                           const std::function<at::Tensor(const at::Tensor&)>& changed,
                           at::IntArrayRef sizes) {
    const auto [expected, value] = gradient(plain, sizes);
    for (int again = 0; again < 3; ++again) {
      const auto [found, same_value] = gradient(changed, sizes);
      CHECK(same(found, expected));
      CHECK(same(same_value, value));
    }
  };
  for (const auto& sizes : kSmallAndLarge) {
    for (const ReduceOp op : {ReduceOp::Average, ReduceOp::Sum}) {
      const hvd::AllreduceOptions options{.op = op, .prescale_factor = 0.5};
      const auto plain = [&](const at::Tensor& y) { return hvd::allreduce(y, options); };
      compare(
          plain, [&](const at::Tensor& y) { return hvd::allreduce_(y, options); }, sizes);
      compare(
          plain, [&](const at::Tensor& y) { return hvd::allreduce_async_(y, options).wait(); },
          sizes);
      compare(
          plain,
          [&](const at::Tensor& y) {
            return hvd::grouped_allreduce_({torch::ones({2}), y}, options)[1];
          },
          sizes);
      compare(
          plain,
          [&](const at::Tensor& y) {
            return hvd::grouped_allreduce_async_({y, torch::ones({2})}, options).wait()[0];
          },
          sizes);
      compare([&](const at::Tensor& y) { return hvd::allreduce(y.t(), options); },
              [&](const at::Tensor& y) {
                const at::Tensor view = y.t();  // a view: the history of its base is rewritten
                hvd::grouped_allreduce_({view, torch::ones({2})}, options);
                return view;
              },
              {5, 5});
    }
    const int root = hvd::size() - 1;
    const auto plain = [&](const at::Tensor& y) { return hvd::broadcast(y, {.root_rank = root}); };
    compare(
        plain, [&](const at::Tensor& y) { return hvd::broadcast_(y, {.root_rank = root}); }, sizes);
    compare(
        plain,
        [&](const at::Tensor& y) {
          return hvd::broadcast_async_(y, {.name = "b", .root_rank = root}).wait();
        },
        sizes);
  }
  // Part of a tensor.
  const at::Tensor x = leaf({4, 3});
  const at::Tensor y = x * 2;
  hvd::allreduce_(y.narrow(0, 0, 2), {.name = "rows", .op = ReduceOp::Sum});
  y.sum().backward();
  CHECK(torch::equal(x.grad().narrow(0, 0, 2), torch::full({2, 3}, 2.0 * hvd::size(), kDouble)));
  CHECK(torch::equal(x.grad().narrow(0, 2, 2), torch::full({2, 3}, 2.0, kDouble)));
}

TEST_CASE(
    "what happens if I change parameters in place with grad mode on: they are data, and stay "
    "leaves") {
  for (const auto& form : forms()) {
    CAPTURE(form.name);
    const at::Tensor parameter = leaf({4, 4});
    form.call(parameter);
    form.call(parameter[1]);
    form.call(parameter.split(2)[0]);
    form.call(parameter.t());
    CHECK(parameter.is_leaf());
    CHECK(parameter.requires_grad());
    CHECK(same_on_all_ranks(parameter));
    parameter.pow(2).sum().backward();
    CHECK(torch::equal(parameter.grad(), 2 * parameter.detach()));
  }
}

TEST_CASE(
    "what happens if I change one of several views that split made: refused at the call where a "
    "gradient would be wrong") {
  for (const bool reduce : {true, false}) {
    const at::Tensor y = leaf({4, 4}) * 2;
    const at::Tensor part = y.split(2)[0];
    const std::string text = error_of<hvd::InvalidArgument>([&] {
      reduce ? hvd::grouped_allreduce_({torch::ones({2}), part}, {.name = "half"}).front()
             : hvd::broadcast_(part, {.name = "half"});
    });
    CHECK(contains(text, "'half': in place on one of several views"));
    const torch::NoGradGuard no_gradient;
    reduce ? hvd::allreduce_(part, {.name = "half"}) : hvd::broadcast_(part, {.name = "half"});
  }
}

TEST_CASE(
    "what happens if I call collectives under NoGradGuard or in inference mode: values as always, "
    "no gradients") {
  const at::Tensor expected = reduced(all_data({4, 5}, kDouble, everyone()), ReduceOp::Average);
  const at::Tensor x = leaf({4, 5});
  {
    const torch::NoGradGuard no_gradient;
    const at::Tensor mean = hvd::allreduce(x);
    CHECK(torch::equal(mean, expected));
    CHECK(!mean.requires_grad());
    CHECK(!hvd::allgather(x).requires_grad());
    CHECK(!hvd::grouped_allreduce({x, x})[1].requires_grad());
  }
  at::Tensor made_there;
  at::Tensor transposed;
  {
    const c10::InferenceMode inference;
    made_there = data({4, 5}, kDouble, hvd::rank());
    transposed = made_there.clone().t();
    CHECK(made_there.is_inference());
    for (const auto& form : forms()) {
      form.call(made_there.clone());
      form.call(made_there.clone().t());
      form.call(x.detach().clone().t());
    }
    CHECK(torch::equal(hvd::allreduce_(made_there.clone()), expected));
    CHECK(torch::equal(hvd::allreduce(made_there), expected));
  }
  CHECK(torch::equal(hvd::allreduce_(made_there), expected));  // and outside
  CHECK(torch::equal(hvd::allreduce_(transposed), expected.t()));
  CHECK(torch::equal(hvd::allreduce_async_(made_there).wait(), expected));
}

TEST_CASE(
    "what happens if members of a group share a history: the same tensor is reduced once, parts "
    "that overlap are refused") {
  const hvd::AllreduceOptions sum{.name = "tied", .op = ReduceOp::Sum};
  const at::Tensor x = leaf({4, 4});
  const at::Tensor y = x * 2;
  hvd::grouped_allreduce_({y, torch::ones({2}), y}, sum);
  y.sum().backward();
  CHECK(torch::equal(x.grad(), torch::full({4, 4}, 2.0 * hvd::size(), kDouble)));
  const at::Tensor z = leaf({4, 4}) * 2;
  for (const Tensors& group :
       {Tensors{z, z.view({-1})}, Tensors{z.narrow(0, 0, 3), z.narrow(0, 2, 2)}}) {
    const std::string text =
        error_of<hvd::InvalidArgument>([&] { hvd::grouped_allreduce_(group, sum); });
    CHECK(contains(
        text, "allreduce 'tied', tensor 1 of the group (0 to 1): in place together with tensor 0"));
  }
  const at::Tensor first = z.narrow(0, 0, 2);
  const at::Tensor second = z.narrow(0, 2, 2);
  hvd::grouped_allreduce_({first, second}, sum);  // these do not
  CHECK(torch::equal(z, reduced(all_data({4, 4}, kDouble, everyone()), ReduceOp::Sum) * 2));
}

// ------------------------------------------------------------------------------------------ memory

TEST_CASE(
    "what happens if members of a group share memory: in place, each element is reduced once") {
  for (const std::int64_t rows : {6, 600}) {
    for (const bool async : {false, true}) {
      const auto fresh = [&] { return data({rows, 8}, kDouble, hvd::rank()); };
      const auto run = [&](const Tensors& group) {
        const hvd::AllreduceOptions options{.op = ReduceOp::Sum};
        async ? hvd::grouped_allreduce_async_(group, options).wait()
              : hvd::grouped_allreduce_(group, options);
      };
      const at::Tensor sum = reduced(all_data({rows, 8}, kDouble, everyone()), ReduceOp::Sum);
      const at::Tensor tied = fresh();
      run({tied, tied, tied.view({-1})});
      CHECK(torch::equal(tied, sum));
      const at::Tensor overlapping = fresh();
      run({overlapping.narrow(0, 2, 4), overlapping, overlapping.narrow(0, 1, 3)});
      CHECK(torch::equal(overlapping, sum));
      const at::Tensor columns = fresh();
      run({columns.narrow(1, 0, 5), columns.narrow(1, 3, 5)});
      CHECK(torch::equal(columns, sum));
      const at::Tensor half = last() ? fresh() : at::Tensor();  // only here they are tied
      const at::Tensor one = last() ? half : fresh();
      const at::Tensor two = last() ? half : fresh();
      run({one, two});
      CHECK(torch::equal(one, sum));
      CHECK(torch::equal(two, sum));
    }
  }
}

TEST_CASE(
    "what happens if I expand a tensor and change it in place: refused at the call, by name") {
  const at::Tensor wide = torch::ones({3, 1}).expand({3, 4});
  using Wrong = hvd::InvalidArgument;
  CHECK(contains(error_of<Wrong>([&] { hvd::allreduce_(wide, {.name = "wide"}); }),
                 "allreduce 'wide': in place on a tensor whose elements share"));
  CHECK(contains(error_of<Wrong>([&] { hvd::broadcast_(wide, {.name = "wide"}); }),
                 "broadcast 'wide': in place"));
  CHECK(contains(error_of<Wrong>([&] {
                   hvd::grouped_allreduce_({torch::ones({2}), wide}, {.name = "g"});
                 }),
                 "allreduce 'g', tensor 1 of the group"));
  CHECK(torch::equal(hvd::allreduce(wide), torch::ones({3, 4})));
}

TEST_CASE(
    "what happens if I drop handles, or tensors before their handles: all operations end, and the "
    "next ones work") {
  for (int round = 0; round < 3; ++round) {
    hvd::allreduce_async(data({5, 3}, kFloat, hvd::rank()));  // both
    const at::Tensor kept = data({5, 3}, kDouble, hvd::rank());
    hvd::allreduce_async_(kept, {.name = "dropped", .op = ReduceOp::Sum});
    hvd::Handle<at::Tensor> handle;
    hvd::Handle<hvd::AlltoallResult> rows;
    {
      const at::Tensor gone = data({5, 3}, kDouble, hvd::rank());
      handle = hvd::allreduce_async(gone, {.op = ReduceOp::Sum});
      rows = hvd::alltoall_async(torch::full({hvd::size()}, hvd::rank()),
                                 {.splits = torch::ones({hvd::size()}, at::kInt)});
    }
    const at::Tensor sum = reduced(all_data({5, 3}, kDouble, everyone()), ReduceOp::Sum);
    CHECK(torch::equal(handle.wait(), sum));
    CHECK(handle.wait().is_same(handle.wait()));  // as often as one likes
    CHECK(torch::equal(rows.wait().output, torch::arange(hvd::size())));
    CHECK(torch::equal(rows.wait().output, torch::arange(hvd::size())));
    hvd::barrier();
    CHECK(contains(
        error_of<hvd::InvalidArgument>([] { static_cast<void>(hvd::Handle<at::Tensor>().wait()); }),
        "empty handle"));
  }
}

// ------------------------------------------------------------------------------------------- names

TEST_CASE(
    "what happens if a tensor is undefined: refused at the call, by name, in every collective and "
    "form") {
  const at::Tensor none;
  const at::Tensor some = torch::ones({4});
  const hvd::AllreduceOptions reduce{.name = "layer.weight"};
  const hvd::AllgatherOptions gather{.name = "layer.weight"};
  const hvd::BroadcastOptions cast{.name = "layer.weight"};
  const hvd::ReducescatterOptions scatter{.name = "layer.weight"};
  const hvd::AlltoallOptions exchange{.name = "layer.weight"};
  const Tensors group{some, some, none};
  const auto says = [](const char* op, const char* more, const std::function<void()>& call) {
    CAPTURE(op);
    const std::string text = error_of<hvd::InvalidArgument>(call);
    CHECK_MESSAGE(
        text.starts_with(std::string(op) + " 'layer.weight'" + more + ": an undefined tensor"),
        text);
  };
  const char* const third = ", tensor 2 of the group (0 to 2)";
  says("allreduce", "", [&] { hvd::allreduce(none, reduce); });
  says("allreduce", "", [&] { hvd::allreduce_(none, reduce); });
  says("allreduce", "", [&] { hvd::allreduce_async(none, reduce); });
  says("allreduce", "", [&] { hvd::allreduce_async_(none, reduce); });
  says("allreduce", third, [&] { hvd::grouped_allreduce(group, reduce); });
  says("allreduce", third, [&] { hvd::grouped_allreduce_(group, reduce); });
  says("allreduce", third, [&] { hvd::grouped_allreduce_async(group, reduce); });
  says("allreduce", third, [&] { hvd::grouped_allreduce_async_(group, reduce); });
  says("sparse_allreduce", "", [&] { hvd::sparse_allreduce(none, reduce); });
  says("sparse_allreduce", "", [&] { hvd::sparse_allreduce_async(none, reduce); });
  says("allgather", "", [&] { hvd::allgather(none, gather); });
  says("allgather", "", [&] { hvd::allgather_async(none, gather); });
  says("allgather", third, [&] { hvd::grouped_allgather(group, gather); });
  says("allgather", third, [&] { hvd::grouped_allgather_async(group, gather); });
  says("broadcast", "", [&] { hvd::broadcast(none, cast); });
  says("broadcast", "", [&] { hvd::broadcast_(none, cast); });
  says("broadcast", "", [&] { hvd::broadcast_async(none, cast); });
  says("broadcast", "", [&] { hvd::broadcast_async_(none, cast); });
  says("reducescatter", "", [&] { hvd::reducescatter(none, scatter); });
  says("reducescatter", "", [&] { hvd::reducescatter_async(none, scatter); });
  says("reducescatter", third, [&] { hvd::grouped_reducescatter(group, scatter); });
  says("reducescatter", third, [&] { hvd::grouped_reducescatter_async(group, scatter); });
  says("alltoall", "", [&] { hvd::alltoall(none, exchange); });
  says("alltoall", "", [&] { hvd::alltoall_async(none, exchange); });
  const auto wrong_splits = [&] { hvd::alltoall(some, {.name = "layer.weight", .splits = none}); };
  CHECK(contains(error_of<hvd::InvalidArgument>(wrong_splits),
                 "alltoall 'layer.weight': the splits are an undefined tensor"));
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::allreduce(none); }),
                 "allreduce: an undefined tensor"));
}

TEST_CASE("what happens if a collective cannot take a tensor: the refusal names it") {
  using Wrong = hvd::InvalidArgument;
  const at::Tensor flags = torch::ones({3}, at::kBool);
  CHECK(contains(error_of<Wrong>([&] { hvd::allreduce(flags, {.name = "mask"}); }),
                 "allreduce 'mask': average of bool"));
  CHECK(contains(
      error_of<Wrong>([&] { hvd::allreduce_(flags, {.name = "mask", .op = ReduceOp::Sum}); }),
      "allreduce 'mask': sum of bool"));
  const at::Tensor odd = torch::ones({3}).to(at::kFloat8_e5m2);
  CHECK(contains(error_of<Wrong>([&] { hvd::allreduce(odd, {.name = "odd"}); }),
                 "allreduce 'odd': tensors of type Float8_e5m2"));
  CHECK(contains(error_of<Wrong>([&] {
                   hvd::grouped_allgather({flags, odd}, {.name = "odd"});
                 }),
                 "allgather 'odd', tensor 1 of the group"));
  const at::Tensor sparse = torch::eye(3).to_sparse();
  CHECK(contains(error_of<Wrong>([&] { hvd::broadcast_(sparse, {.name = "table"}); }),
                 "broadcast 'table': a tensor of layout Sparse"));
  CHECK(contains(
      error_of<Wrong>([&] { hvd::allgather(torch::eye(3).to_sparse_csr(), {.name = "table"}); }),
      "allgather 'table': a tensor of layout"));
  CHECK(contains(
      error_of<Wrong>([&] { hvd::allreduce(torch::empty({3}, at::kMeta), {.name = "m"}); }),
      "allreduce 'm': tensors on meta"));
}

TEST_CASE(
    "what happens if a raw buffer is a null pointer: refused at the call, by name; without "
    "elements it is fine") {
  const hvd::Buffer null{nullptr, hvd::DataType::Float32, {3}};
  const hvd::Buffer empty{nullptr, hvd::DataType::Float32, {0}};
  float value[3] = {1, 2, 3};
  const hvd::Buffer some{value, hvd::DataType::Float32, {3}};
  using Wrong = hvd::InvalidArgument;
  for (int round = 0; round < 3; ++round) {
    const auto says = [](const std::function<void()>& call) {
      const std::string text = error_of<Wrong>(call);
      CHECK_MESSAGE(contains(text, "'layer': tensor 0 of shape [3] has no memory"), text);
    };
    says([&] { hvd::allreduce(null, some, {.name = "layer"}); });
    says([&] { hvd::allreduce(some, null, {.name = "layer"}); });
    says([&] { hvd::broadcast(null, {.name = "layer"}); });
    says([&] { hvd::allgather(null, {.name = "layer"}); });
    says([&] { hvd::reducescatter(null, {.name = "layer"}); });
    says([&] {
      hvd::alltoall(
          null, {.name = "layer",
                 .splits = std::vector<std::int64_t>(static_cast<std::size_t>(hvd::size()), 0)});
    });
    hvd::allreduce(empty, empty, {.name = "layer"});
    hvd::broadcast(empty, {.name = "layer"});
    CHECK(hvd::allgather(empty, {.name = "layer"}).shape.front() == 0);
    hvd::broadcast(some, {.name = "layer2"});  // the lanes that it has from now on
    CHECK(contains(error_of<Wrong>([&] { hvd::broadcast(null, {.name = "layer2"}); }),
                   "has no memory"));
  }
}

}  // namespace
