// The shapes of LibTorch programs that people have, each made data parallel as the documents say,
// against the same loop in one process that has all the rows: ports FOLDER [SHAPE...] (default: all
// shapes). Every rank prints "SHAPE: DIFFERENCE" of its parameters, in fp64, and fails beyond what
// the shape allows. FOLDER is for files, the same on all ranks. A shape is an ordinary loop; what
// differs for ranks is behind `ranks` alone.
#include <hvd/torch.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

constexpr std::int64_t kRows = 8;  // of all ranks together: a multiple of 1, 2 and 4
constexpr int kSteps = 4;

/// Whether a loop runs as one of several ranks, or alone with all the rows.
struct Way {
  bool ranks;

  /// What this rank has of a batch.
  [[nodiscard]] at::Tensor rows(const at::Tensor& all) const {
    return ranks ? all.slice(0, hvd::rank(), kRows, hvd::size()) : all;
  }
  /// Ranks start apart: broadcast_parameters() brings them together.
  void seed() const { torch::manual_seed(ranks ? 7 + hvd::rank() : 7); }
};

/// The rows of all ranks, the same wherever they are made.
at::Tensor batch(int number, std::int64_t width) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 + number));
  return torch::randn({kRows, width}, generator, torch::kFloat64);
}

torch::nn::Sequential perceptron(std::int64_t in, std::int64_t out) {
  torch::nn::Sequential net(torch::nn::Linear(in, 8), torch::nn::Tanh(), torch::nn::Linear(8, out));
  net->to(torch::kFloat64);
  return net;
}

/// A copy of the parameters, one behind the other.
at::Tensor flat(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> parts;
  for (const auto& parameter : parameters) parts.push_back(parameter.detach().flatten());
  return torch::cat(parts);
}

/// The optimizer of a program, for ranks in its wrapper.
class Stepper {
 public:
  Stepper(Way way, torch::optim::Optimizer& own, torch::nn::Module& module,
          hvd::DistributedOptimizerOptions options = {})
      : own_(own) {
    if (!way.ranks) return;
    hvd::broadcast_parameters(module, 0);
    wrapper_.emplace(own, module.named_parameters(), std::move(options));
  }
  torch::optim::Optimizer* operator->() { return wrapper_ ? &*wrapper_ : &own_; }
  std::optional<hvd::DistributedOptimizer>& wrapper() { return wrapper_; }

 private:
  torch::optim::Optimizer& own_;
  std::optional<hvd::DistributedOptimizer> wrapper_;
};

at::Tensor logits_loss(const at::Tensor& logits, double label) {
  return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, label));
}

/// Two Adams; the discriminator's gradients come of two backward passes, and the generator's pass
/// leaves some in the discriminator.
at::Tensor gan(Way way) {
  way.seed();
  auto generator = perceptron(3, 4);
  auto discriminator = perceptron(4, 1);
  torch::optim::Adam generator_adam(generator->parameters(), torch::optim::AdamOptions(0.01));
  torch::optim::Adam discriminator_adam(discriminator->parameters(),
                                        torch::optim::AdamOptions(0.01));
  Stepper generator_stepper(way, generator_adam, *generator);
  Stepper discriminator_stepper(way, discriminator_adam, *discriminator,
                                {.backward_passes_per_step = 2});
  for (int step = 0; step < kSteps; ++step) {
    const auto fake = generator->forward(way.rows(batch(2 * step, 3)));
    discriminator->zero_grad();
    logits_loss(discriminator->forward(way.rows(batch(2 * step + 1, 4))), 1).backward();
    logits_loss(discriminator->forward(fake.detach()), 0).backward();
    discriminator_stepper->step();
    generator->zero_grad();
    logits_loss(discriminator->forward(fake), 1).backward();
    generator_stepper->step();
  }
  return torch::cat({flat(generator->parameters()), flat(discriminator->parameters())});
}

/// The same loop around DistributedDataParallel: gradients are averages when backward() returns,
/// and the optimizers know of nothing.
at::Tensor gan_ddp(Way way) {
  way.seed();
  auto generator = perceptron(3, 4);
  auto discriminator = perceptron(4, 1);
  torch::optim::Adam generator_adam(generator->parameters(), torch::optim::AdamOptions(0.01));
  torch::optim::Adam discriminator_adam(discriminator->parameters(),
                                        torch::optim::AdamOptions(0.01));
  std::optional<hvd::DistributedDataParallel<torch::nn::SequentialImpl>> generator_ddp,
      discriminator_ddp;
  if (way.ranks) {
    generator_ddp.emplace(generator);
    discriminator_ddp.emplace(discriminator);
  }
  const auto generate = [&](const at::Tensor& x) {
    return way.ranks ? generator_ddp->forward(x) : generator->forward(x);
  };
  const auto judge = [&](const at::Tensor& x) {
    return way.ranks ? discriminator_ddp->forward(x) : discriminator->forward(x);
  };
  for (int step = 0; step < kSteps; ++step) {
    const auto fake = generate(way.rows(batch(2 * step, 3)));
    discriminator->zero_grad();
    logits_loss(judge(way.rows(batch(2 * step + 1, 4))), 1).backward();
    logits_loss(judge(fake.detach()), 0).backward();
    discriminator_adam.step();
    generator->zero_grad();
    logits_loss(judge(fake), 1).backward();
    generator_adam.step();
  }
  return torch::cat({flat(generator->parameters()), flat(discriminator->parameters())});
}

struct Autoencoder : torch::nn::Module {
  torch::nn::Sequential encoder = register_module("encoder", perceptron(6, 4));
  torch::nn::Sequential decoder = register_module("decoder", perceptron(2, 6));
};

/// A loss that is a sum over the rows: gradients are summed over the ranks.
at::Tensor vae(Way way) {
  way.seed();
  const auto net = std::make_shared<Autoencoder>();
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.01));
  Stepper stepper(way, adam, *net, {.op = hvd::ReduceOp::Sum});
  for (int step = 0; step < kSteps; ++step) {
    const auto x = way.rows(batch(2 * step, 6));
    adam.zero_grad();
    const auto code = net->encoder->forward(x).chunk(2, 1);
    const auto z = code[0] + way.rows(batch(2 * step + 1, 2)) * torch::exp(0.5 * code[1]);
    const auto likelihood = torch::mse_loss(net->decoder->forward(z), x, torch::Reduction::Sum);
    const auto divergence = -0.5 * torch::sum(1 + code[1] - code[0].pow(2) - code[1].exp());
    (likelihood + divergence).backward();
    stepper->step();
  }
  return flat(net->parameters());
}

/// The LSTM's state is carried from one piece of each sequence to the next: a rank has the same
/// sequences in all of them.
at::Tensor lstm(Way way) {
  way.seed();
  torch::nn::LSTM cells(torch::nn::LSTMOptions(3, 5).batch_first(true));
  cells->to(torch::kFloat64);
  torch::optim::SGD sgd(cells->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  Stepper stepper(way, sgd, *cells);
  std::tuple<at::Tensor, at::Tensor> state;
  for (int step = 0; step < kSteps; ++step) {
    const auto x = way.rows(batch(step, 4 * 3)).view({-1, 4, 3});
    sgd.zero_grad();
    if (step == 0)
      state = {torch::zeros({1, x.size(0), 5}, torch::kFloat64),
               torch::zeros({1, x.size(0), 5}, torch::kFloat64)};
    auto [out, next] = cells->forward(x, state);
    out.pow(2).mean().backward();
    stepper->step();
    state = {std::get<0>(next).detach(), std::get<1>(next).detach()};
  }
  return flat(cells->parameters());
}

/// Gradients are clipped by the program's own lines: after synchronize(), or they would be those of
/// one rank.
at::Tensor own_clipping(Way way) {
  way.seed();
  auto net = perceptron(4, 2);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
  Stepper stepper(way, sgd, *net);
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad();
    (10 * net->forward(way.rows(batch(step, 4))).pow(2)).mean().backward();
    if (stepper.wrapper()) stepper.wrapper()->synchronize();
    at::Tensor squares = torch::zeros({}, torch::kFloat64);
    for (const auto& parameter : net->parameters()) squares += parameter.grad().pow(2).sum();
    const double norm = squares.sqrt().item<double>();
    if (norm > 0.1)
      for (auto& parameter : net->parameters()) parameter.grad().mul_(0.1 / norm);
    stepper->step();
  }
  return flat(net->parameters());
}

/// For ranks: half of the steps, torch::save by rank 0, torch::load by all into new objects, and
/// the other half. Alone all in one go.
at::Tensor save_and_load(Way way, const std::string& folder) {
  const std::string model = folder + "/model", optimizer = folder + "/optimizer";
  at::Tensor result;
  for (int begin = 0; begin < kSteps;) {
    way.seed();
    auto net = perceptron(4, 2);
    torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(0.01));
    if (begin > 0) {
      torch::load(net, model);
      torch::load(adam, optimizer);
    }
    Stepper stepper(way, adam, *net);
    for (const int end = way.ranks && begin == 0 ? kSteps / 2 : kSteps; begin < end; ++begin) {
      adam.zero_grad();
      net->forward(way.rows(batch(begin, 4))).pow(2).mean().backward();
      stepper->step();
    }
    if (way.ranks && hvd::rank() == 0) {
      torch::save(net, model);
      torch::save(adam, optimizer);
    }
    if (way.ranks) hvd::barrier();  // what rank 0 writes is there
    result = flat(net->parameters());
  }
  return result;
}

/// A module on the stack, without a holder, and a class that has the optimizer by its type.
struct Net : torch::nn::Module {
  Net() : first(4, 8), second(8, 2) {
    register_module("first", first);
    register_module("second", second);
    to(torch::kFloat64);
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first, second;
};
class Trainer {
 public:
  explicit Trainer(Way way)
      : way_(way),
        adamw_(net_.parameters(), torch::optim::AdamWOptions(0.01)),
        stepper_(way, adamw_, net_) {}
  at::Tensor train() {
    for (int step = 0; step < kSteps; ++step) {
      adamw_.zero_grad();
      net_.forward(way_.rows(batch(step, 4))).pow(2).mean().backward();
      stepper_->step();
      for (auto& group : adamw_.param_groups()) {
        auto& options = static_cast<torch::optim::AdamWOptions&>(group.options());
        options.lr(options.lr() * 0.9);
      }
    }
    return flat(net_.parameters());
  }

 private:
  Way way_;
  Net net_;
  torch::optim::AdamW adamw_;
  Stepper stepper_;
};
at::Tensor typed_members(Way way) {
  way.seed();
  return Trainer(way).train();
}

at::Tensor lbfgs(Way way) {
  way.seed();
  auto net = perceptron(4, 2);
  torch::optim::LBFGS lbfgs(
      net->parameters(),
      torch::optim::LBFGSOptions(0.5).max_iter(3).line_search_fn("strong_wolfe"));
  Stepper stepper(way, lbfgs, *net);
  for (int step = 0; step < kSteps; ++step) {
    stepper->step([&] {
      lbfgs.zero_grad();
      const auto x = way.rows(batch(0, 4));
      auto loss = torch::mse_loss(net->forward(x), torch::sin(x.narrow(1, 0, 2)));
      loss.backward();
      return loss;
    });
  }
  return flat(net->parameters());
}

/// The norm of the gradient by the input is part of the loss: backward goes through a graph of
/// gradients.
at::Tensor gradient_penalty(Way way) {
  way.seed();
  auto critic = perceptron(4, 1);
  torch::optim::Adam adam(critic->parameters(), torch::optim::AdamOptions(0.01));
  Stepper stepper(way, adam, *critic);
  for (int step = 0; step < kSteps; ++step) {
    adam.zero_grad();
    const auto x = way.rows(batch(step, 4)).clone().requires_grad_();
    const auto score = critic->forward(x);
    const auto slope = torch::autograd::grad({score}, {x}, {torch::ones_like(score)},
                                             /*retain_graph=*/true, /*create_graph=*/true)[0];
    (score.mean() + 10 * (slope.norm(2, 1) - 1).pow(2).mean()).backward();
    stepper->step();
  }
  return flat(critic->parameters());
}

struct Shape {
  const char* name;
  std::function<at::Tensor(Way)> train;
  double most = 1e-12;
};

bool is_right(const Shape& shape) {
  const auto by_ranks = shape.train({.ranks = true});
  const auto alone = shape.train({.ranks = false});
  const double difference = (by_ranks - alone).abs().max().item<double>();
  std::printf("%s: %.1e\n", shape.name, difference);
  return difference <= shape.most;
}

int run(const std::vector<std::string>& wanted, const std::string& folder) {
  // A line search compares losses, and divides by differences of them that nearly cancel: other
  // last places may make another step.
  constexpr double kLineSearch = 1e-10;
  const Shape shapes[] = {{"gan", gan},
                          {"gan_ddp", gan_ddp},
                          {"vae", vae},
                          {"lstm", lstm},
                          {"own_clipping", own_clipping},
                          {"save_and_load", [&](Way way) { return save_and_load(way, folder); }},
                          {"typed_members", typed_members},
                          {"lbfgs", lbfgs, kLineSearch},
                          {"gradient_penalty", gradient_penalty}};
  int wrong = 0;
  for (const auto& shape : shapes)
    if (wanted.empty() || std::find(wanted.begin(), wanted.end(), shape.name) != wanted.end())
      wrong += is_right(shape) ? 0 : 1;
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  hvd::init();
  torch::set_num_threads(1);
  const int wrong = run({argv + 2, argv + argc}, argv[1]);
  hvd::shutdown();
  return wrong;
}
