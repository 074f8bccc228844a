// DistributedDataParallel: gradients are the ranks' averages when backward() returns, whatever each
// rank has used.
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>

#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;
using hvd::DistributedDataParallel;
using torch::nn::Linear;
using torch::nn::Sequential;

/// `variant` makes other weights.
Sequential unlike_model(int variant = 0) {
  Sequential net(Linear(6, 8), torch::nn::Tanh(), Linear(8, 3));
  const torch::NoGradGuard no_gradient;
  for (auto& parameter : net->parameters())
    parameter.copy_(data(parameter.sizes(), kDouble, 0, variant++) * 0.3);
  net->to(kDouble);
  return net;
}
at::Tensor input(int rank, int step) { return data({5, 6}, kDouble, rank, step); }
at::Tensor target(int rank, int step) { return data({5, 3}, kDouble, rank, step + 1); }
template <class Net>
at::Tensor loss(Net& net, int rank, int step) {
  return torch::mse_loss(net.forward(input(rank, step)), target(rank, step));
}
/// Of all ranks, by one process.
at::Tensor global_loss(Sequential& net, int step) {
  at::Tensor sum = torch::zeros({}, kDouble);
  for (const int rank : everyone()) sum = sum + loss(*net, rank, step);
  return sum / hvd::size();
}

double gradients_differ(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double worst = 0;
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    REQUIRE(a[i].grad().defined() == b[i].grad().defined());
    if (a[i].grad().defined())
      worst = std::max(worst, difference(a[i].grad().to(kDouble), b[i].grad()));
  }
  return worst;
}

TEST_CASE("DistributedDataParallel: p ranks train as one process, with the user's own optimizer") {
  for (const bool adam : {false, true}) {
    Sequential net = unlike_model(hvd::rank());  // different on each rank: the first one's counts
    Sequential alone = unlike_model();
    DistributedDataParallel ddp(net);
    const auto make =
        [&](std::vector<at::Tensor> parameters) -> std::unique_ptr<torch::optim::Optimizer> {
      if (adam)
        return std::make_unique<torch::optim::Adam>(std::move(parameters),
                                                    torch::optim::AdamOptions(0.01));
      return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                                 torch::optim::SGDOptions(0.1).momentum(0.9));
    };
    const auto optimizer = make(ddp.parameters());
    const auto reference = make(alone->parameters());
    for (int step = 0; step < 6; ++step) {
      optimizer->zero_grad(step % 2 == 0);
      reference->zero_grad();
      loss(ddp, hvd::rank(), step).backward();
      global_loss(alone, step).backward();
      CHECK(gradients_differ(ddp.parameters(), alone->parameters()) < 1e-12);
      optimizer->step();
      reference->step();
    }
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      CHECK(difference(net->parameters()[i], alone->parameters()[i]) < 1e-12);
      CHECK(same_on_all_ranks(net->parameters()[i]));
    }
  }
}

TEST_CASE(
    "DistributedDataParallel: no_sync() adds up locally, and what counts is where forward was "
    "called") {
  Sequential net = unlike_model();
  Sequential alone = unlike_model();
  DistributedDataParallel ddp(net);
  for (int round = 0; round < 2; ++round) {
    net->zero_grad();
    alone->zero_grad();
    const std::uint64_t before = hvd::stats().tensors_submitted;
    {
      const auto local = ddp.no_sync();
      loss(ddp, hvd::rank(), 0).backward();
      { const auto nested = ddp.no_sync(); }
      const at::Tensor later = loss(ddp, hvd::rank(), 1);
      static_cast<void>(later);
    }
    at::Tensor outside;
    {
      const auto local = ddp.no_sync();
      outside = loss(ddp, hvd::rank(), 1);
    }
    outside.backward();
    CHECK(hvd::stats().tensors_submitted == before);  // nothing was sent so far
    Sequential own = unlike_model();
    loss(*own, hvd::rank(), 0).backward();
    loss(*own, hvd::rank(), 1).backward();
    CHECK(gradients_differ(net->parameters(), own->parameters()) < 1e-12);
    loss(ddp, hvd::rank(), 2).backward();
    for (int step = 0; step < 3; ++step) global_loss(alone, step).backward();
    CHECK(gradients_differ(net->parameters(), alone->parameters()) < 1e-12);
  }
  // Forward outside, backward inside: reduced.
  net->zero_grad();
  alone->zero_grad();
  const at::Tensor value = loss(ddp, hvd::rank(), 5);
  {
    const auto local = ddp.no_sync();
    value.backward();
  }
  global_loss(alone, 5).backward();
  CHECK(gradients_differ(net->parameters(), alone->parameters()) < 1e-12);
}

TEST_CASE(
    "DistributedDataParallel: several forward and backward passes, and evaluation, between two "
    "steps") {
  Sequential net = unlike_model();
  Sequential alone = unlike_model();
  DistributedDataParallel ddp(net);
  loss(ddp, hvd::rank(), 0).backward();
  loss(ddp, hvd::rank(), 1).backward();
  global_loss(alone, 0).backward();
  global_loss(alone, 1).backward();
  CHECK(gradients_differ(net->parameters(), alone->parameters()) < 1e-12);
  net->zero_grad();
  alone->zero_grad();
  const at::Tensor first = loss(ddp, hvd::rank(), 2);
  if (hvd::rank() == 0) {
    const torch::NoGradGuard no_gradient;
    loss(ddp, hvd::rank(), 7);
  }
  const at::Tensor second = loss(ddp, hvd::rank(), 3);
  (first + second * 2).backward({}, /*retain_graph=*/true);
  (first * 3).backward();
  (global_loss(alone, 2) * 4 + global_loss(alone, 3) * 2).backward();
  CHECK(gradients_differ(net->parameters(), alone->parameters()) < 1e-12);
}

/// One branch per rank; nobody uses the last.
struct RankBranches : torch::nn::Module {
  RankBranches() {
    for (int i = 0; i <= hvd::size(); ++i)
      branches.push_back(register_module("branch" + std::to_string(i), Linear(6, 3)));
    common = register_module("common", Linear(6, 6));
    to(kDouble);
    int variant = 0;
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : parameters())
      parameter.copy_(data(parameter.sizes(), kDouble, 0, variant++));
  }
  at::Tensor forward(const at::Tensor& x, int branch, bool with_common) {
    return branches[static_cast<std::size_t>(branch)](with_common ? common(x) : x);
  }
  std::vector<Linear> branches;
  Linear common{nullptr};
};

TEST_CASE("DistributedDataParallel: different branches on each rank") {
  for (const bool find : {true, false}) {
    const auto net = std::make_shared<RankBranches>();
    const auto alone = std::make_shared<RankBranches>();
    DistributedDataParallel ddp(net, {.find_unused_parameters = find});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      alone->zero_grad();
      const auto of = [&](auto& module, int rank) {
        const int branch = (rank + step) % hvd::size();
        return torch::mse_loss(module.forward(input(rank, step), branch, (rank + step) % 2 == 0),
                               target(rank, step));
      };
      of(ddp, hvd::rank()).backward();
      at::Tensor sum = torch::zeros({}, kDouble);
      for (const int rank : everyone()) sum = sum + of(*alone, rank);
      (sum / hvd::size()).backward();
      CHECK(gradients_differ(net->parameters(), alone->parameters()) < 1e-12);
      CHECK_FALSE(net->branches.back()->weight.grad().defined());
    }
  }
}

struct Counting : torch::nn::Module {
  Counting() {
    seen = register_buffer("seen", torch::zeros({2}, kDouble));
    calls = register_buffer("calls", torch::zeros({}, at::kLong));
    layer = register_module("layer", Linear(6, 3));
    to(kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    at_start = seen.clone();
    seen += hvd::rank() + 1;
    calls += 1;
    return layer(x);
  }
  at::Tensor seen, calls, at_start;
  Linear layer{nullptr};
};

TEST_CASE(
    "DistributedDataParallel: buffers are the first rank's before each forward in training, if "
    "asked for") {
  for (const bool broadcast : {true, false}) {
    const auto net = std::make_shared<Counting>();
    net->seen.fill_(10 * hvd::rank() + 5);
    DistributedDataParallel ddp(net, {.broadcast_buffers = broadcast});
    CHECK(net->seen[0].item<double>() == 5);
    for (int step = 0; step < 3; ++step) {
      loss(ddp, hvd::rank(), step).backward();
      CHECK(net->at_start[0].item<double>() == 5 + step * (broadcast ? 1 : hvd::rank() + 1));
    }
    net->seen.fill_(100 * hvd::rank() + 50);  // also what a user has made of them
    loss(ddp, hvd::rank(), 3).backward();
    CHECK(net->at_start[0].item<double>() == (broadcast ? 50 : 100 * hvd::rank() + 50));
    ddp.eval();
    CHECK_FALSE(net->is_training());
    if (hvd::rank() == 0) ddp.forward(input(0, 0));  // nothing is sent
  }
}

struct Recurrent : torch::nn::Module {
  Recurrent() {
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(6, 3)));
    to(kDouble);
    int variant = 0;
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : parameters())
      parameter.copy_(data(parameter.sizes(), kDouble, 0, variant++) * 0.5);
  }
  std::pair<std::string, std::vector<std::tuple<at::Tensor, std::optional<at::Tensor>>>> forward(
      const at::Tensor& x) {
    const auto [output, state] = lstm(x.unsqueeze(1));
    return {"nested", {{output, std::get<0>(state)}}};
  }
  torch::nn::LSTM lstm{nullptr};
};

TEST_CASE("DistributedDataParallel: nested outputs, of which ranks use different ones") {
  const auto net = std::make_shared<Recurrent>();
  const auto alone = std::make_shared<Recurrent>();
  DistributedDataParallel<Recurrent> ddp(net);
  const auto of = [](auto& module, int rank) {
    const auto output = module.forward(input(rank, 0));
    return rank % 2 == 0 ? std::get<0>(output.second[0]).square().sum()
                         : std::get<1>(output.second[0])->sum();
  };
  of(ddp, hvd::rank()).backward();
  at::Tensor sum = torch::zeros({}, kDouble);
  for (const int rank : everyone()) sum = sum + of(*alone, rank);
  (sum / hvd::size()).backward();
  CHECK(gradients_differ(net->parameters(), alone->parameters()) < 1e-12);
}

TEST_CASE("DistributedDataParallel is a module: names, type, files, and what it refuses") {
  Sequential net = unlike_model();
  DistributedDataParallel ddp(net, {.compression = hvd::Compression::fp16()});
  CHECK(ddp.named_parameters().keys().front() == "module.0.weight");
  CHECK(ddp.parameters().size() == 4);
  CHECK(ddp.module() == net.ptr());
  ddp.to(kFloat);
  CHECK((net->parameters().front().scalar_type() == kFloat));
  ddp.to(kDouble);
  const auto shared =
      std::make_shared<DistributedDataParallel<torch::nn::SequentialImpl>>(unlike_model(3));
  std::stringstream file;
  torch::save(shared, file);
  const auto other =
      std::make_shared<DistributedDataParallel<torch::nn::SequentialImpl>>(unlike_model(5));
  torch::load(other, file);
  CHECK(torch::equal(other->parameters()[0], shared->parameters()[0]));

  Sequential frozen = unlike_model();
  for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { DistributedDataParallel wrong(frozen); }),
                 "requires a gradient"));
  CHECK(contains(error_of<hvd::InvalidArgument>(
                     [&] { DistributedDataParallel wrong(net, {.gradient_predivide_factor = 0}); }),
                 "predivide"));
  if (hvd::size() > 1) {
    Sequential own(Linear(6, last() ? 4 : 3));
    CHECK(
        contains(error_of<hvd::Mismatch>([&] { DistributedDataParallel wrong(own); }), "0.weight"));
  }
}

TEST_CASE(
    "DistributedDataParallel and DistributedOptimizer: not around the same parameter, which would "
    "be reduced twice") {
  using hvd::DistributedOptimizer;
  Sequential net = unlike_model();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  const auto refused = [](const auto& make) { return error_of<hvd::InvalidArgument>(make); };
  const auto check = [&] {  // the parameters are as free as ever
    Sequential alone = unlike_model();
    DistributedOptimizer optimizer(sgd, net->named_parameters());
    optimizer.zero_grad();
    loss(*net, hvd::rank(), 0).backward();
    optimizer.synchronize();
    global_loss(alone, 0).backward();
    CHECK(gradients_differ(net->parameters(), alone->parameters()) < 1e-12);
  };
  {
    DistributedDataParallel ddp(net);
    for (int attempt = 0; attempt < 2; ++attempt) {
      const std::string text =
          refused([&] { DistributedOptimizer twice(sgd, net->named_parameters()); });
      CAPTURE(text);
      CHECK(contains(text, "'0.weight'"));
      CHECK(contains(text, "DistributedDataParallel"));
    }
    torch::optim::SGD of_last(net[2]->parameters(), 0.1);  // one of two layers
    CHECK(
        contains(refused([&] { DistributedOptimizer twice(of_last, net[2]->named_parameters()); }),
                 "'weight'"));
    CHECK(contains(refused([&] { DistributedOptimizer twice(of_last); }), "'parameter.0.0'"));
    Sequential alone = unlike_model();  // and it reduces as before
    loss(ddp, hvd::rank(), 0).backward();
    global_loss(alone, 0).backward();
    CHECK(gradients_differ(net->parameters(), alone->parameters()) < 1e-12);
  }
  check();
  {
    DistributedOptimizer optimizer(sgd, net->named_parameters());
    const std::string text = refused([&] { DistributedDataParallel twice(net); });
    CAPTURE(text);
    CHECK(contains(text, "'0.weight'"));
    CHECK(contains(text, "DistributedOptimizer"));
    // as one that takes the first one's place
    const auto again = std::make_unique<DistributedOptimizer>(sgd, net->named_parameters());
    CHECK(contains(refused([&] { DistributedDataParallel twice(net); }), "'0.weight'"));
  }
  DistributedDataParallel<torch::nn::SequentialImpl>(net).zero_grad();
  check();

  // What the wrapper leaves alone is free: other parameters, and those that were frozen when it was
  // made.
  net[2]->as<Linear>()->weight.set_requires_grad(false);
  net[2]->as<Linear>()->bias.set_requires_grad(false);
  const DistributedDataParallel of_first(net);
  net[2]->as<Linear>()->weight.set_requires_grad(true);
  net[2]->as<Linear>()->bias.set_requires_grad(true);
  torch::optim::SGD of_last(net[2]->parameters(), 0.1);
  DistributedOptimizer optimizer(of_last, net[2]->named_parameters());
  Sequential other = unlike_model();
  torch::optim::SGD of_other(other->parameters(), 0.1);
  DistributedOptimizer apart(of_other, other->named_parameters());
  loss(*other, hvd::rank(), 1).backward();
  apart.step();
}

TEST_CASE(
    "DistributedDataParallel: a rank outside of the process set trains by itself, as the module "
    "does") {
  const auto set = hvd::add_process_set(hvd::size() > 2 ? std::vector<int>{1, hvd::size() - 1}
                                                        : std::vector<int>{0});
  const bool outside = !set.included();
  const auto norm = [] { return torch::nn::BatchNorm1d(3); };
  Sequential net = unlike_model(hvd::rank()), alone = unlike_model(hvd::rank());
  for (auto* each : {&net, &alone}) (*each)->push_back(norm());
  for (auto* each : {&net, &alone}) (*each)->to(kDouble);
  DistributedDataParallel ddp(net, {.process_set = set});
  torch::optim::SGD sgd(net->parameters(), 0.1), plain(alone->parameters(), 0.1);
  hvd::GradScaler scaler({.init_scale = 1});  // asks those that step together
  const auto step = [&](int number, bool local) {
    sgd.zero_grad();
    plain.zero_grad();
    if (local) {
      const auto guard = ddp.no_sync();
      loss(ddp, hvd::rank(), number).backward();
      loss(*alone, hvd::rank(), number).backward();
    }
    const bool scaled = number < 3;
    const at::Tensor last = loss(ddp, hvd::rank(), number + 1);
    (scaled ? scaler.scale(last) : last).backward();
    loss(*alone, hvd::rank(), number + 1).backward();
    if (outside) CHECK(gradients_differ(net->parameters(), alone->parameters()) == 0);
    if (scaled) {
      scaler.step(sgd);
      scaler.update();
    } else {
      sgd.step();
    }
    plain.step();
  };
  for (int number = 0; number < 3; ++number) step(number, number == 1);
  if (outside) ddp.set_weight(2);
  {
    const auto guard = ddp.join({.optimizer = &sgd});
    for (int number = 3; number < 4 + hvd::rank(); ++number) step(number, false);
  }
  hvd::remove_process_set(set);
  if (!outside) return;
  step(9, true);
  for (std::size_t i = 0; i < net->buffers().size(); ++i)
    CHECK(same(net->buffers()[i], alone->buffers()[i]));
  ddp.eval();
  alone->eval();
  CHECK(same(ddp.forward(input(0, 0)), alone->forward(input(0, 0))));
}

TEST_CASE(
    "DistributedDataParallel: in a set of its own, with predivision, 16 bits and sparse "
    "gradients") {
  const std::vector<int> ranks =
      hvd::size() > 2 ? std::vector<int>{1, hvd::size() - 1} : everyone();
  const auto set = hvd::add_process_set(ranks);
  if (set.included()) {
    for (const bool narrow : {false, true}) {
      Sequential net = unlike_model(hvd::rank());
      Sequential alone = unlike_model(ranks.front());
      DistributedDataParallel ddp(
          net, {.compression = narrow ? hvd::Compression::bf16() : hvd::Compression::none(),
                .gradient_predivide_factor = 4,
                .process_set = set});
      loss(ddp, hvd::rank(), 0).backward();
      at::Tensor sum = torch::zeros({}, kDouble);
      for (const int rank : ranks) sum = sum + loss(*alone, rank, 0);
      (sum / static_cast<double>(ranks.size())).backward();
      const double worst = gradients_differ(net->parameters(), alone->parameters());
      CHECK(worst < (narrow ? 2e-2 : 1e-12));
      if (narrow) CHECK(worst > 0);
    }
  }
  hvd::remove_process_set(set);

  for (const bool dense : {false, true}) {
    torch::manual_seed(1);
    const auto made = [] {
      return torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 3).sparse(true));
    };
    auto table = made();
    table->to(kDouble);
    DistributedDataParallel ddp(table, {.sparse_as_dense = dense});
    auto alone = made();
    alone->to(kDouble);
    const auto words = [](int rank) { return torch::tensor({rank, rank + 1, 0}, at::kLong); };
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad();
      alone->zero_grad();
      ddp.forward(words(hvd::rank())).sum().backward();
      at::Tensor sum = torch::zeros({}, kDouble);
      for (const int rank : everyone()) sum = sum + alone->forward(words(rank)).sum();
      (sum / hvd::size()).backward();
      CHECK(table->weight.grad().is_sparse() == !dense);
      const at::Tensor gradient = dense ? table->weight.grad() : table->weight.grad().to_dense();
      CHECK(difference(gradient, alone->weight.grad().to_dense()) < 1e-12);
    }
  }
}

TEST_CASE(
    "DistributedDataParallel: a backward pass that fails on one rank is a Mismatch on the others, "
    "and all go on") {
  Sequential net = unlike_model();
  Sequential alone = unlike_model();
  DistributedDataParallel ddp(net);
  // The last rank fails in the middle of backward; the others hear of it with its next forward.
  const at::Tensor value = loss(ddp, hvd::rank(), 0);
  if (last()) {
    auto handle =
        net[0]->as<Linear>()->weight.register_hook([](const at::Tensor& gradient) -> at::Tensor {
          throw std::runtime_error("the user's");
          return gradient;
        });
    CHECK(contains(error_of<std::runtime_error>([&] { value.backward(); }), "the user's"));
    net[0]->as<Linear>()->weight.remove_hook(handle);
  } else {
    CHECK(contains(error_of<hvd::Mismatch>([&] { value.backward(); }),
                   "has left a backward pass by an exception"));
  }
  for (int step = 1; step < 3; ++step) {
    const at::Tensor again = loss(ddp, hvd::rank(), step);
    net->zero_grad();
    alone->zero_grad();
    again.backward();
    global_loss(alone, step).backward();
    CHECK(gradients_differ(net->parameters(), alone->parameters()) < 1e-12);
  }
}

TEST_CASE("DistributedDataParallel with GradScaler: an overflow on one rank") {
  Sequential net = unlike_model();
  Sequential alone = unlike_model();
  DistributedDataParallel ddp(net);
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  torch::optim::SGD reference(alone->parameters(), 0.1);
  hvd::GradScaler scaler({.init_scale = 64});
  for (int step = 0; step < 4; ++step) {
    const bool bad = step == 1;
    optimizer.zero_grad();
    alone->zero_grad();
    at::Tensor value = loss(ddp, hvd::rank(), step);
    if (bad && last()) value = value * std::numeric_limits<double>::infinity();
    scaler.scale(value).backward();
    global_loss(alone, step).backward();
    if (!bad) reference.step();
    scaler.step(optimizer);
    scaler.update();
    CHECK(difference(net->parameters()[0], alone->parameters()[0]) < 1e-12);
  }
  CHECK(scaler.get_scale() == 32);
}

}  // namespace
