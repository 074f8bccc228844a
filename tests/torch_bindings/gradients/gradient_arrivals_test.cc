// The order in which a GradientReducer deals its buckets, as it does for gradients on a GPU: taken
// together they are dealt so on the host, too.
#include <memory>
#include <string>
#include <utility>

#include "tests/torch_bindings/support.h"
#include "torch_bindings/reducer/distributed_options.h"
#include "torch_bindings/reducer/reducer.h"

namespace gradient_arrivals_test {
namespace {

using namespace hvd::test;
using at::kFloat;
using hvd::DistributedOptimizerOptions;

/// Three layers, of more than the first bucket's size each, registered in the order in which their
/// gradients come, which is not the usual one.
struct Turned : torch::nn::Module {
  Turned() {
    for (const auto* name : {"last", "middle", "first"}) {
      layers.push_back(
          register_module(name, torch::nn::Linear(torch::nn::LinearOptions(600, 600))));
      const at::NoGradGuard no_gradient;
      for (auto& parameter : layers.back()->parameters())
        parameter.copy_(data(parameter.sizes().vec(), kFloat, 0, static_cast<int>(layers.size())) /
                        100);
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    return layers[0]->forward(layers[1]->forward(layers[2]->forward(x)));
  }
  std::vector<torch::nn::Linear> layers;
};

std::shared_ptr<hvd::GradientReducer> reducer_of(const torch::nn::Module& net, int number,
                                                 hvd::GradientReducer::Taking taking) {
  std::vector<hvd::GradientReducer::Named> named;
  for (const auto& item : net.named_parameters()) named.push_back({item.key(), item.value()});
  auto made = std::make_shared<hvd::GradientReducer>(named, DistributedOptimizerOptions{}, number,
                                                     "ordered", taking);
  made->hook();
  return made;
}

TEST_CASE(
    "buckets follow the order in which gradients came on the first rank, from the second round "
    "on") {
  using Taking = hvd::GradientReducer::Taking;
  int number = 100;
  for (const bool first_is_thrown_away : {false, true}) {
    Turned net, reference;
    const auto reducer = reducer_of(net, number++, Taking::Together),
               plain = reducer_of(reference, number++, Taking::ByDevice);
    std::uint64_t before = 0, early = 0;
    net.layers[1]->weight.register_hook(
        [&](const at::Tensor& /*unused*/) { early = hvd::stats().tensors_submitted - before; });
    for (int step = 0; step < 4; ++step) {
      CAPTURE(step);
      const at::Tensor x = data({2, 600}, kFloat, hvd::rank(), step);
      before = hvd::stats().tensors_submitted;
      net.forward(x).square().mean().backward();
      const bool knows = step > (first_is_thrown_away ? 1 : 0);
      // before the layer that is called first has any
      if (hvd::size() > 1) CHECK((early > 0) == knows);
      if (step == 0 && first_is_thrown_away) {
        reducer->settle();
        for (auto& parameter : net.parameters()) parameter.mutable_grad().reset();
        continue;
      }
      reducer->synchronize();
      reference.forward(x).square().mean().backward();
      plain->synchronize();
      for (std::size_t i = 0; i < net.parameters().size(); ++i) {
        at::Tensor& gradient = net.parameters()[i].mutable_grad();
        CHECK(gradient.equal(reference.parameters()[i].grad()));
        CHECK(same_on_all_ranks(gradient));
        if (step % 2 == 0)
          gradient.reset();
        else
          gradient.zero_();
        reference.parameters()[i].mutable_grad().reset();
      }
      for (const auto& each : {reducer, plain}) each->begin_step();
    }
    for (const auto& each : {reducer, plain}) each->unhook();
  }
}

TEST_CASE("ranks whose gradients come in other orders, or not at all, have the same buckets") {
  Turned net, reference;
  const auto reducer = reducer_of(net, 110, hvd::GradientReducer::Taking::Together),
             plain = reducer_of(reference, 111, hvd::GradientReducer::Taking::ByDevice);
  for (int step = 0; step < 3; ++step) {
    // Branches, in an order of the rank's own; the last rank leaves one out.
    const auto loss = [&](Turned& model) {
      at::Tensor sum = torch::zeros({});
      for (int i = 0; i < 3; ++i) {
        const auto which = static_cast<std::size_t>((i + hvd::rank() + step) % 3);
        if (which == 2 && hvd::size() > 1 && last()) continue;
        sum =
            sum +
            model.layers[which]->forward(data({2, 600}, kFloat, hvd::rank(), step)).square().mean();
      }
      return sum;
    };
    loss(net).backward();
    reducer->synchronize();
    loss(reference).backward();
    plain->synchronize();
    for (std::size_t i = 0; i < net.parameters().size(); ++i) {
      CHECK(net.parameters()[i].grad().equal(reference.parameters()[i].grad()));
      for (auto* const model : {&net, &reference}) model->parameters()[i].mutable_grad().reset();
    }
    for (const auto& each : {reducer, plain}) each->begin_step();
  }
  for (const auto& each : {reducer, plain}) each->unhook();
}

TEST_CASE(
    "a rank that has joined before the first round has the buckets of the others afterwards") {
  for (const bool first_one : {false, true}) {
    Turned net;
    const auto reducer =
        reducer_of(net, first_one ? 130 : 131, hvd::GradientReducer::Taking::Together);
    const auto step = [&](int number) {
      net.forward(data({2, 600}, kFloat, hvd::rank(), number)).square().mean().backward();
      reducer->synchronize();
      std::vector<at::Tensor> reduced;
      for (auto& parameter : net.parameters())
        reduced.push_back(std::exchange(parameter.mutable_grad(), {}).clone());
      reducer->begin_step();
      return reduced;
    };
    const bool joins_first = hvd::size() > 1 && (first_one ? hvd::rank() == 0 : last());
    if (!joins_first) step(0);
    hvd::join();
    for (int number = 1; number < 4; ++number)
      for (const auto& gradient : step(number)) CHECK(same_on_all_ranks(gradient));
    reducer->unhook();
  }
}

TEST_CASE(
    "gradients of a round that has failed are as backward gave them, wherever they were on their "
    "way to") {
  for (const auto taking :
       {hvd::GradientReducer::Taking::Together, hvd::GradientReducer::Taking::ByDevice}) {
    auto net = small_model(kFloat);
    const auto reducer =
        reducer_of(*net, taking == hvd::GradientReducer::Taking::Together ? 120 : 121, taking);
    for (int step = 0; step < 3; ++step) {
      CAPTURE(step);
      small_loss(net, hvd::rank(), step).backward();
      auto alone = small_model(kFloat);
      small_loss(alone, hvd::rank(), step).backward();
      reducer->synchronize();
      std::vector<at::Tensor> reduced;
      for (auto& parameter : net->parameters())
        reduced.push_back(std::exchange(parameter.mutable_grad(), {}).clone());
      reducer->begin_step();
      if (hvd::size() == 1) continue;

      reducer->announce({last() ? 2 : 3});
      small_loss(net, hvd::rank(), step).backward();
      const std::string said = error_of<hvd::Mismatch>([&] { reducer->synchronize(); });
      CHECK(!said.empty());
      for (std::size_t i = 0; i < reduced.size(); ++i)
        CHECK(net->parameters()[i].grad().equal(alone->parameters()[i].grad()));
      reducer->announce({});
      reducer->synchronize();
      for (std::size_t i = 0; i < reduced.size(); ++i) {
        CHECK(net->parameters()[i].grad().equal(reduced[i]));
        net->parameters()[i].mutable_grad().reset();
      }
      reducer->begin_step();
    }
    reducer->unhook();
  }
}

}  // namespace
}  // namespace gradient_arrivals_test
