// GradientReducer by way of the optimizer: branches, frozen parameters, two at once, models that
// differ.
#include <memory>

#include "tests/torch_bindings/wrapped_optimizers.h"
#include "torch_bindings/reducer/reducer.h"

namespace reducer_test {
namespace {

using namespace hvd::test;
using namespace hvd::test::wrapped;
using at::kDouble, at::kFloat;
using hvd::DistributedOptimizer;

/// Two branches and a part that nobody uses.
struct Branches {
  torch::nn::Linear left{6, 3}, right{6, 3}, idle{6, 3};
  std::vector<std::pair<std::string, at::Tensor>> named;
  Parameters parameters;
  Branches() {
    int variant = 0;
    for (auto& [name, layer] : std::vector<std::pair<std::string, torch::nn::Linear>>{
             {"left", left}, {"right", right}, {"idle", idle}}) {
      layer->to(kDouble);
      const torch::NoGradGuard no_gradient;
      for (auto& item : layer->named_parameters()) {
        item.value().copy_(data(item.value().sizes(), kDouble, 0, variant++));
        named.emplace_back(name + "." + item.key(), item.value());
        parameters.push_back(item.value());
      }
    }
  }
};

TEST_CASE("ranks take different branches; what nobody used stays without a gradient") {
  for (const auto& compression : {hvd::Compression::none(), hvd::Compression::bf16()}) {
    Branches net;
    const auto wrapped = sgd(net.parameters);
    DistributedOptimizer optimizer(*wrapped, net.named, {.compression = compression});
    const auto gradient = [](int rank, int step) {
      return data({4, 6}, kDouble, rank, step).sum(0).expand({3, 6});
    };
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      auto& mine = hvd::rank() % 2 == 0 ? net.left : net.right;
      mine->forward(data({4, 6}, kDouble, hvd::rank(), step)).sum().backward();
      optimizer.synchronize();
      at::Tensor left = torch::zeros({3, 6}, kDouble);
      at::Tensor right = left.clone();
      for (int r = 0; r < hvd::size(); ++r) (r % 2 == 0 ? left : right) += gradient(r, step);
      CHECK(torch::allclose(net.left->weight.grad(), left / hvd::size(), 1e-2, 1e-2));
      if (compression == hvd::Compression::none())
        CHECK(torch::allclose(net.left->weight.grad(), left / hvd::size(), 1e-14, 1e-14));
      CHECK(net.right->weight.grad().defined() == (hvd::size() > 1));
      if (hvd::size() > 1)
        CHECK(torch::allclose(net.right->weight.grad(), right / hvd::size(), 1e-2, 1e-2));
      CHECK(!net.idle->weight.grad().defined());
      CHECK(!net.idle->bias.grad().defined());
      optimizer.step();
      for (const auto& parameter : net.parameters) CHECK(same_on_all_ranks(parameter));
    }
    CHECK(same(net.idle->weight.detach(), Branches().idle->weight.detach()));
  }
}

TEST_CASE("requires_grad is toggled between steps") {
  Branches net;
  const auto wrapped = sgd(net.parameters, 0.1, 0);
  DistributedOptimizer optimizer(*wrapped, net.named);
  const auto step = [&](int number) {
    optimizer.zero_grad();
    const at::Tensor x = data({4, 6}, kDouble, hvd::rank(), number);
    (net.left->forward(x) + net.right->forward(x)).sum().backward();
    optimizer.step();
    for (const auto& parameter : net.parameters) CHECK(same_on_all_ranks(parameter));
  };
  step(0);
  const auto freeze = [&](bool frozen) {
    for (auto& parameter : net.left->parameters()) parameter.requires_grad_(!frozen);
  };
  freeze(true);
  const at::Tensor left = net.left->weight.detach().clone();
  const at::Tensor right = net.right->weight.detach().clone();
  step(1);
  CHECK(same(net.left->weight.detach(), left));
  CHECK(!torch::equal(net.right->weight, right));
  freeze(false);
  step(2);
  CHECK(!torch::equal(net.left->weight, left));
}

TEST_CASE("two optimizers in one process, as a GAN has them") {
  for (const bool with_names : {true, false}) {
    CAPTURE(with_names);
    const auto run = [&](bool distributed) {
      Sequential generator = small_model();
      Sequential critic = small_model(kDouble, 4);
      torch::nn::Linear bridge(torch::nn::LinearOptions(3, 6).bias(false));
      bridge->to(kDouble);
      torch::nn::init::constant_(bridge->weight, 0.25);
      const auto one = sgd(generator->parameters());
      const auto two = std::make_unique<torch::optim::Adam>(critic->parameters(),
                                                            torch::optim::AdamOptions(0.01));
      std::unique_ptr<DistributedOptimizer> first;
      std::unique_ptr<DistributedOptimizer> second;
      if (distributed) {
        first = with_names
                    ? std::make_unique<DistributedOptimizer>(*one, generator->named_parameters())
                    : std::make_unique<DistributedOptimizer>(*one);
        // the same names again
        second = with_names
                     ? std::make_unique<DistributedOptimizer>(*two, critic->named_parameters())
                     : std::make_unique<DistributedOptimizer>(*two);
      }
      // Every rank has the same data: the average is what one process would have.
      for (int step = 0; step < 3; ++step) {
        const at::Tensor x = data({5, 6}, kDouble, 0, step);
        if (distributed)
          second->zero_grad();
        else
          critic->zero_grad();
        critic->forward(bridge->forward(generator->forward(x).detach())).square().sum().backward();
        if (distributed)
          second->step();
        else
          two->step();
        if (distributed)
          first->zero_grad();
        else
          generator->zero_grad();
        // also fills the critic's gradients
        critic->forward(bridge->forward(generator->forward(x))).sum().backward();
        if (distributed)
          first->step();
        else
          one->step();
      }
      std::vector<at::Tensor> flat;
      for (const auto& net : {generator, critic})
        for (const auto& parameter : net->parameters())
          flat.push_back(parameter.detach().reshape({-1}));
      return torch::cat(flat);
    };
    CHECK(torch::allclose(run(true), run(false), 1e-13, 1e-13));
  }
}

TEST_CASE("models that differ between ranks: Mismatch on all of them") {
  if (hvd::size() == 1) return;
  {
    Sequential net = small_model(kFloat, last() ? 9 : 8);
    const auto wrapped = sgd(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters());
    for (int attempt = 0; attempt < 2; ++attempt) {
      optimizer.zero_grad();
      const std::string text = error_of<hvd::Mismatch>([&] {
        small_loss(net, hvd::rank(), 0).backward();
        optimizer.step();
      });
      INFO(text);
      CHECK(contains(text, "rank " + std::to_string(hvd::size() - 1) + ": "));
      CHECK(contains(text, "9]"));
      CHECK(contains(text, "8]"));
      if (attempt == 0) continue;
    }
  }
  {  // the difference is in the last of many
    Sequential net;
    for (int i = 0; i < 20; ++i) net->push_back(torch::nn::Linear(4, 4));
    net->push_back(torch::nn::Linear(4, last() ? 5 : 6));
    net->push_back(torch::nn::Flatten());
    const auto wrapped = sgd(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters());
    net->forward(torch::ones({2, 4})).sum().backward();
    const std::string text = error_of<hvd::Mismatch>([&] { optimizer.step(); });
    INFO(text);
    CHECK(contains(text, "parameter '20.bias' is "));
    CHECK(contains(text, "[5]"));
    CHECK(contains(text, "[6]"));
  }
  {  // in the first
    Sequential net(torch::nn::Linear(last() ? 5 : 6, 4));
    for (int i = 0; i < 20; ++i) net->push_back(torch::nn::Linear(4, 4));
    const auto wrapped = sgd(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters());
    net->forward(torch::ones({2, last() ? 5 : 6})).sum().backward();
    const std::string text = error_of<hvd::Mismatch>([&] { optimizer.step(); });
    INFO(text);
    CHECK(contains(text, "[4, 5]"));
    CHECK(contains(text, "[4, 6]"));
  }
  Sequential net = small_model();
  const auto wrapped = sgd(net->parameters());
  DistributedOptimizer optimizer(*wrapped, net->named_parameters());
  Reference reference;
  reference.optimizer = sgd(reference.net->parameters());
  check_steps(net, optimizer, reference);
}

TEST_CASE("a gradient that is written by hand after zero_grad(false) counts whole, with Sum too") {
  at::Tensor weight = torch::zeros({4}, at::TensorOptions(kDouble)).requires_grad_();
  torch::optim::SGD plain({weight}, 1.0);
  DistributedOptimizer optimizer(plain, {}, {.op = hvd::ReduceOp::Sum});
  (weight * (1.0 + hvd::rank())).sum().backward();
  optimizer.synchronize();
  optimizer.zero_grad(false);
  weight.mutable_grad().add_(1.0 + hvd::rank());  // in place: no backward pass tells of it
  optimizer.synchronize();
  const double sum = hvd::size() * (hvd::size() + 1) / 2.0;
  CHECK(same(weight.grad(), torch::full({4}, sum, kDouble)));
}

}  // namespace
}  // namespace reducer_test
