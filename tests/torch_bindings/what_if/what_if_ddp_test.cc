// What happens if I ... : DistributedDataParallel and averages of a model.
#include <sstream>
#include <vector>

#include "tests/torch_bindings/support.h"

namespace what_if_ddp {
namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;
using hvd::DistributedDataParallel;
using torch::nn::Linear;
using torch::nn::Sequential;

at::Tensor input(int rank, int step, at::ScalarType type = kDouble) {
  return data({5, 6}, kDouble, rank, step).to(type);
}
at::Tensor target(int rank, int step) { return data({5, 3}, kDouble, rank, step + 1); }
template <class Net>
void fill(Net& net, at::ScalarType type = kDouble) {
  int variant = 0;
  const torch::NoGradGuard no_gradient;
  net.to(type);
  for (auto& parameter : net.parameters())
    parameter.copy_(data(parameter.sizes(), kDouble, 0, variant++) * 0.3);
}
/// What `of(module, rank)` gives on all ranks, averaged by one process.
template <class Of>
at::Tensor mean_over_ranks(const Of& of) {
  at::Tensor sum = torch::zeros({}, kDouble);
  for (const int rank : everyone()) sum = sum + of(rank);
  return sum / hvd::size();
}
double gradients_differ(const torch::nn::Module& a, const torch::nn::Module& b) {
  double worst = 0;
  for (std::size_t i = 0; i < a.parameters().size(); ++i) {
    const at::Tensor &mine = a.parameters()[i].grad(), &theirs = b.parameters()[i].grad();
    REQUIRE(mine.defined() == theirs.defined());
    if (mine.defined()) worst = std::max(worst, difference(mine, theirs));
  }
  return worst;
}

// ------------------------------------------------------------------------------------ tied weights

/// An embedding whose weight is the last layer's, too, with more than one bucket of other
/// parameters between the two.
struct Tied : torch::nn::Module {
  explicit Tied(int hidden, at::ScalarType type) {
    embedding = register_module("embedding", torch::nn::Embedding(7, 6));
    first = register_module("first", Linear(6, hidden));
    second = register_module("second", Linear(hidden, 6));
    decoder = register_parameter("decoder", embedding->weight);
    fill(*this, type);
  }
  at::Tensor forward(const at::Tensor& words) {
    return torch::linear(second(torch::tanh(first(embedding(words)))), decoder);
  }
  torch::nn::Embedding embedding{nullptr};
  Linear first{nullptr}, second{nullptr};
  at::Tensor decoder;
};
at::Tensor tied_loss(Tied& net, int rank, int step) {
  const at::Tensor words = torch::tensor({rank, step, 1, rank + step, 5}).remainder(7);
  return torch::cross_entropy_loss(net.forward(words), words.flip(0));
}

TEST_CASE("what happens if I use a DistributedDataParallel that was moved from: it says so") {
  torch::nn::Sequential net = small_model();
  hvd::DistributedDataParallel ddp(net);
  auto moved = std::move(ddp);
  const std::string text = error_of<hvd::InvalidArgument>(
      [&] { static_cast<void>(ddp.no_sync()); });  // NOLINT(bugprone-use-after-move)
  CHECK(contains(text, "moved from"));
  CHECK(moved.module() != nullptr);
}

TEST_CASE("what happens if I wrap a null module: InvalidArgument") {
  CHECK_THROWS_AS(
      hvd::DistributedDataParallel<torch::nn::LinearImpl>(std::shared_ptr<torch::nn::LinearImpl>()),
      hvd::InvalidArgument);
}

TEST_CASE(
    "what happens if I tie weights that lie far apart in a model: they are one parameter, and "
    "every run gives the same bits") {
  // 30 MiB between the two. In double: a sum of so many terms that nearly cancel differs by a
  // thousandth in float where it is divided by the number of ranks before and not after, on some
  // processors.
  const auto alone = std::make_shared<Tied>(300000, kDouble);
  mean_over_ranks([&](int rank) { return tied_loss(*alone, rank, 0); }).backward();
  at::Tensor once;
  const auto net = std::make_shared<Tied>(300000, kDouble);
  DistributedDataParallel<Tied> ddp(net);
  for (int run = 0; run < 20; ++run) {
    ddp.zero_grad();
    const at::Tensor words = torch::tensor({hvd::rank(), 0, 1, hvd::rank(), 5}).remainder(7);
    const auto before = hvd::stats().tensors_submitted;
    torch::cross_entropy_loss(ddp.forward(words), words.flip(0)).backward();
    CHECK(hvd::stats().tensors_submitted - before == 5);
    if (run == 0) once = net->embedding->weight.grad().clone();
    CHECK(torch::equal(net->embedding->weight.grad(), once));
  }
  CHECK(same_on_all_ranks(once));
  for (std::size_t i = 0; i < net->parameters().size(); ++i) {
    const at::Tensor &mine = net->parameters()[i].grad(), &theirs = alone->parameters()[i].grad();
    CHECK(difference(mine, theirs) < 1e-5 * (1 + theirs.abs().max().item<double>()));
  }
}

TEST_CASE("what happens if I tie weights and train: it is as one process would, step by step") {
  const auto net = std::make_shared<Tied>(8, kDouble);
  const auto alone = std::make_shared<Tied>(8, kDouble);
  DistributedDataParallel<Tied> ddp(net);
  const auto unique = [](Tied& of) {
    return std::vector<at::Tensor>{of.embedding->weight, of.first->weight, of.first->bias,
                                   of.second->weight, of.second->bias};
  };
  torch::optim::SGD optimizer(unique(*net), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD reference(unique(*alone), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 5; ++step) {
    net->zero_grad(step % 2 == 0);
    alone->zero_grad();
    if (step == 3) {  // gathered over two passes
      const auto local = ddp.no_sync();
      const at::Tensor words =
          torch::tensor({hvd::rank(), step + 7, 1, hvd::rank() + step + 7, 5}).remainder(7);
      torch::cross_entropy_loss(ddp.forward(words), words.flip(0)).backward();
    }
    const at::Tensor words =
        torch::tensor({hvd::rank(), step, 1, hvd::rank() + step, 5}).remainder(7);
    torch::cross_entropy_loss(ddp.forward(words), words.flip(0)).backward();
    if (step == 3)
      mean_over_ranks([&](int rank) { return tied_loss(*alone, rank, step + 7); }).backward();
    mean_over_ranks([&](int rank) { return tied_loss(*alone, rank, step); }).backward();
    CHECK(gradients_differ(*net, *alone) < 1e-12);
    optimizer.step();
    reference.step();
  }
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    CHECK(same_on_all_ranks(net->parameters()[i]));
}

TEST_CASE(
    "what happens if I average a model with tied weights: it is averaged once, and the guard gives "
    "back what was there") {
  const auto net = std::make_shared<Tied>(8, kDouble);
  hvd::ExponentialMovingAverage average(*net, {.decay = 0.5});
  at::Tensor expected = net->embedding->weight.detach().clone();
  for (int step = 0; step < 3; ++step) {
    const torch::NoGradGuard no_gradient;
    net->embedding->weight += 0.25 * (step + 1);
    expected = expected * 0.5 + net->embedding->weight * 0.5;
    average.update();
  }
  const at::Tensor last_weight = net->embedding->weight.detach().clone();
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    if (net->parameters()[i].is_same(net->embedding->weight))
      CHECK(difference(average.averages()[i], expected) < 1e-15);
  for (int i = 0; i < 2; ++i) {
    {
      const auto guard = average.averaged();
      CHECK(difference(net->embedding->weight, expected) < 1e-15);
      CHECK(torch::equal(net->decoder, net->embedding->weight));
    }
    CHECK(torch::equal(net->embedding->weight, last_weight));
  }
  std::stringstream file;
  torch::serialize::OutputArchive out;
  average.save(out);
  out.save_to(file);
  hvd::ExponentialMovingAverage other(*std::make_shared<Tied>(8, kDouble), {.decay = 0.5});
  torch::serialize::InputArchive in;
  in.load_from(file);
  other.load(in);
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    CHECK(torch::equal(other.averages()[i], average.averages()[i]));
  average.copy_to_parameters();
  CHECK(difference(net->embedding->weight, expected) < 1e-15);
}

TEST_CASE(
    "what happens if I use one batch norm in two places and average its buffers: once, and each "
    "rank gets its own back") {
  Sequential net(Linear(6, 6));
  torch::nn::BatchNorm1d norm(6);
  net->push_back(norm);
  net->push_back(norm);
  norm->running_mean.fill_(hvd::rank() + 1.0);
  {
    const hvd::AveragedBuffers guard(net);
    CHECK(norm->running_mean[0].item<double>() == doctest::Approx((hvd::size() + 1) / 2.0));
  }
  CHECK(norm->running_mean[0].item<double>() == hvd::rank() + 1);
}

// ------------------------------------------------------------- losses that forward does not return

/// Keeps what losses are made of; `forward` returns nothing that leads to all parameters.
struct Keeping : torch::nn::Module {
  Keeping() {
    first = register_module("first", Linear(6, 8));
    second = register_module("second", Linear(8, 3));
    fill(*this);
  }
  void forward(const at::Tensor& x) {
    hidden = torch::tanh(first(x));
    output = second(hidden);
  }
  at::Tensor loss(int rank, int step) {
    return torch::mse_loss(output, target(rank, step)) + hidden.square().mean();
  }
  Linear first{nullptr}, second{nullptr};
  at::Tensor hidden, output;
};
at::Tensor kept_loss(Keeping& net, int rank, int step) {
  net.forward(input(rank, step));
  return net.loss(rank, step);
}

TEST_CASE(
    "what happens if I make a loss of tensors that the module keeps: its gradients are averages, "
    "too") {
  const auto net = std::make_shared<Keeping>();
  const auto alone = std::make_shared<Keeping>();
  DistributedDataParallel<Keeping> ddp(net);
  const auto loss = [&](int step) {
    ddp.forward(input(hvd::rank(), step));
    return net->loss(hvd::rank(), step);
  };
  const auto reference = [&](int step) {
    return mean_over_ranks([&](int rank) { return kept_loss(*alone, rank, step); });
  };
  const auto check = [&] {
    CHECK(gradients_differ(*net, *alone) < 1e-12);
    net->zero_grad();
    alone->zero_grad();
  };
  for (int step = 0; step < 3; ++step) {
    loss(step).backward();
    reference(step).backward();
    check();
  }
  // Several forward passes, one backward pass; then one each.
  (loss(3) + loss(4) * 2).backward();
  (reference(3) + reference(4) * 2).backward();
  check();
  for (const bool latest_first : {false, true}) {
    at::Tensor one = loss(5), other = loss(6);
    if (latest_first) std::swap(one, other);
    one.backward();
    other.backward();
    (reference(5) + reference(6)).backward();
    check();
  }
  // Twice through the same pass.
  const at::Tensor again = loss(7);
  again.backward({}, /*retain_graph=*/true);
  again.backward();
  (reference(7) * 2).backward();
  check();
  // Evaluation, on one rank even, between forward and backward, and instead of it.
  const at::Tensor waiting = loss(8);
  if (hvd::rank() == 0) {
    const torch::NoGradGuard no_gradient;
    ddp.forward(input(0, 9));
  }
  waiting.backward();
  reference(8).backward();
  check();
  loss(9);
  loss(10).backward();
  reference(10).backward();
  check();
}

TEST_CASE(
    "what happens if such a loss reaches a part of the model only, or another part on each rank: "
    "the rest counts as zeros") {
  const auto net = std::make_shared<Keeping>();
  const auto alone = std::make_shared<Keeping>();
  for (const bool find : {false, true}) {
    DistributedDataParallel<Keeping> ddp(net, {.find_unused_parameters = find});
    const auto of = [](Keeping& module, int rank) {
      return rank % 2 == 0 ? module.hidden.sum() : module.output.square().sum();
    };
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      alone->zero_grad();
      ddp.forward(input(hvd::rank(), step));
      of(*net, hvd::rank()).backward();
      mean_over_ranks([&](int rank) {
        alone->forward(input(rank, step));
        return of(*alone, rank);
      }).backward();
      CHECK(gradients_differ(*net, *alone) < 1e-12);
    }
  }
}

TEST_CASE(
    "what happens if I use the module itself, without the wrapper, on one rank: its gradients stay "
    "there") {
  Sequential net = small_model();
  DistributedDataParallel ddp(net);
  torch::mse_loss(ddp.forward(input(hvd::rank(), 0)), target(hvd::rank(), 0)).backward();
  const std::uint64_t before = hvd::stats().tensors_submitted;
  net->zero_grad();
  if (hvd::rank() == 0) {
    small_loss(net, 0, 1).backward();
    Sequential alone = small_model();
    small_loss(alone, 0, 1).backward();
    CHECK(gradients_differ(*net, *alone) < 1e-12);
  }
  CHECK(hvd::stats().tensors_submitted == before);
}

TEST_CASE(
    "what happens under no_sync() if a loss is made of kept tensors: the gradients add up here "
    "until the next pass") {
  const auto net = std::make_shared<Keeping>();
  const auto alone = std::make_shared<Keeping>();
  DistributedDataParallel<Keeping> ddp(net);
  for (int round = 0; round < 2; ++round) {
    const std::uint64_t before = hvd::stats().tensors_submitted;
    {
      const auto local = ddp.no_sync();
      ddp.forward(input(hvd::rank(), 0));
      net->loss(hvd::rank(), 0).backward();
    }
    CHECK(hvd::stats().tensors_submitted == before);
    ddp.forward(input(hvd::rank(), 1));
    net->loss(hvd::rank(), 1).backward();
    for (int step = 0; step < 2; ++step)
      mean_over_ranks([&](int rank) { return kept_loss(*alone, rank, step); }).backward();
    CHECK(gradients_differ(*net, *alone) < 1e-12);
    net->zero_grad();
    alone->zero_grad();
  }
}

/// Runs `layer` again in backward instead of keeping what is between (activation checkpointing).
struct Checkpointed : torch::autograd::Function<Checkpointed> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            Linear* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<std::int64_t>(layer);
    const torch::NoGradGuard no_gradient;
    return torch::tanh((*layer)(x));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list from) {
    auto* const layer = reinterpret_cast<Linear*>(context->saved_data["layer"].toInt());
    const torch::AutoGradMode gradient(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::autograd::backward({torch::tanh((*layer)(x))}, {from[0]});
    return {x.grad(), at::Tensor()};
  }
};
struct WithCheckpoints : torch::nn::Module {
  explicit WithCheckpoints(bool checkpoints_) : checkpoints(checkpoints_) {
    first = register_module("first", Linear(6, 6));
    second = register_module("second", Linear(6, 6));
    third = register_module("third", Linear(6, 3));
    fill(*this);
  }
  at::Tensor through(Linear& layer, const at::Tensor& x) {
    return checkpoints ? Checkpointed::apply(x, &layer) : torch::tanh(layer(x));
  }
  int forward(const at::Tensor& x) {
    const at::Tensor start = x.clone().requires_grad_();
    output = through(second, through(third_first ? second : first, start));
    if (!third_last) output = third(output);
    return 1;
  }
  bool checkpoints, third_first = false, third_last = false;
  Linear first{nullptr}, second{nullptr}, third{nullptr};
  at::Tensor output;
};

TEST_CASE(
    "what happens with activation checkpointing, whose backward passes lie within the pass: the "
    "gradients are the same") {
  for (const bool shared : {false, true}) {         // one layer in two checkpoints
    for (const bool only_nested : {false, true}) {  // the first gradient comes from within
      const auto net = std::make_shared<WithCheckpoints>(true);
      const auto alone = std::make_shared<WithCheckpoints>(false);
      net->third_first = alone->third_first = shared;
      net->third_last = alone->third_last = only_nested;
      DistributedDataParallel<WithCheckpoints> ddp(net);
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        alone->zero_grad();
        CHECK(ddp.forward(input(hvd::rank(), step)) == 1);
        net->output.square().sum().backward();
        mean_over_ranks([&](int rank) {
          alone->forward(input(rank, step));
          return alone->output.square().sum();
        }).backward();
        CHECK(gradients_differ(*net, *alone) < 1e-11);
      }
    }
  }
}

TEST_CASE(
    "what happens if I unfreeze parameters on one rank alone: Mismatch on all in the next pass, "
    "and it goes on when all have") {
  if (hvd::size() == 1) return;
  for (const bool training : {true, false}) {
    Sequential net(Linear(6, 8), Linear(8, 3));
    fill(*net);
    const auto freeze = [&](bool frozen) {
      for (auto& parameter : net[0]->parameters()) parameter.set_requires_grad(!frozen);
    };
    freeze(true);
    DistributedDataParallel ddp(net);
    ddp.train(training);
    const auto step = [&](int number) {
      net->zero_grad();
      torch::mse_loss(ddp.forward(input(hvd::rank(), number)), target(hvd::rank(), number))
          .backward();
    };
    step(0);
    if (last()) freeze(false);
    for (int number = 1; number < 3; ++number) {  // on all of them at once
      const std::string text = error_of<hvd::Mismatch>([&] { step(number); });
      INFO(text);
      CHECK(contains(text, last_rank() + " has changed the parameters or groups of ddp."));
    }
    freeze(false);
    for (int number = 3; number < 6; ++number) {
      step(number);
      for (const auto& parameter : net->parameters()) CHECK(same_on_all_ranks(parameter.grad()));
    }
  }
}

TEST_CASE(
    "what happens if I unfreeze parameters: they are reduced from the next pass on, which one "
    "rank's own evaluation is not") {
  // an evaluating module may be trained: its batch norm is to stay as it is
  for (const bool training : {true, false}) {
    const auto make = [] {
      Sequential net(Linear(6, 8), Linear(8, 3));
      fill(*net);
      return net;
    };
    Sequential net = make(), alone = make();
    const auto freeze = [&](bool frozen) {
      for (auto& parameter : net[0]->parameters()) parameter.set_requires_grad(!frozen);
    };
    const auto step = [&](auto& ddp, int number) {
      net->zero_grad();
      alone->zero_grad();
      torch::mse_loss(ddp.forward(input(hvd::rank(), number)), target(hvd::rank(), number))
          .backward();
      mean_over_ranks([&](int rank) {
        return torch::mse_loss(alone->forward(input(rank, number)), target(rank, number));
      }).backward();
    };
    freeze(true);
    DistributedDataParallel ddp(net);
    freeze(false);
    ddp.eval();
    if (hvd::rank() == 0) ddp.forward(input(0, 0));
    freeze(true);
    ddp.train(training);
    step(ddp, 0);  // nobody waits for what the evaluation saw
    CHECK(!net->parameters()[0].grad().defined());
    CHECK(difference(net->parameters()[2].grad(), alone->parameters()[2].grad()) < 1e-11);
    {
      freeze(false);
      torch::optim::SGD sgd(net[0]->parameters(), 0.1);
      hvd::DistributedOptimizer optimizer(sgd, net[0]->named_parameters());
      step(ddp, 1);  // the optimizer reduces them while it lives
      optimizer.step();
    }
    net[0]->as<Linear>()->weight.detach().copy_(alone[0]->as<Linear>()->weight.detach());
    net[0]->as<Linear>()->bias.detach().copy_(alone[0]->as<Linear>()->bias.detach());
    for (int number = 2; number < 5; ++number) {
      step(ddp, number);
      CHECK(gradients_differ(*net, *alone) < 1e-11);
    }
  }
}

}  // namespace
}  // namespace what_if_ddp
