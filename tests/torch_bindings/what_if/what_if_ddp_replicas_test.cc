// What happens if I ... : ranks under DistributedDataParallel that do something alone, or past the
// wrapper, and would drift apart.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "tests/torch_bindings/norm_net.h"

namespace what_if_ddp_replicas {
namespace {

using namespace hvd::test;
using namespace hvd::test::norm_net;
using hvd::DistributedDataParallel;
using torch::autograd::grad;
using torch::optim::SGD;

double gradients_differ(const torch::nn::Module& a, const torch::nn::Module& b) {
  double worst = 0;
  const auto mine = a.parameters(), theirs = b.parameters();
  REQUIRE(mine.size() == theirs.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    REQUIRE(mine[i].grad().defined() == theirs[i].grad().defined());
    if (mine[i].grad().defined())
      worst = std::max(worst, difference(mine[i].grad(), theirs[i].grad()));
  }
  return worst;
}
/// What `of(rank)` gives on all ranks, averaged by one process.
template <class Of>
at::Tensor mean_over_ranks(const Of& of) {
  at::Tensor sum = torch::zeros({}, kDouble);
  for (const int rank : everyone()) sum = sum + of(rank);
  return sum / hvd::size();
}
/// A step of all ranks through the wrapper gives what one process would get.
template <class Parallel>
void check_step(Parallel& ddp, Sequential& net, int number) {
  Sequential alone = model(false);
  {
    const torch::NoGradGuard no_gradient;
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      alone->parameters()[i].copy_(net->parameters()[i]);
  }
  net->zero_grad();
  loss(ddp, hvd::rank(), number).backward();
  mean_over_ranks([&](int rank) { return loss(*alone, rank, number); }).backward();
  CHECK(gradients_differ(*net, *alone) < 1e-11);
  net->zero_grad();
}

/// What this process writes to standard error in the meantime.
class Heard {
 public:
  Heard() : error_(dup(STDERR_FILENO)) {
    std::fflush(stderr);
    REQUIRE(dup2(fileno(file_), STDERR_FILENO) >= 0);
  }
  ~Heard() { end(); }
  Heard(const Heard&) = delete;
  Heard& operator=(const Heard&) = delete;
  std::string end() {
    if (error_ < 0) return {};
    dup2(error_, STDERR_FILENO);
    close(error_);
    error_ = -1;
    std::rewind(file_);
    std::string text;
    for (int letter = 0; (letter = std::fgetc(file_)) != EOF;) text += static_cast<char>(letter);
    std::fclose(file_);
    return text;
  }

 private:
  std::FILE* file_ = std::tmpfile();
  int error_;
};
int times(const std::string& text, const std::string& part) {
  int count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// ---------------------------------------------------------------------- past the wrapper's forward

TEST_CASE(
    "what happens if I write ddp->forward(x): it is the wrapper's, and what else is called so "
    "means the wrapper, too") {
  Sequential net = model(false);
  DistributedDataParallel ddp(net);
  Sequential alone = model(false);
  for (int step = 0; step < 2; ++step) {
    ddp->zero_grad();
    alone->zero_grad();
    torch::mse_loss(ddp->forward(input(hvd::rank(), step)), target(hvd::rank(), step)).backward();
    mean_over_ranks([&](int rank) { return loss(*alone, rank, step); }).backward();
    CHECK(gradients_differ(*net, *alone) < 1e-12);
  }
  ddp->eval();
  CHECK_FALSE(net->is_training());
  ddp->train();
  ddp->to(kFloat);
  CHECK((net->parameters().front().scalar_type() == kFloat));
  CHECK(ddp->parameters().size() == 4);
  CHECK(ddp->named_parameters().size() == 4);
  CHECK(ddp->module() == net.ptr());
}

TEST_CASE(
    "what happens if I train the module itself beside its wrapper: a line says so once, and the "
    "second step is refused") {
  if (hvd::size() == 1) return;
  Sequential net = model(false);
  DistributedDataParallel ddp(net);
  SGD sgd(net->parameters(), 0.1);
  Heard heard;
  const auto step = [&](int number) {
    sgd.zero_grad();
    loss(*net, hvd::rank(), number).backward();
    sgd.step();
  };
  step(0);
  const std::string refusal = error_of<hvd::InvalidArgument>([&] { step(1); });
  const std::string again = error_of<hvd::InvalidArgument>([&] {
    step(2);
    step(3);
  });
  const std::string said = heard.end();
  for (const auto& text : {refusal, again}) {
    CAPTURE(text);
    CHECK(contains(text, "ddp."));
    CHECK(contains(text, "1.bias"));
    CHECK(contains(text, "forward()"));
  }
  CAPTURE(said);
  CHECK(times(said, "did not go through") == 1);
  CHECK(contains(said, "no_sync()"));
  hvd::broadcast_parameters(net, 0);
  check_step(ddp, net, 4);
}

TEST_CASE(
    "what happens if one rank alone has trained the module itself: a Mismatch on all in the next "
    "pass, and then all go on") {
  if (hvd::size() == 1) return;
  Sequential net = model(false);
  DistributedDataParallel ddp(net);
  SGD sgd(net->parameters(), 0.1);
  check_step(ddp, net, 0);
  Heard heard;
  if (last()) {
    loss(*net, hvd::rank(), 1).backward();
    sgd.step();
    sgd.zero_grad();
  }
  heard.end();
  const std::string text = error_of<hvd::Mismatch>([&] { loss(ddp, hvd::rank(), 2).backward(); });
  CAPTURE(text);
  CHECK(contains(text, last_rank() + " has changed parameter '"));
  CHECK(contains(text, "1.bias"));
  hvd::broadcast_parameters(net, 0);
  for (int number = 3; number < 6; ++number) check_step(ddp, net, number);
}

TEST_CASE(
    "what happens if gradients of the module itself are thrown away, as a GAN's discriminator's: "
    "no rank minds") {
  Sequential judge = model(false);
  Sequential generator(Linear(6, 6));
  {
    const torch::NoGradGuard no_gradient;
    generator->to(kDouble);
    for (auto& parameter : generator->parameters())
      parameter.copy_(data(parameter.sizes(), kDouble, 0) * 0.2);
  }
  DistributedDataParallel ddp(judge);
  DistributedDataParallel of_generator(generator);
  SGD judge_sgd(judge->parameters(), 0.1), generator_sgd(generator->parameters(), 0.1);
  Heard heard;
  for (int step = 0; step < 4; ++step) {
    judge_sgd.zero_grad();
    torch::mse_loss(ddp.forward(input(hvd::rank(), step)), target(hvd::rank(), step)).backward();
    judge_sgd.step();
    if (step == 2) {  // clipped weights
      const torch::NoGradGuard no_gradient;
      for (auto& parameter : judge->parameters()) parameter.clamp_(-0.5, 0.5);
    }
    generator_sgd.zero_grad();
    judge->forward(of_generator.forward(input(hvd::rank(), step))).square().mean().backward();
    generator_sgd.step();
    CHECK(is_same_on_all_ranks(*judge));
    CHECK(is_same_on_all_ranks(*generator));
  }
  CHECK(times(heard.end(), "did not go through") == (hvd::size() == 1 ? 0 : 1));
}

// --------------------------------------------------------------------- gradients by something else

TEST_CASE(
    "what happens if one rank alone asks for a gradient of its input: it gets it, nothing is sent, "
    "and all go on") {
  for (const bool evaluates : {false, true}) {
    CAPTURE(evaluates);
    Sequential net = model(evaluates);  // in training the running statistics would be shared
    DistributedDataParallel ddp(net);
    Sequential alone = model(evaluates);
    loss(ddp, hvd::rank(), 0).backward();  // old gradients, which are nobody's business
    mean_over_ranks([&](int rank) { return loss(*alone, rank, 0); });
    if (evaluates) {
      ddp.eval();
      alone->eval();
      const torch::NoGradGuard no_gradient;
      for (std::size_t i = 0; i < net->buffers().size(); ++i)
        alone->buffers()[i].copy_(net->buffers()[i]);
    }
    const auto before = hvd::stats().tensors_submitted;
    if (hvd::rank() == 0) {
      const at::Tensor x = input(0, 1).requires_grad_(), y = input(0, 1).requires_grad_();
      const at::Tensor mine = grad({ddp.forward(x).square().sum()}, {x}).front();
      const at::Tensor theirs = grad({alone->forward(y).square().sum()}, {y}).front();
      CHECK(difference(mine, theirs) < 1e-12);
      const at::Tensor output = ddp.forward(x);
      torch::autograd::backward({output.sum()}, {}, std::nullopt, false, {x});
      CHECK(x.grad().defined());
      // frozen for the while, so that `backward` gives the input its gradient alone
      if (evaluates) {
        for (auto& parameter : net->parameters()) parameter.set_requires_grad(false);
        ddp.forward(x).sum().backward();
        for (auto& parameter : net->parameters()) parameter.set_requires_grad(true);
      }
    }
    CHECK(hvd::stats().tensors_submitted == before);
    ddp.train();
    for (int step = 2; step < 4; ++step) {
      net->zero_grad();
      loss(ddp, hvd::rank(), step).backward();
      for (const auto& parameter : net->parameters()) CHECK(same_on_all_ranks(parameter.grad()));
      if (!evaluates) check_step(ddp, net, step);
    }
  }
}

TEST_CASE(
    "what happens if I train an evaluating module, or a gradient of the input is part of the loss: "
    "averages as ever") {
  Sequential net = model(false), alone = model(false);
  DistributedDataParallel ddp(net);
  for (const bool training : {true, false}) {
    ddp.train(training);
    for (int step = 0; step < 2; ++step) {
      const auto penalized = [&](auto& of, int rank) {
        const at::Tensor x = input(rank, step).requires_grad_();
        const at::Tensor output = of.forward(x).pow(3).sum();
        return output * 0.1 + grad({output}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)
                                  .front()
                                  .square()
                                  .mean();
      };
      net->zero_grad();
      alone->zero_grad();
      penalized(ddp, hvd::rank()).backward();
      mean_over_ranks([&](int rank) { return penalized(*alone, rank); }).backward();
      CHECK(gradients_differ(*net, *alone) < 1e-9);
      net->zero_grad();
      alone->zero_grad();
      const auto of_parameters_alone = [](const at::Tensor& of,
                                          const std::vector<at::Tensor>& parameters) {
        torch::autograd::backward({of}, {}, std::nullopt, false, parameters);
      };
      of_parameters_alone(loss(ddp, hvd::rank(), step), net->parameters());
      of_parameters_alone(mean_over_ranks([&](int rank) { return loss(*alone, rank, step); }),
                          alone->parameters());
      CHECK(gradients_differ(*net, *alone) < 1e-11);
    }
  }
}

struct MayPassBy : torch::nn::Module {
  MayPassBy() {
    layer = register_module("layer", Linear(6, 6));
    to(kDouble);
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : parameters()) parameter.copy_(data(parameter.sizes(), kDouble, 0) * 0.2);
  }
  at::Tensor forward(const at::Tensor& x, bool passes_by) { return passes_by ? x * 2 : layer(x); }
  Linear layer{nullptr};
};

TEST_CASE(
    "what happens if no parameter is in the loss of one rank: it counts as zeros, and nobody "
    "waits") {
  const auto net = std::make_shared<MayPassBy>();
  DistributedDataParallel<MayPassBy> ddp(net);
  for (int step = 0; step < 2; ++step) {
    net->zero_grad();
    const at::Tensor x = input(hvd::rank(), step).requires_grad_();
    ddp.forward(x, last() && hvd::size() > 1).sum().backward();
    const auto alone = std::make_shared<MayPassBy>();
    mean_over_ranks([&](int rank) {
      const at::Tensor of = input(rank, step).requires_grad_();
      return alone->forward(of, rank + 1 == hvd::size() && hvd::size() > 1).sum();
    }).backward();
    CHECK(gradients_differ(*net, *alone) < 1e-11);
  }
}

// ------------------------------------------------------------ steps by gradients of one rank's own

TEST_CASE(
    "what happens if the last group of passes under no_sync() is not complete, and I step: a "
    "Mismatch on all in the next pass") {
  if (hvd::size() == 1) return;
  Sequential net = model(false);
  DistributedDataParallel ddp(net);
  SGD sgd(net->parameters(), 0.1);
  const auto pass = [&](int number, bool local) {
    std::optional<DistributedDataParallel<torch::nn::SequentialImpl>::NoSync> guard;
    if (local) guard.emplace(ddp.no_sync());
    loss(ddp, hvd::rank(), number).backward();
  };
  const auto epoch = [&](int passes) {
    for (int number = 0; number < passes; ++number) {
      pass(number, number % 2 == 0);
      if (number % 2 == 0) continue;
      sgd.step();
      sgd.zero_grad();
    }
    sgd.step();  // for what is left
    sgd.zero_grad();
  };
  epoch(4);
  CHECK(is_same_on_all_ranks(*net));
  const std::string text = error_of<hvd::Mismatch>([&] {
    epoch(3);
    epoch(3);
  });
  CAPTURE(text);
  CHECK(contains(text, "'1.bias'"));
  CHECK(contains(text, "no_sync()"));
  CHECK(contains(text, "ddp."));
  for (int rank : everyone())
    CHECK(contains(text, "rank " + std::to_string(rank) + " has changed"));
  sgd.zero_grad();
  hvd::broadcast_parameters(net, 0);
  epoch(4);
  CHECK(is_same_on_all_ranks(*net));
}

TEST_CASE(
    "what happens if gradients of no_sync() are there and parameters change alike, or come back: "
    "all go on") {
  Sequential net = model(false);
  DistributedDataParallel ddp(net);
  SGD sgd(net->parameters(), 0.1);
  const auto local_pass = [&] {
    const auto local = ddp.no_sync();
    loss(ddp, hvd::rank(), 0).backward();
  };
  // Evaluated by averages in the middle of a group, by one rank alone.
  hvd::ExponentialMovingAverage average(*net, {.decay = 0.5});
  loss(ddp, hvd::rank(), 7).backward();
  sgd.step();
  average.update();
  sgd.zero_grad();
  local_pass();
  if (hvd::rank() == 0) {
    const auto averaged = average.averaged();
    const torch::NoGradGuard no_gradient;
    ddp.forward(input(0, 1));
  }
  loss(ddp, hvd::rank(), 1).backward();
  sgd.step();
  CHECK(is_same_on_all_ranks(*net));
  // Thrown away, and other weights.
  local_pass();
  sgd.zero_grad();
  {
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : net->parameters()) parameter.mul_(0.5);
  }
  check_step(ddp, net, 2);
  // One rank looks at its gradients, and then all get a checkpoint's weights.
  if (hvd::rank() == 0) local_pass();
  sgd.zero_grad();
  {
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : net->parameters()) parameter.mul_(1.5);
  }
  hvd::broadcast_parameters(net, 0);
  check_step(ddp, net, 3);
  // A model that is moved.
  local_pass();
  sgd.zero_grad();
  ddp.to(kFloat);
  ddp.to(kDouble);
  check_step(ddp, net, 4);
}

TEST_CASE(
    "what happens if I train by LBFGS with a line search under DDP, and its closure returns the "
    "mean loss: right") {
  const auto train = [](auto& forward, auto& net, bool own_loss, const std::vector<int>& ranks) {
    torch::optim::LBFGS lbfgs(
        net->parameters(),
        torch::optim::LBFGSOptions(1).max_iter(6).line_search_fn("strong_wolfe"));
    for (int step = 0; step < 3; ++step) {
      lbfgs.step([&] {
        lbfgs.zero_grad();
        at::Tensor all = torch::zeros({}, kDouble);
        for (const int rank : ranks)
          all = all + loss(forward, rank, step) / static_cast<double>(ranks.size());
        all.backward();
        return own_loss ? all : hvd::allreduce(all.detach());
      });
    }
  };
  Sequential net = model(false), alone = model(false);
  {
    DistributedDataParallel ddp(net);
    train(ddp, net, false, {hvd::rank()});
  }
  train(*alone, alone, true, everyone());
  CHECK(is_same_on_all_ranks(*net));
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    CHECK(difference(net->parameters()[i], alone->parameters()[i]) < 1e-6);
}

TEST_CASE(
    "what happens if LBFGS decides by each rank's own loss under DDP: a Mismatch on all as soon as "
    "they have decided differently") {
  if (hvd::size() == 1) return;
  Sequential net = model(false);
  DistributedDataParallel ddp(net);
  torch::optim::LBFGS lbfgs(
      net->parameters(), torch::optim::LBFGSOptions(1).max_iter(6).line_search_fn("strong_wolfe"));
  const std::string text = error_of<hvd::Mismatch>([&] {
    for (int step = 0; step < 100; ++step) {
      lbfgs.step([&] {
        lbfgs.zero_grad();
        const at::Tensor own = loss(ddp, hvd::rank(), step % 3);
        own.backward();
        return own;
      });
    }
  });
  CAPTURE(text);
  CHECK(contains(text, "0.weight"));
  net->zero_grad();
  hvd::broadcast_parameters(net, 0);
  for (int number = 0; number < 3; ++number) check_step(ddp, net, number);
}

// ------------------------------------------------------------------------------------ another head

struct Headed : torch::nn::Module {
  explicit Headed(int variant = 0) {
    body = register_module("body", Linear(6, 8));
    to(kDouble);
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : body->parameters())
      parameter.copy_(data(parameter.sizes(), kDouble, 0) * 0.3);
    head = register_module("head", made_head(variant));
  }
  static Linear made_head(int variant) {
    const torch::NoGradGuard no_gradient;
    Linear made(8, 3);
    made->to(kDouble);
    for (auto& parameter : made->parameters())
      parameter.copy_(data(parameter.sizes(), kDouble, 0, variant) * 0.3);
    return made;
  }
  void replace_head(int variant) { head = replace_module("head", made_head(variant)); }
  at::Tensor forward(const at::Tensor& x) { return head(torch::tanh(body(x))); }
  Linear body{nullptr}, head{nullptr};
};
void train_heads(DistributedDataParallel<Headed>& ddp, const std::shared_ptr<Headed>& net,
                 const std::shared_ptr<Headed>& alone) {
  SGD sgd(net->parameters(), 0.1), reference(alone->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    sgd.zero_grad();
    reference.zero_grad();
    loss(ddp, hvd::rank(), step).backward();
    mean_over_ranks([&](int rank) { return loss(*alone, rank, step); }).backward();
    CHECK(gradients_differ(*net, *alone) < 1e-11);
    sgd.step();
    reference.step();
  }
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    CHECK(difference(net->parameters()[i], alone->parameters()[i]) < 1e-11);
  CHECK(is_same_on_all_ranks(*net));
}

TEST_CASE(
    "what happens if I replace the head of a wrapped model: it trains as in one process, or is "
    "refused where ranks' heads differ") {
  const auto net = std::make_shared<Headed>(), alone = std::make_shared<Headed>();
  DistributedDataParallel<Headed> ddp(net);
  train_heads(ddp, net, alone);
  net->replace_head(5);
  alone->replace_head(5);
  train_heads(ddp, net, alone);
  if (hvd::size() == 1) return;
  net->replace_head(last() ? 7 : 6);
  alone->replace_head(6);
  const std::string text = error_of<hvd::Mismatch>([&] { train_heads(ddp, net, alone); });
  CAPTURE(text);
  CHECK(contains(text, "'head.weight'"));
  CHECK(contains(text, "broadcast_parameters"));
  net->zero_grad();
  hvd::broadcast_parameters(*net, 0);
  train_heads(ddp, net, alone);
}

TEST_CASE(
    "what happens if one rank alone replaces the head: a Mismatch on all, and right when all "
    "have") {
  if (hvd::size() == 1) return;
  const auto net = std::make_shared<Headed>(), alone = std::make_shared<Headed>();
  DistributedDataParallel<Headed> ddp(net);
  train_heads(ddp, net, alone);
  if (last()) net->replace_head(5);
  const std::string text = error_of<hvd::Mismatch>([&] {
    for (int step = 0; step < 2; ++step) loss(ddp, hvd::rank(), step).backward();
  });
  CAPTURE(text);
  CHECK(contains(text, last_rank() + " has changed the parameters or groups of ddp."));
  CHECK(contains(text, "'head.weight'"));
  if (!last()) net->replace_head(5);
  alone->replace_head(5);
  net->zero_grad();
  train_heads(ddp, net, alone);
}

TEST_CASE(
    "what happens if I take the parameters' gradients by autograd::grad: the log says once that "
    "they are not averaged, and nothing of penalties, inputs and no_sync()") {
  Sequential net = model(false);
  DistributedDataParallel ddp(net);
  const auto said_in = [&](const auto& call) {
    Heard heard;
    call();
    return contains(heard.end(), "autograd::grad");
  };
  const auto ask = [&] { static_cast<void>(grad({loss(ddp, hvd::rank(), 0)}, net->parameters())); };
  const auto others = [&] {
    const at::Tensor x = input(hvd::rank(), 0).requires_grad_();
    static_cast<void>(grad({ddp.forward(x).sum()}, {x}));
    const at::Tensor first = loss(ddp, hvd::rank(), 0);
    const auto slopes = grad({first}, net->parameters(), {}, true, /*create_graph=*/true);
    (first + slopes[0].square().sum()).backward();
    const auto guard = ddp.no_sync();
    ask();
  };
  CHECK(!said_in(others));
  CHECK(said_in(ask) == (hvd::size() > 1));
  CHECK(!said_in(ask));
  check_step(ddp, net, 1);
}

TEST_CASE(
    "what happens if a user's hook takes the wrapper's place: gradients are averages still, in "
    "evaluation, too") {
  Sequential net = model(false), alone = model(false);
  DistributedDataParallel ddp(net);
  ddp.eval();
  struct Counts : torch::autograd::PostAccumulateGradHook {
    explicit Counts(int& count) : count_(count) {}
    void operator()(const at::Tensor& /*parameter*/) override { ++count_; }
    int& count_;
  };
  int calls = 0;
  for (auto& parameter : net->parameters())
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Counts>(calls));
  for (int step = 0; step < 2; ++step) {
    loss(ddp, hvd::rank(), step).backward();
    mean_over_ranks([&](int rank) { return loss(*alone, rank, step); }).backward();
    CHECK(gradients_differ(*net, *alone) < 1e-11);
  }
  CHECK(calls == 8);
}

}  // namespace
}  // namespace what_if_ddp_replicas
