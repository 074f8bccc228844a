// What happens if I ... : freeze parameters, move the model, keep gradients, differentiate them
// again.
#include <memory>
#include <string>
#include <vector>

#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat, at::kHalf;
using hvd::DistributedDataParallel;
using hvd::DistributedOptimizer;
using hvd::DistributedOptimizerOptions;
using hvd::ReduceOp;
using torch::nn::Linear;
using torch::nn::Sequential;
using torch::optim::SGD;
using torch::optim::SGDOptions;

/// One process with the average of all ranks' losses.
struct Alone {
  Sequential net;
  SGD plain;
  explicit Alone(Sequential of = small_model())
      : net(of), plain(net->parameters(), SGDOptions(0.1)) {}
  void backward(int step) {
    at::Tensor sum = torch::zeros({}, net->parameters()[3].options().requires_grad(false));
    for (const int rank : everyone()) sum = sum + small_loss(net, rank, step);
    (sum / hvd::size()).backward();
  }
};

void freeze(Sequential& net, bool frozen) {
  for (auto& parameter : net[0]->parameters()) parameter.requires_grad_(!frozen);
}

// ------------------------------------------------------------------------------- frozen parameters

TEST_CASE(
    "what happens if parameters are frozen: the others' gradients leave during backward all the "
    "same") {
  for (const auto& groups : std::vector<decltype(DistributedOptimizerOptions::groups)>{{}, 1, 3}) {
    Sequential net = small_model();
    Alone alone;
    SGD plain(net->parameters(), SGDOptions(0.1));
    DistributedOptimizer optimizer(plain, net->named_parameters(), {.groups = groups});
    for (int step = 0; step < 6; ++step) {
      const bool frozen = step == 1 || step == 2 || step == 4;
      for (auto* each : {&net, &alone.net}) freeze(*each, frozen);
      optimizer.zero_grad(step % 2 == 0);
      alone.plain.zero_grad(step % 2 == 0);
      const auto before = hvd::stats().tensors_submitted;
      small_loss(net, hvd::rank(), step).backward();
      if (groups.index() == 0) CHECK(hvd::stats().tensors_submitted - before == 4);  // one bucket
      CHECK(hvd::stats().tensors_submitted > before);
      optimizer.step();
      alone.backward(step);
      alone.plain.step();
      CHECK(difference(flat(net), flat(alone.net)) < 1e-12);
      CHECK(same_on_all_ranks(flat(net)));
    }
  }
}

/// A layer, and parameters that never get a gradient.
struct Masked : torch::nn::Module {
  explicit Masked(bool differs = false) {
    layer = register_module("layer", Linear(6, 3));
    layer->to(kDouble);
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : layer->parameters())
      parameter.copy_(data(parameter.sizes(), kDouble, 0));
    mask = register_parameter("mask", data({3}, at::kBool, 0, differs ? 1 : 0), false);
    register_parameter("count", data({4}, at::kLong, 0), false);
    const at::Tensor bytes = data({8}, at::kByte, 0);
    register_parameter("half", bytes.view(at::kUInt16), false);
    register_parameter("quarter", bytes.view(at::kFloat8_e4m3fn), false);
  }
  at::Tensor loss(int rank, int step) {
    return (layer->forward(data({5, 6}, kDouble, rank, step)) * mask).square().mean();
  }
  Linear layer{nullptr};
  at::Tensor mask;
};

TEST_CASE(
    "what happens if parameters are masks, integers or of types that do not travel: they are "
    "passed over, as in one process; ranks where they differ hear of it") {
  std::vector<DistributedOptimizerOptions> all(7);
  all[1].groups = 2;
  all[2].compression = hvd::Compression::topk(1);
  all[3].shard_optimizer_state = true;
  all[4].shard_gradients = true;
  all[5].shard_optimizer_state = all[5].share_parameters = true;
  all[6].op = ReduceOp::Adasum;
  for (std::size_t i = 0; i <= all.size(); ++i) {
    CAPTURE(i);
    Masked net, alone;
    DistributedOptimizerOptions options = i < all.size() ? all[i] : DistributedOptimizerOptions();
    if (i == all.size()) options.groups = std::vector<std::vector<at::Tensor>>{net.parameters()};
    SGD sgd(net.parameters(), SGDOptions(0.1)), reference(alone.parameters(), SGDOptions(0.1));
    DistributedOptimizer optimizer(sgd, net.named_parameters(), options);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      reference.zero_grad();
      net.loss(hvd::rank(), step).backward();
      optimizer.step();
      at::Tensor sum = torch::zeros({}, kDouble);
      for (const int rank : everyone()) sum = sum + alone.loss(rank, step);
      (sum / hvd::size()).backward();
      reference.step();
    }
    const at::Tensor weight = net.layer->weight.detach();
    CHECK(same_on_all_ranks(weight));
    CHECK(difference(weight, data({3, 6}, kDouble, 0)) > 1e-3);
    if (options.op == ReduceOp::Average) CHECK(difference(weight, alone.layer->weight) < 1e-12);
    CHECK(same(net.mask, alone.mask));
  }
  if (hvd::size() == 1) return;
  Masked net(last());
  SGD sgd(net.parameters(), SGDOptions(0.1));
  DistributedOptimizer optimizer(sgd, net.named_parameters());
  net.loss(hvd::rank(), 0).backward();
  CHECK(contains(error_of<hvd::Mismatch>([&] { optimizer.step(); }), "parameter 'mask'"));
}

TEST_CASE(
    "what happens if some ranks freeze what others train: absent gradients count as zeros, and no "
    "rank waits for good") {
  for (const auto op : {ReduceOp::Average, ReduceOp::Sum}) {
    Sequential net = small_model();
    SGD plain(net->parameters(), SGDOptions(0));
    DistributedOptimizer optimizer(plain, net->named_parameters(), {.op = op});
    for (int step = 0; step < 4; ++step) {
      const auto frozen_by = [&](int rank) { return (rank + step) % 2 == 1; };
      freeze(net, frozen_by(hvd::rank()));
      optimizer.zero_grad();
      small_loss(net, hvd::rank(), step).backward();
      optimizer.step();
      std::vector<at::Tensor> all;
      for (const int rank : everyone()) {
        Sequential other = small_model();
        small_loss(other, rank, step).backward();
        const at::Tensor gradient = other->parameters()[0].grad();
        all.push_back(frozen_by(rank) ? torch::zeros_like(gradient) : gradient);
      }
      const at::Tensor expected = reduced(all, op);
      if (net->parameters()[0].grad().defined()) {
        CHECK(difference(net->parameters()[0].grad(), expected) < 1e-12);
      } else {
        CHECK(expected.abs().max().item<double>() == 0);
      }
      CHECK(same_on_all_ranks(net->parameters()[3].grad()));
    }
  }
}

TEST_CASE(
    "what happens if I unfreeze parameters between two backward passes: what comes late is reduced "
    "in a round of its own") {
  for (const auto op : {ReduceOp::Average, ReduceOp::Sum}) {
    Sequential net = small_model();
    SGD plain(net->parameters(), SGDOptions(0.1));
    DistributedOptimizer optimizer(plain, net->named_parameters(), {.op = op});
    const auto backward = [](Sequential& of, int rank, int step) {
      freeze(of, true);
      small_loss(of, rank, step).backward();
      freeze(of, false);
      of[0]->as<Linear>()->forward(data({5, 6}, kDouble, rank, step)).square().mean().backward();
    };
    for (int step = 0; step < 3; ++step) {
      backward(net, hvd::rank(), step);
      optimizer.synchronize();
      for (const std::size_t which : {0, 3}) {
        std::vector<at::Tensor> all;
        for (const int rank : everyone()) {
          Sequential other = small_model();
          {
            const torch::NoGradGuard no_gradient;
            for (std::size_t i = 0; i < 4; ++i) other->parameters()[i].copy_(net->parameters()[i]);
          }
          backward(other, rank, step);
          all.push_back(other->parameters()[which].grad());
        }
        CHECK(difference(net->parameters()[which].grad(), reduced(all, op)) < 1e-12);
      }
      optimizer.step();
      optimizer.zero_grad(step % 2 == 0);
      CHECK(same_on_all_ranks(flat(net)));
    }
  }
}

// ------------------------------------------------------------------------------ a model that moves

TEST_CASE("what happens if the model gets another type after wrapping: gradients follow") {
  std::vector<DistributedOptimizerOptions> all;
  all.push_back({});
  all.push_back({.compression = hvd::Compression::bf16()});
  all.push_back({.groups = 3});
  all.push_back({.gradients_are_views = false});
  for (const auto& options : all) {
    for (const bool to_none : {true, false}) {
      Sequential net = small_model(kFloat);
      Alone alone(small_model(kFloat));
      SGD plain(net->parameters(), SGDOptions(0.1));
      DistributedOptimizer optimizer(plain, net->named_parameters(), options);
      const std::vector<at::ScalarType> types{kFloat, kDouble, kDouble, kFloat};
      for (int step = 0; step < 4; ++step) {
        const auto type = types[static_cast<std::size_t>(step)];
        for (auto* each : {&net, &alone.net}) (*each)->to(type);
        optimizer.zero_grad(to_none);
        alone.plain.zero_grad();
        small_loss(net, hvd::rank(), step).backward();
        optimizer.synchronize();
        alone.backward(step);
        for (const auto& parameter : net->parameters())
          CHECK((parameter.grad().scalar_type() == type));
        optimizer.step();
        alone.plain.step();
        CHECK(difference(flat(net).to(kDouble), flat(alone.net).to(kDouble)) <
              (options.compression == hvd::Compression::none() ? 1e-5 : 1e-2));
        CHECK(same_on_all_ranks(flat(net)));
      }
    }
  }
}

TEST_CASE(
    "what happens if the model gets another type between backward and step: the gradients do, "
    "too") {
  for (const int passes : {1, 2}) {
    Sequential net = small_model(kFloat);
    SGD plain(net->parameters(), SGDOptions(0.1));
    DistributedOptimizer optimizer(plain, net->named_parameters(), {.backward_passes_per_step = 2});
    for (int pass = 0; pass < passes; ++pass) small_loss(net, hvd::rank(), pass).backward();
    net->to(kDouble);
    optimizer.synchronize();
    std::vector<at::Tensor> all;
    for (const int rank : everyone()) {
      Sequential other = small_model(kFloat);
      for (int pass = 0; pass < passes; ++pass) small_loss(other, rank, pass).backward();
      all.push_back(other->parameters()[0].grad().to(kDouble));
    }
    for (const auto& parameter : net->parameters())
      CHECK((parameter.grad().scalar_type() == kDouble));
    CHECK(difference(net->parameters()[0].grad(), reduced(all, ReduceOp::Average)) < 1e-6);
    optimizer.step();
    CHECK(same_on_all_ranks(flat(net)));
  }
}

TEST_CASE("what happens if one rank alone gives the model another type: Mismatch on all") {
  if (hvd::size() == 1) return;
  Sequential net = small_model(kFloat);
  SGD plain(net->parameters(), SGDOptions(0.1));
  DistributedOptimizer optimizer(plain, net->named_parameters());
  for (int step = 0; step < 2; ++step) {
    if (step == 1 && last()) net->to(kDouble);
    optimizer.zero_grad();
    small_loss(net, hvd::rank(), step).backward();
    const std::string text = error_of<hvd::Mismatch>([&] { optimizer.step(); });
    INFO(text);
    CHECK(contains(text, "float64") == (step == 1));
  }
  net->to(kFloat);
  optimizer.zero_grad();
  small_loss(net, hvd::rank(), 2).backward();
  optimizer.step();
}

TEST_CASE(
    "what happens if a parameter gets another shape after wrapping: its gradients follow; with a "
    "compression that remembers, an error") {
  Sequential net = small_model();
  SGD plain(net->parameters(), SGDOptions(0.1));
  const auto widen = [&](std::int64_t width) {
    net[2]->as<Linear>()->weight.set_data(data({width, 8}, kDouble, 0));
    net[2]->as<Linear>()->bias.set_data(data({width}, kDouble, 0));
  };
  const auto backward = [&] {
    net->forward(data({5, 6}, kDouble, hvd::rank())).square().mean().backward();
  };
  {
    DistributedOptimizer optimizer(plain, net->named_parameters());
    for (const int width : {3, 5, 2}) {
      optimizer.zero_grad();
      widen(width);
      backward();
      optimizer.step();
      CHECK(net->parameters()[2].grad().size(0) == width);
      CHECK(same_on_all_ranks(flat(net)));
    }
    backward();
    widen(7);
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { optimizer.step(); }), "another shape"));
    optimizer.zero_grad();
  }
  DistributedOptimizer optimizer(plain, net->named_parameters(),
                                 {.compression = hvd::Compression::int8()});
  widen(4);
  for (int i = 0; i < 2; ++i)  // and each time
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { backward(); }), "wrap the optimizer then"));
}

// --------------------------------------------------------------- kept and differentiable gradients

TEST_CASE(
    "what happens if I keep a gradient from a former step: it is overwritten, unless "
    "gradients_are_views = false") {
  for (const bool views : {true, false}) {
    for (const bool ddp : {false, true}) {
      Sequential net = small_model();
      SGD plain(net->parameters(), SGDOptions(0.1));
      std::unique_ptr<DistributedOptimizer> optimizer;
      std::unique_ptr<DistributedDataParallel<torch::nn::SequentialImpl>> module;
      if (ddp) {
        module = std::make_unique<DistributedDataParallel<torch::nn::SequentialImpl>>(
            net.ptr(), hvd::DistributedDataParallelOptions{.gradients_are_views = views});
      } else {
        optimizer = std::make_unique<DistributedOptimizer>(
            plain, net->named_parameters(),
            DistributedOptimizerOptions{.gradients_are_views = views});
      }
      at::Tensor kept, copy;
      Alone alone;
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        alone.plain.zero_grad();
        const at::Tensor x = data({5, 6}, kDouble, hvd::rank(), step),
                         y = data({5, 3}, kDouble, hvd::rank(), step + 1);
        torch::mse_loss(ddp ? module->forward(x) : net->forward(x), y).backward();
        ddp ? plain.step() : optimizer->step();
        alone.backward(step);
        alone.plain.step();
        if (step == 0) {
          kept = net->parameters()[0].grad();
          copy = kept.clone();
        } else {
          CHECK(torch::equal(kept, copy) == !views);
        }
        CHECK(difference(net->parameters()[0].grad(), alone.net->parameters()[0].grad()) < 1e-12);
      }
      CHECK(difference(flat(net), flat(alone.net)) < 1e-12);
    }
  }
}

TEST_CASE(
    "what happens if I call backward(create_graph = true): an error in backward that says what to "
    "do; nothing hangs after it") {
  for (const bool on_all : {true, false}) {
    for (const bool ddp : {false, true}) {
      Sequential net = small_model();
      SGD plain(net->parameters(), SGDOptions(0.1));
      std::unique_ptr<DistributedOptimizer> optimizer;
      std::unique_ptr<DistributedDataParallel<torch::nn::SequentialImpl>> module;
      if (ddp)
        module = std::make_unique<DistributedDataParallel<torch::nn::SequentialImpl>>(net.ptr());
      if (!ddp) optimizer = std::make_unique<DistributedOptimizer>(plain, net->named_parameters());
      const auto loss = [&](int step) {
        const at::Tensor x = data({5, 6}, kDouble, hvd::rank(), step);
        return (ddp ? module->forward(x) : net->forward(x)).square().mean();
      };
      const at::Tensor first = loss(0);
      if (on_all || last()) {
        const std::string text =
            error_of<hvd::InvalidArgument>([&] { first.backward({}, {}, /*create_graph=*/true); });
        CHECK(contains(text, "create_graph"));
        CHECK(contains(text, "gradient of '"));
      } else if (ddp) {  // whose own gradients count no more than the last rank's
        CHECK(contains(error_of<hvd::Mismatch>([&] { first.backward(); }),
                       last_rank() + " has left a backward pass by an exception"));
      } else {
        first.backward();
      }
      for (int step = 1; step < 3; ++step) {
        if (!ddp) optimizer->zero_grad();
        const at::Tensor value = loss(step);
        if (ddp) net->zero_grad();
        value.backward();
        ddp ? plain.step() : optimizer->step();
        CHECK(same_on_all_ranks(flat(net)));
      }
    }
  }
}

TEST_CASE(
    "what happens if I take gradients by autograd::grad(create_graph) for a penalty: reduced as "
    "any other, with Sum too") {
  for (const auto op : {ReduceOp::Average, ReduceOp::Sum}) {
    Sequential net = small_model();
    SGD plain(net->parameters(), SGDOptions(0.1));
    DistributedOptimizer optimizer(plain, net->named_parameters(), {.op = op});
    const auto penalised = [](Sequential& of, int rank, int step) {
      const at::Tensor loss = small_loss(of, rank, step);
      const auto first =
          torch::autograd::grad({loss}, {of->parameters()[0]}, {}, {}, /*create_graph=*/true);
      return loss + first[0].square().sum();
    };
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      penalised(net, hvd::rank(), step).backward();
      optimizer.synchronize();
      const at::Tensor before = net->parameters()[0].grad().clone();
      // looks at gradients, and adds nothing
      static_cast<void>(penalised(net, hvd::rank(), step + 1));
      std::vector<at::Tensor> all;
      for (const int rank : everyone()) {
        Sequential other = small_model();
        const torch::NoGradGuard no_gradient;
        for (std::size_t i = 0; i < 4; ++i) other->parameters()[i].copy_(net->parameters()[i]);
        const torch::AutoGradMode with_gradient(true);
        penalised(other, rank, step).backward();
        all.push_back(other->parameters()[0].grad());
      }
      CHECK(difference(before, reduced(all, op)) < 1e-11);
      optimizer.step();
      CHECK(same(net->parameters()[0].grad(), before));
      CHECK(same_on_all_ranks(flat(net)));
    }
  }
}

}  // namespace
