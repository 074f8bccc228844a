// data_parallel() and DataParallel with several inputs and with inputs and outputs that are made of
// tensors.
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kLong;
using torch::nn::Linear;

struct StructuredExtras {
  double factor = 1;
  bool operator==(const StructuredExtras&) const = default;
};

/// Takes and gives most of what may be taken and given.
struct StructuredNet : torch::nn::Cloneable<StructuredNet> {
  using Batch = std::map<std::string, at::Tensor>;
  using Features = std::pair<at::Tensor, std::vector<at::Tensor>>;
  using Output = std::tuple<at::Tensor, std::unordered_map<std::string, at::Tensor>,
                            std::optional<at::Tensor>, std::string, at::Tensor>;
  StructuredNet() { StructuredNet::reset(); }
  void reset() override {
    rows = register_module("rows", torch::nn::Embedding(5, 4));
    body = register_module("body", Linear(4, 3));
    to(kDouble);
    int variant = 0;
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : parameters())
      parameter.copy_(data(parameter.sizes(), kDouble, 0, variant++) * 0.3);
  }
  Output forward(const Batch& batch, const Features& features, const at::Tensor& bias,
                 const StructuredExtras& extras, const std::optional<at::Tensor>& absent) {
    const at::Tensor x = rows(batch.at("rows")) * batch.at("weights").unsqueeze(1) +
                         features.first * features.second.at(0);
    const at::Tensor y = torch::tanh(body(x) + bias) * extras.factor;
    if (absent) throw std::invalid_argument("what is absent has come");
    return {
        y, {{"sums", y.sum(1)}, {"items", batch.at("rows")}}, x.narrow(1, 0, 2), "name", y.sum()};
  }
  torch::nn::Embedding rows{nullptr};
  Linear body{nullptr};
};

struct StructuredInputs {
  explicit StructuredInputs(std::int64_t items)
      : batch{{"rows", torch::arange(items, kLong) % 5},
              {"weights", data({items}, kDouble, hvd::rank(), 1)}},
        features{data({items, 4}, kDouble, hvd::rank(), 2),
                 {data({items, 4}, kDouble, hvd::rank(), 3)}},
        bias(data({1}, kDouble, hvd::rank(), 4).squeeze(0)) {
    for (auto* const tensor : trained()) tensor->set_requires_grad(true);
  }
  std::vector<at::Tensor*> trained() {
    return {&batch["weights"], &features.first, &features.second[0], &bias};
  }
  StructuredNet::Batch batch;
  StructuredNet::Features features;
  at::Tensor bias;
};

at::Tensor loss_of_structures(const StructuredNet::Output& output, bool all) {
  const auto& [y, named, cut, name, sum] = output;
  const at::Tensor loss = y.square().sum() + named.at("sums").exp().sum();
  return all ? loss + cut->square().sum() + sum.sum() : loss;
}

TEST_CASE(
    "DataParallel: several inputs, tuples, lists, maps and what is no tensor, as one forward "
    "pass") {
  for (const int replicas : {1, 2, 3}) {
    for (const std::int64_t items : {1, 7}) {
      for (const bool all : {true, false}) {
        CAPTURE(replicas);
        CAPTURE(items);
        const auto net = std::make_shared<StructuredNet>(),
                   alone = std::make_shared<StructuredNet>();
        const hvd::DataParallel<StructuredNet> parallel(net, {.replicas = replicas});
        StructuredInputs given(items), same(items);
        const StructuredExtras extras{.factor = 1.5};
        const std::optional<at::Tensor> absent;
        const auto output =
            parallel.forward(given.batch, given.features, given.bias, extras, absent);
        const auto expected = alone->forward(same.batch, same.features, same.bias, extras, absent);
        CHECK(difference(std::get<0>(output), std::get<0>(expected)) < 1e-12);
        CHECK(difference(std::get<1>(output).at("sums"), std::get<1>(expected).at("sums")) < 1e-12);
        CHECK(std::get<1>(output).at("items").equal(std::get<1>(expected).at("items")));
        CHECK_FALSE(std::get<1>(output).at("items").requires_grad());
        CHECK(difference(*std::get<2>(output), *std::get<2>(expected)) < 1e-12);
        CHECK(std::get<3>(output) == "name");
        CHECK(std::get<4>(output).dim() == (replicas == 1 ? 0 : 1));  // a number of each replica
        CHECK(difference(std::get<4>(output).sum(), std::get<4>(expected)) < 1e-12);
        loss_of_structures(output, all).backward();
        loss_of_structures(expected, all).backward();
        for (std::size_t i = 0; i < net->parameters().size(); ++i)
          CHECK(difference(net->parameters()[i].grad(), alone->parameters()[i].grad()) < 1e-12);
        for (std::size_t i = 0; i < given.trained().size(); ++i)
          CHECK(difference(given.trained()[i]->grad(), same.trained()[i]->grad()) < 1e-12);
        std::get<0>(output).detach().mul_(2);  // it is the user's
      }
    }
  }
}

TEST_CASE(
    "data_parallel: a tuple has several inputs; the same tensor twice; torch::OrderedDict and "
    "std::array") {
  struct Sums : torch::nn::Module {
    torch::OrderedDict<std::string, at::Tensor> forward(const at::Tensor& a,
                                                        const std::array<at::Tensor, 2>& more) {
      torch::OrderedDict<std::string, at::Tensor> sums;
      sums.insert("sum", a + more[0] * more[1]);
      sums.insert("first", a);
      return sums;
    }
  };
  const auto sums = std::make_shared<Sums>();
  const at::Tensor a = data({5, 2}, kDouble, hvd::rank()).requires_grad_(),
                   b = data({5, 2}, kDouble, hvd::rank(), 1).requires_grad_();
  const auto output = hvd::data_parallel(sums, std::tuple(a, std::array<at::Tensor, 2>{a, b}), 2);
  CHECK(same(output["sum"].detach(), (a + a * b).detach()));
  CHECK(same(output["first"].detach(), a.detach()));
  (output["sum"].sum() + 2 * output["first"].sum()).backward();
  CHECK(difference(a.grad(), (b + 3).detach()) < 1e-12);
  CHECK(difference(b.grad(), a.detach()) < 1e-12);
}

TEST_CASE(
    "data_parallel: inputs that do not fit together and outputs that cannot be joined are refused, "
    "with words") {
  struct Odd : torch::nn::Module {
    std::vector<at::Tensor> forward(const at::Tensor& a, const at::Tensor& /*b*/) {
      return std::vector<at::Tensor>(static_cast<std::size_t>(a.size(0)), a);
    }
  };
  struct Counting : torch::nn::Module {
    std::pair<at::Tensor, std::int64_t> forward(const at::Tensor& a) { return {a, a.size(0)}; }
  };
  const auto odd = std::make_shared<Odd>();
  const at::Tensor five = torch::ones({5, 2}), one = torch::ones({1, 2});
  CHECK(contains(
      error_of<hvd::InvalidArgument>([&] { hvd::data_parallel(odd, std::tuple(five, one), 2); }),
      "an input of [5, 2] falls into 2 pieces, and one of [1, 2] into 1"));
  CHECK(contains(
      error_of<hvd::InvalidArgument>([&] { hvd::data_parallel(odd, std::tuple(five, five), 2); }),
      "they differ in how many members a list has"));
  const auto counting = std::make_shared<Counting>();
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::data_parallel(counting, five, 2); }),
                 "they differ in what is no tensor"));
  CHECK(hvd::data_parallel(counting, torch::ones({4, 2}), 2).second == 2);
  CHECK(contains(
      error_of<hvd::InvalidArgument>([&] { hvd::data_parallel(counting, torch::ones({}), 2); }),
      "a dimension to cut along"));
}

TEST_CASE(
    "data_parallel: SyncBatchNorm in several replicas of several ranks is refused on all, also "
    "where the rows are too few to cut") {
  torch::nn::Sequential net(Linear(3, 4), torch::nn::BatchNorm1d(4));
  torch::nn::BatchNorm1d itself(3);
  hvd::convert_sync_batchnorm(net);
  hvd::convert_sync_batchnorm(itself);
  const bool alone = hvd::size() == 1;
  const at::Tensor x = data({!alone && last() ? 1 : 6, 3}, at::kFloat, hvd::rank());
  const auto refused = [&](const auto& call, const std::string& part) {
    CHECK(contains(error_of<hvd::InvalidArgument>(call), alone ? "(no error)" : part));
  };
  refused([&] { hvd::data_parallel(net, x, 2); }, "the layer '1'");
  refused([&] { hvd::data_parallel(itself, x, 2); }, "BatchNorm1d");
  hvd::data_parallel(net, x, 1);
  CHECK(same_on_all_ranks(net->ptr<hvd::SyncBatchNormImpl>(1)->running_var));
  net->eval();
  CHECK(difference(hvd::data_parallel(net, x, 2), net->forward(x)) < 1e-6);
}

}  // namespace
