// What happens if I ... : evaluation between training steps, exceptions in forward, layers unfrozen
// later, other outputs.
#include <memory>
#include <stdexcept>

#include "tests/torch_bindings/norm_net.h"

namespace what_if_evaluation {
namespace {

using namespace hvd::test;
using namespace hvd::test::norm_net;
using hvd::DistributedDataParallel;

// -------------------------------------------------------------------------------------- evaluation

TEST_CASE(
    "what happens if I evaluate after training with batch norm: all ranks have the first one's "
    "statistics and agree") {
  Sequential net = model(true);
  Sequential alone = model(true);  // with the first rank's batches
  Ddp ddp(net);
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    loss(ddp, hvd::rank(), step).backward();
    optimizer.step();
    {
      const torch::NoGradGuard no_gradient;  // the same parameters, so the same statistics
      for (std::size_t i = 0; i < net->parameters().size(); ++i)
        CHECK(same_on_all_ranks(net->parameters()[i]));
    }
    CHECK(same_on_all_ranks(norm_of(net)->running_mean));
    ddp.eval();
    const torch::NoGradGuard no_gradient;
    if (hvd::rank() == 0) ddp.forward(input(1, 9));  // nothing is sent
    CHECK(same_on_all_ranks(ddp.forward(input(0, 9))));
    ddp.train();
  }
  loss(*alone, 0, 0);
  Sequential first = model(true);
  Ddp of_first(first);
  loss(of_first, hvd::rank(), 0).backward();
  CHECK(difference(norm_of(first)->running_mean, norm_of(alone)->running_mean) < 1e-12);
  CHECK(norm_of(first)->num_batches_tracked.item<std::int64_t>() == 1);
}

TEST_CASE(
    "what happens if I evaluate after a forward pass in training without backward: the evaluation "
    "shares the buffers") {
  Sequential net = model(true);
  Ddp ddp(net);
  ddp.forward(input(hvd::rank(), 0));
  ddp.eval();
  CHECK(same_on_all_ranks(ddp.forward(input(0, 1))));
  if (hvd::rank() == 0) ddp.forward(input(0, 1));
  // With buffers that are each rank's own, they stay so.
  Sequential own = model(true);
  Ddp of_own(own, {.broadcast_buffers = false});
  loss(of_own, hvd::rank(), 0).backward();
  of_own.eval();
  of_own.forward(input(0, 1));
  if (hvd::size() > 1) CHECK_FALSE(same_on_all_ranks(norm_of(own)->running_mean));
}

TEST_CASE(
    "what happens if I call a module with batch norm twice in one loss, or go through a graph "
    "twice: as one process") {
  Sequential net = model(true);
  Sequential alone = model(true);
  Ddp ddp(net);
  const auto both = [](auto& module, int rank) {
    return loss(module, rank, 0) + loss(module, rank, 1) * 2;
  };
  const at::Tensor value = both(ddp, hvd::rank());
  value.backward({}, /*retain_graph=*/true);
  value.backward();
  at::Tensor sum = torch::zeros({}, kDouble);
  for (const int rank : everyone()) sum = sum + both(*alone, rank);
  (sum * 2 / hvd::size()).backward();
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    CHECK(difference(net->parameters()[i].grad(), alone->parameters()[i].grad()) < 1e-11);
}

// ---------------------------------------------------------------------------- exceptions, and more

/// Throws in training when it is told to, after its buffers have changed.
struct Throwing : torch::nn::Module {
  Throwing() {
    norm = register_module("norm", BatchNorm1d(6));
    layer = register_module("layer", Linear(6, 3));
    to(kDouble);
    const torch::NoGradGuard no_gradient;
    layer->weight.copy_(data({3, 6}, kDouble, 0) * 0.3);
    layer->bias.zero_();
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor normal = norm(x);
    if (throws) throw std::runtime_error("out of memory");
    return layer(normal);
  }
  BatchNorm1d norm{nullptr};
  Linear layer{nullptr};
  bool throws = false;
};

TEST_CASE(
    "what happens if forward throws on one rank, with buffers: it may be called again, and the "
    "step is the same as on the others") {
  const auto net = std::make_shared<Throwing>();
  DistributedDataParallel<Throwing> ddp(net);
  const auto alone = std::make_shared<Throwing>();
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    alone->zero_grad();
    net->throws = last() && step == 1;
    if (net->throws) CHECK_THROWS_AS(loss(ddp, hvd::rank(), step), std::runtime_error);
    net->throws = false;
    loss(ddp, hvd::rank(), step).backward();
    at::Tensor sum = torch::zeros({}, kDouble);
    for (const int rank : everyone()) sum = sum + loss(*alone, rank, step);
    (sum / hvd::size()).backward();
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      CHECK(difference(net->parameters()[i].grad(), alone->parameters()[i].grad()) < 1e-11);
  }
  CHECK(is_same_on_all_ranks(*net));
}

TEST_CASE(
    "what happens if backward throws on all ranks, and I call zero_grad(): it is as if that pass "
    "had not been") {
  for (const int step_that_throws : {0, 1}) {
    for (const bool all_left : {false, true}) {
      for (const bool to_none : {false, true}) {
        Sequential net = model(false), alone = model(false);
        Ddp ddp(net);
        for (int step = 0; step < 3; ++step) {
          if (step == step_that_throws) {
            at::Tensor x = data({5, 6}, kDouble, hvd::rank(), step + 7).requires_grad_();
            at::Tensor first = net->ptr(0)->as<Linear>()->weight;
            const at::Tensor& throwing = all_left ? x : first;
            const auto hook = throwing.register_hook([](const at::Tensor& gradient) -> at::Tensor {
              if (gradient.defined()) throw std::runtime_error("out of memory");
              return gradient;
            });
            CHECK_THROWS_AS(ddp.forward(x * 1).sum().backward(),
                            std::runtime_error);  // x's is last
            throwing.remove_hook(hook);
          }
          net->zero_grad(to_none);
          alone->zero_grad();
          loss(ddp, hvd::rank(), step).backward();
          at::Tensor sum = torch::zeros({}, kDouble);
          for (const int rank : everyone()) sum = sum + loss(*alone, rank, step);
          (sum / hvd::size()).backward();
          for (std::size_t i = 0; i < net->parameters().size(); ++i)
            CHECK(difference(net->parameters()[i].grad(), alone->parameters()[i].grad()) < 1e-12);
        }
      }
    }
  }
}

TEST_CASE(
    "what happens if backward throws on one rank when all gradients have left: Mismatch on all in "
    "the next pass") {
  if (hvd::size() == 1) return;
  Sequential net = model(false);
  Ddp ddp(net);
  at::Tensor x = data({5, 6}, kDouble, hvd::rank(), 0).requires_grad_();
  x.register_hook([](const at::Tensor& gradient) -> at::Tensor {
    if (last()) throw std::runtime_error("out of memory");
    return gradient;
  });
  const auto pass = [&] { ddp.forward(x * 1).sum().backward(); };
  CHECK(contains(error_of<std::runtime_error>(pass), last() ? "out of memory" : "(no error)"));
  net->zero_grad();
  CHECK(contains(error_of<hvd::Mismatch>([&] { loss(ddp, hvd::rank(), 1).backward(); }),
                 "has thrown its last gradients away without a step()"));
  net->zero_grad();
  loss(ddp, hvd::rank(), 1).backward();
  for (const auto& parameter : net->parameters()) CHECK(same_on_all_ranks(parameter.grad()));
}

/// Runs a pass that throws on the last rank in the middle of backward, and says what it was here.
std::string pass_that_throws(Ddp& ddp) {
  at::Tensor weight = ddp.module()->ptr(0)->as<Linear>()->weight;
  const auto hook = weight.register_hook([](const at::Tensor& gradient) -> at::Tensor {
    if (last()) throw std::runtime_error("out of memory");
    return gradient;
  });
  std::string text = error_of<std::runtime_error>([&] { loss(ddp, hvd::rank(), 0).backward(); });
  weight.remove_hook(hook);
  return text;
}

TEST_CASE(
    "what happens if backward throws and I call set_weight() for the next pass: it counts there") {
  if (hvd::size() == 1) return;
  Sequential net = model(false), alone = model(false);
  Ddp ddp(net);
  ddp.set_weight(hvd::rank() + 1);
  CHECK(contains(pass_that_throws(ddp),
                 last() ? "out of memory" : "has left a backward pass by an exception"));
  net->zero_grad();
  ddp.set_weight(hvd::rank() + 1);
  loss(ddp, hvd::rank(), 1).backward();
  at::Tensor sum = torch::zeros({}, kDouble);
  for (const int rank : everyone()) sum = sum + loss(*alone, rank, 1) * (rank + 1);
  (sum * 2 / (hvd::size() * (hvd::size() + 1))).backward();
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    CHECK(difference(net->parameters()[i].grad(), alone->parameters()[i].grad()) < 1e-12);
}

TEST_CASE(
    "what happens if the first backward pass throws on one rank, with a compression that has a "
    "memory: one Mismatch on the others, and all go on") {
  if (hvd::size() == 1) return;
  for (const bool only_compressed : {false, true}) {
    Sequential net = model(false);
    if (only_compressed)
      for (auto& parameter : net->named_parameters())
        if (parameter.key().ends_with("bias")) parameter->set_requires_grad(false);
    Ddp ddp(net, {.compression = hvd::Compression::topk(0.5)});
    CHECK(contains(pass_that_throws(ddp), last() ? "out of memory" : "differs between ranks"));
    for (int step = 1; step < 3; ++step) {
      net->zero_grad();
      loss(ddp, hvd::rank(), step).backward();
      for (const auto& parameter : net->parameters())
        if (parameter.requires_grad()) CHECK(same_on_all_ranks(parameter.grad()));
    }
  }
}

TEST_CASE("what happens if I wrap a null module: InvalidArgument") {
  CHECK_THROWS_AS(DistributedDataParallel<Throwing>(std::shared_ptr<Throwing>()),
                  hvd::InvalidArgument);
}

TEST_CASE(
    "what happens if I unfreeze a layer after wrapping: its gradients are averages from the next "
    "forward pass on") {
  Sequential net = model(false);
  Sequential alone = model(false);
  const auto freeze = [](Sequential& of, bool frozen) {
    for (auto& parameter : of->ptr(0)->parameters()) parameter.set_requires_grad(!frozen);
  };
  freeze(net, true);
  freeze(alone, true);
  Ddp ddp(net);
  for (int step = 0; step < 5; ++step) {
    const bool frozen = step == 0 || step == 3;
    freeze(net, frozen);
    freeze(alone, frozen);
    for (auto& parameter : net->parameters()) parameter.mutable_grad() = at::Tensor();
    for (auto& parameter : alone->parameters()) parameter.mutable_grad() = at::Tensor();
    loss(ddp, hvd::rank(), step).backward();
    at::Tensor sum = torch::zeros({}, kDouble);
    for (const int rank : everyone()) sum = sum + loss(*alone, rank, step);
    (sum / hvd::size()).backward();
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      REQUIRE(net->parameters()[i].grad().defined() == alone->parameters()[i].grad().defined());
      if (net->parameters()[i].grad().defined())
        CHECK(difference(net->parameters()[i].grad(), alone->parameters()[i].grad()) < 1e-12);
    }
  }
}

TEST_CASE(
    "what happens if I wrap a module a second time: either wrapper reduces what goes through it") {
  Sequential net = model(false);
  Sequential alone = model(false);
  Ddp first(net);
  Ddp second(net);
  for (int step = 0; step < 4; ++step) {
    net->zero_grad();
    alone->zero_grad();
    loss(step % 2 == 0 ? first : second, hvd::rank(), step).backward();
    at::Tensor sum = torch::zeros({}, kDouble);
    for (const int rank : everyone()) sum = sum + loss(*alone, rank, step);
    (sum / hvd::size()).backward();
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      CHECK(difference(net->parameters()[i].grad(), alone->parameters()[i].grad()) < 1e-12);
  }
}

TEST_CASE("what happens if two wrapped modules share an encoder, and I train one for some steps") {
  Sequential net = model(false);
  Sequential alone = model(false);
  Linear head(8, 3);
  head->to(kDouble);
  Sequential other(Linear(std::dynamic_pointer_cast<torch::nn::LinearImpl>(net->ptr(0))), head);
  Ddp first(net);
  Ddp second(other);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  torch::optim::SGD plain(alone->parameters(), 0.1);
  for (int step = 0; step < 4; ++step) {
    sgd.zero_grad();
    plain.zero_grad();
    loss(first, hvd::rank(), step).backward();
    at::Tensor sum = torch::zeros({}, kDouble);
    for (const int rank : everyone()) sum = sum + loss(*alone, rank, step);
    (sum / hvd::size()).backward();
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      CHECK(difference(net->parameters()[i].grad(), alone->parameters()[i].grad()) < 1e-12);
    sgd.step();
    plain.step();
  }
  loss(second, hvd::rank(), 4).backward();
  CHECK(same_on_all_ranks(head->weight.grad()));
  CHECK(same_on_all_ranks(net->parameters()[0].grad()));
}

/// Gives its output in a type of its own.
struct Scores {
  at::Tensor of_classes;
};
struct GivesScores : torch::nn::Module {
  GivesScores() {
    layer = register_module("layer", Linear(6, 3));
    const torch::NoGradGuard no_gradient;
    to(kDouble);
    layer->weight.copy_(data({3, 6}, kDouble, 0));
    layer->bias.zero_();
  }
  Scores forward(const at::Tensor& x) { return {layer(x)}; }
  Linear layer{nullptr};
};

TEST_CASE(
    "what happens if forward returns a struct: its gradients are averages, too, and local under "
    "no_sync()") {
  const auto net = std::make_shared<GivesScores>();
  const auto alone = std::make_shared<GivesScores>();
  DistributedDataParallel<GivesScores> ddp(net);
  const auto of = [](auto& module, int rank, int step) {
    return torch::mse_loss(module.forward(input(rank, step)).of_classes, target(rank, step));
  };
  for (int round = 0; round < 2; ++round) {
    net->zero_grad();
    alone->zero_grad();
    for (int step = 0; step < 3; ++step) {
      if (step < 2) {
        const auto local = ddp.no_sync();
        of(ddp, hvd::rank(), step).backward();
      } else {
        of(ddp, hvd::rank(), step).backward();
      }
      at::Tensor sum = torch::zeros({}, kDouble);
      for (const int rank : everyone()) sum = sum + of(*alone, rank, step);
      (sum / hvd::size()).backward();
    }
    CHECK(difference(net->layer->weight.grad(), alone->layer->weight.grad()) < 1e-12);
  }
}

TEST_CASE(
    "what happens if one rank has made a pass without backward, and passes return a struct: those "
    "under no_sync() stay local, and what counts is where forward was called") {
  const auto net = std::make_shared<GivesScores>();
  const auto alone = std::make_shared<GivesScores>();
  DistributedDataParallel<GivesScores> ddp(net);
  const auto of = [](auto& module, int rank, int step) {
    return torch::mse_loss(module.forward(input(rank, step)).of_classes, target(rank, step));
  };
  ddp.eval();
  if (hvd::rank() == 0) ddp.forward(input(0, 9));
  ddp.train();
  {
    const auto local = ddp.no_sync();
    const std::uint64_t before = hvd::stats().tensors_submitted;
    of(ddp, hvd::rank(), 0).backward();
    CHECK(hvd::stats().tensors_submitted == before);
  }
  const at::Tensor outside = of(ddp, hvd::rank(), 1);
  {
    const auto local = ddp.no_sync();
    outside.backward();
  }
  for (const int rank : everyone())
    for (int step = 0; step < 2; ++step) (of(*alone, rank, step) / hvd::size()).backward();
  CHECK(difference(net->layer->weight.grad(), alone->layer->weight.grad()) < 1e-12);
}

}  // namespace
}  // namespace what_if_evaluation
