// What ranks should have alike is compared while they train: whatever makes one of them drift is
// told on all, with its name.
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/torch_bindings/support.h"
#include "tests/torch_bindings/wrapped_optimizers.h"

namespace {

using namespace hvd::test;
using hvd::Config, hvd::DistributedOptimizer, hvd::DistributedOptimizerOptions, hvd::Mismatch,
    hvd::ReduceOp, hvd::ReplicaGuard;
using torch::nn::Sequential;

/// Three slices of parameters, and small ones.
Sequential wide_model() {
  torch::manual_seed(7);
  return Sequential(torch::nn::Linear(40, 2000), torch::nn::ReLU(), torch::nn::Linear(2000, 45),
                    torch::nn::Linear(45, 3));
}
constexpr int kSlices = 3;

void back(Sequential& net, int step) {
  const auto in = net->parameters().front().size(1);
  net->forward(data({4, in}, at::kFloat, hvd::rank(), step)).square().mean().backward();
}
void train(Sequential& net, DistributedOptimizer& optimizer, int steps, int from = 0) {
  for (int step = from; step < from + steps; ++step) {
    optimizer.zero_grad();
    back(net, step);
    optimizer.step();
  }
}
torch::optim::SGD sgd(const Sequential& net) {
  return torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.5));
}
/// Whether the text names the last rank as the one that differs; of two ranks both do.
bool names_last(const std::string& text) {
  return contains(text, hvd::size() == 2 ? "rank 0 and rank 1 differ"
                                         : last_rank() + " differs from the others");
}
/// Flips the lowest bit, as nobody sees.
void flip(const at::Tensor& tensor, std::int64_t element) {
  auto* const bytes = static_cast<unsigned char*>(tensor.data_ptr()) +
                      element * static_cast<std::int64_t>(tensor.element_size());
  bytes[0] ^= 1;
}

/// How many steps it takes until all ranks are told, and what. Every rank makes the same steps.
std::pair<int, std::string> told_within(Sequential& net, DistributedOptimizer& optimizer,
                                        int most) {
  for (int step = 0; step < most; ++step) {
    const std::string text = error_of<Mismatch>([&] { train(net, optimizer, 1, step); });
    if (text != "(no error)") return {step + 1, text};
  }
  return {most + 1, "(no error)"};
}

TEST_CASE(
    "replicas: who forgets broadcast_parameters is told at the first step, on all ranks, and may "
    "mend it") {
  if (hvd::size() == 1) return;
  for (const bool sharded : {false, true}) {
    CAPTURE(sharded);
    Sequential net = small_model(at::kFloat);
    {
      const torch::NoGradGuard no_gradient;
      if (last()) net->parameters()[2].add_(1);
    }
    auto plain = sgd(net);
    DistributedOptimizer optimizer(plain, net->named_parameters(),
                                   {.shard_optimizer_state = sharded});
    const at::Tensor before = flat(net).clone();
    const std::string text = error_of<Mismatch>([&] { train(net, optimizer, 1); });
    CAPTURE(text);
    CHECK(contains(text, "step 1: parameters are not equal"));
    CHECK(contains(text, "parameter '2.weight' is float32 [3, 8] with digest"));
    CHECK(names_last(text));
    CHECK_FALSE(contains(text, "0.weight"));
    CHECK(same(flat(net), before));
    hvd::broadcast_parameters(*net, 0);
    train(net, optimizer, 3);
    CHECK(same_on_all_ranks(flat(net)));
  }
}

TEST_CASE(
    "replicas: one bit of one rank's parameter is told within a turn of the slices, and named, "
    "whenever it flips") {
  if (hvd::size() == 1) return;
  std::mt19937 random(11);
  for (int round = 0; round < 10; ++round) {
    Sequential net = wide_model();
    auto plain = sgd(net);
    DistributedOptimizer optimizer(plain, net->named_parameters());
    const auto all = net->named_parameters().pairs();
    const std::size_t place = random() % all.size();
    const auto& [name, parameter] = all[place];
    const auto& [next_name, next] = all[(place + all.size() / 2) % all.size()];
    const auto element =
        static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(parameter.numel()));
    const int steps = round == 9 ? 500 : static_cast<int>(random() % 7);
    const int culprit = static_cast<int>(random() % static_cast<unsigned>(hvd::size()));
    CAPTURE(name);
    CAPTURE(element);
    CAPTURE(steps);
    if (round == 9) {  // quick steps
      for (auto& group : optimizer.param_groups()) group.options().set_lr(0);
    }
    train(net, optimizer, steps);
    if (hvd::rank() == culprit) flip(parameter, element);
    const auto [after, text] = told_within(net, optimizer, kSlices);
    CAPTURE(text);
    CHECK(after <= kSlices);
    CHECK(contains(text, "parameter '" + name + "'"));
    CHECK(contains(text, "step " + std::to_string(steps + after)));
    if (hvd::size() > 2)
      CHECK(contains(text, "rank " + std::to_string(culprit) + " differs from the others"));
    CHECK(contains(error_of<Mismatch>([&] { optimizer.check_replicas(); }),
                   "parameter '" + name + "'"));
    // at once: all are compared
    CHECK(contains(error_of<Mismatch>([&] { train(net, optimizer, 1); }),
                   "parameter '" + name + "'"));
    if (hvd::rank() == culprit) {
      flip(parameter, element);
      flip(next, 0);
    }
    CHECK(contains(error_of<Mismatch>([&] { train(net, optimizer, 1); }),
                   "parameter '" + next_name + "'"));
  }
}

TEST_CASE("replicas: an option that one rank has changed is told at its next step, by name") {
  if (hvd::size() == 1) return;
  using torch::optim::AdamOptions, torch::optim::SGDOptions;
  Sequential net = small_model(at::kFloat);
  torch::optim::Adam plain(net[0]->as<torch::nn::Linear>()->parameters(), AdamOptions(0.01));
  DistributedOptimizer optimizer(plain, net->named_parameters());
  optimizer.add_param_group(
      torch::optim::OptimizerParamGroup(net[2]->as<torch::nn::Linear>()->parameters()));
  train(net, optimizer, 2);
  const auto try_it = [&](const std::string& expected, const std::function<void()>& change,
                          const std::function<void()>& put_back) {
    if (last()) change();
    const at::Tensor before = flat(net).clone();
    const std::string text = error_of<Mismatch>([&] { train(net, optimizer, 1); });
    CAPTURE(text);
    CHECK(contains(text, "options are not equal"));
    CHECK(contains(text, expected));
    CHECK(names_last(text));
    CHECK(same(flat(net), before));
    if (last()) put_back();
    train(net, optimizer, 1);
  };
  auto& mine = static_cast<AdamOptions&>(optimizer.param_groups()[1].options());
  auto& theirs = static_cast<AdamOptions&>(plain.param_groups()[0].options());
  try_it(
      "option lr of group 1 is 0.02", [&] { mine.lr(0.02); }, [&] { mine.lr(0.01); });
  try_it(
      "option betas of group 1 is (0.8, 0.999)",
      [&] {
        mine.betas({0.8, 0.999});
      },
      [&] {
        mine.betas({0.9, 0.999});
      });
  try_it(
      "option weight_decay of group 0 is 0.5", [&] { theirs.weight_decay(0.5); },
      [&] { theirs.weight_decay(0); });
  try_it(
      "option amsgrad of group 0 is true", [&] { theirs.amsgrad(true); },
      [&] { theirs.amsgrad(false); });
  CHECK(same_on_all_ranks(flat(net)));
}

TEST_CASE(
    "replicas: ranks that register parameters in another order are told, and no gradient meets "
    "another's") {
  if (hvd::size() == 1) return;
  for (const bool ddp : {false, true}) {
    CAPTURE(ddp);
    struct OwnNet : torch::nn::Module {
      explicit OwnNet(bool turned) {
        const auto first = torch::ones({4}), second = torch::ones({4});
        a = register_parameter(turned ? "b" : "a", first);
        b = register_parameter(turned ? "a" : "b", second);
      }
      at::Tensor forward(const at::Tensor& x) { return (a * x + b).sum(); }
      at::Tensor a, b;
    };
    const auto net = std::make_shared<OwnNet>(last());
    torch::optim::SGD plain(net->parameters(), 0.1);
    std::string text;
    if (ddp) {
      text = error_of<Mismatch>([&] {
        hvd::DistributedDataParallel<OwnNet> wrapped(net);
        wrapped.forward(torch::ones({4})).backward();
        plain.step();
      });
    } else {
      DistributedOptimizer optimizer(plain, net->named_parameters());
      text = error_of<Mismatch>([&] {
        net->forward(torch::ones({4})).backward();
        optimizer.step();
      });
      CHECK(contains(text, "parameters are not the same ones"));
      CHECK(contains(text, "parameter 'a' is number 1 of 2"));
      CHECK(names_last(text));
    }
    CAPTURE(text);
    CHECK(contains(text, "parameter 'a'"));
    for (const auto& parameter : net->parameters())
      CHECK(same(parameter.detach(), torch::ones({4})));
  }
}

TEST_CASE(
    "replicas: gradients written through a raw pointer, weights that a rank rescales by itself, a "
    "rate by a rank's own metric") {
  if (hvd::size() == 1) return;
  SUBCASE("a gradient after synchronize()") {
    Sequential net = small_model(at::kFloat);
    auto plain = sgd(net);
    DistributedOptimizer optimizer(plain, net->named_parameters());
    train(net, optimizer, 1);
    optimizer.zero_grad();
    back(net, 1);
    optimizer.synchronize();
    if (last()) net->parameters()[1].grad().data_ptr<float>()[0] += 1;
    optimizer.step();
    const auto [after, text] = told_within(net, optimizer, 1);
    CHECK(contains(text, "parameter '0.bias'"));
    CHECK(names_last(text));
  }
  SUBCASE("Embedding with max_norm") {
    torch::manual_seed(3);
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(10, 4).max_norm(0.1));
    torch::optim::SGD plain(table->parameters(), 0.1);
    DistributedOptimizer optimizer(plain, table->named_parameters());
    const std::string text = error_of<Mismatch>([&] {
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        table->forward(torch::full({1}, hvd::rank(), at::kLong)).sum().backward();
        optimizer.step();
      }
    });
    CHECK(contains(text, "parameter 'weight'"));
  }
  SUBCASE("ReduceLROnPlateau") {
    Sequential net = small_model(at::kFloat);
    auto plain = sgd(net);
    DistributedOptimizer optimizer(plain, net->named_parameters());
    torch::optim::ReduceLROnPlateauScheduler scheduler(
        optimizer, torch::optim::ReduceLROnPlateauScheduler::min, 0.1F, 0);
    const std::string text = error_of<Mismatch>([&] {
      for (int step = 0; step < 4; ++step) {
        train(net, optimizer, 1, step);
        scheduler.step(last() ? static_cast<float>(step) : -static_cast<float>(step));
      }
    });
    CAPTURE(text);
    CHECK(contains(text, "option lr of group 0"));
    CHECK(names_last(text));
  }
}

TEST_CASE("replicas: with Adasum, in a DistributedDataParallel, and in a process set") {
  if (hvd::size() == 1) return;
  Sequential net = small_model(at::kFloat);
  auto plain = sgd(net);
  SUBCASE("Adasum") {
    DistributedOptimizer optimizer(plain, net->named_parameters(), {.op = ReduceOp::Adasum});
    train(net, optimizer, 2);
    const at::Tensor before = flat(net).clone();
    if (last()) flip(net->parameters()[3], 1);
    const auto [after, text] = told_within(net, optimizer, 1);
    CHECK(contains(text, "parameter '2.bias'"));
    CHECK(contains(text, "step 3"));
    if (!last()) CHECK(same(flat(net), before));
    CHECK(contains(error_of<Mismatch>([&] { optimizer.check_replicas(); }), "parameter '2.bias'"));
    hvd::broadcast_parameters(*net, 0);
    train(net, optimizer, 2);
    optimizer.check_replicas();
  }
  SUBCASE("DistributedDataParallel") {
    hvd::DistributedDataParallel ddp(net);
    const auto step = [&](int number) {
      plain.zero_grad();
      ddp.forward(data({4, 6}, at::kFloat, hvd::rank(), number)).square().mean().backward();
      plain.step();
    };
    for (int number = 0; number < 3; ++number) step(number);
    if (last()) flip(net->parameters()[2], 5);
    const std::string text = error_of<Mismatch>([&] { step(3); });
    CHECK(contains(text, "parameter '2.weight'"));
    CHECK(names_last(text));
  }
  SUBCASE("a process set: who is outside of it may have other parameters") {
    std::vector<int> members;
    for (int rank = 0; rank + 1 < hvd::size(); ++rank) members.push_back(rank);
    const auto set = hvd::add_process_set(members);
    if (last()) flip(net->parameters()[2], 5);
    DistributedOptimizer optimizer(plain, net->named_parameters(), {.process_set = set});
    train(net, optimizer, 2);
    if (set.included()) {
      optimizer.check_replicas();
      if (members.size() > 1) {
        if (hvd::rank() == members.back()) flip(net->parameters()[0], 0);
        CHECK(contains(told_within(net, optimizer, 1).second, "parameter '0.weight'"));
      }
    }
    hvd::remove_process_set(set);
  }
}

TEST_CASE(
    "replicas: a constant buffer of a DistributedDataParallel that one rank has changed behind its "
    "version counter is told") {
  if (hvd::size() == 1) return;
  struct Masked : torch::nn::Module {
    Masked() : linear(register_module("linear", torch::nn::Linear(4, 4))) {
      mask = register_buffer("mask", torch::ones({200'000}));
    }
    at::Tensor forward(const at::Tensor& x) { return linear->forward(x) * mask.narrow(0, 0, 4); }
    torch::nn::Linear linear;
    at::Tensor mask;
  };
  const auto net = std::make_shared<Masked>();
  hvd::DistributedDataParallel<Masked> ddp(net);
  torch::optim::SGD plain(net->parameters(), 0.1);
  const auto step = [&] {
    plain.zero_grad();
    ddp.forward(data({4, 4}, at::kFloat, hvd::rank())).square().mean().backward();
    plain.step();
  };
  for (int number = 0; number < 3; ++number) step();
  if (last()) flip(net->mask, 150'000);
  const std::string text = error_of<Mismatch>([&] {
    for (int number = 0; number < 4; ++number) step();  // 800 KB are four slices
  });
  CAPTURE(text);
  CHECK(contains(text, "buffer 'mask'"));
  CHECK(names_last(text));
}

TEST_CASE(
    "replicas: HVD_REPLICA_GUARD: full compares all each time, off nothing, and check_replicas() "
    "always works") {
  if (hvd::size() == 1) return;
  for (const auto mode : {ReplicaGuard::Full, ReplicaGuard::Off}) {
    Config config = Config::from_environment();
    config.replica_guard = mode;
    const Restarted restarted(config);
    Sequential net = wide_model();
    auto plain = sgd(net);
    DistributedOptimizer optimizer(plain, net->named_parameters());
    train(net, optimizer, 2);
    if (last()) flip(net->parameters()[2], 40'000);
    if (mode == ReplicaGuard::Full) {
      CHECK(contains(told_within(net, optimizer, 1).second, "parameter '2.weight'"));
    } else {
      train(net, optimizer, kSlices + 1);
    }
    CHECK(
        contains(error_of<Mismatch>([&] { optimizer.check_replicas(); }), "parameter '2.weight'"));
  }
}

TEST_CASE(
    "replicas: ranks that end early in a join() count as absent; those that train on are "
    "compared") {
  if (hvd::size() < 3) return;
  Sequential net = wide_model();
  auto plain = sgd(net);
  DistributedOptimizer optimizer(plain, net->named_parameters());
  {
    const auto guard = optimizer.join();
    train(net, optimizer, hvd::rank() == 0 ? 2 : 12);
  }
  optimizer.check_replicas();
  train(net, optimizer, kSlices + 1);
  CHECK(same_on_all_ranks(flat(net)));
}

TEST_CASE("replicas: a step that one rank alone was refused leaves no false alarm behind") {
  if (hvd::size() == 1) return;
  Sequential net = wide_model();
  auto plain = sgd(net);
  DistributedOptimizer optimizer(plain, net->named_parameters());
  train(net, optimizer, 2);
  optimizer.zero_grad();
  back(net, 2);
  if (last()) {
    net->parameters()[0].mutable_grad().mul_(2);  // on its way
    CHECK_THROWS_AS(optimizer.step(), hvd::InvalidArgument);
    optimizer.zero_grad();
  } else {
    optimizer.synchronize();
    optimizer.zero_grad();
  }
  train(net, optimizer, 2 * kSlices, 3);
  optimizer.check_replicas();
  CHECK(same_on_all_ranks(flat(net)));
}

/// Steps of each kind of training; HVD_TEST_STEPS makes it as many.
int many_steps() {
  const char* const said = std::getenv("HVD_TEST_STEPS");
  return said == nullptr ? 60 : std::atoi(said);
}

TEST_CASE(
    "replicas: no kind of training gives a false alarm, with all values compared in each round" *
    doctest::timeout(many_steps() > 1000 ? 3600 : 120)) {
  Config config = Config::from_environment();
  config.replica_guard = ReplicaGuard::Full;
  const Restarted restarted(config);
  using hvd::Compression;
  std::vector<std::pair<std::string, DistributedOptimizerOptions>> kinds;
  kinds.emplace_back("plain", DistributedOptimizerOptions{});
  kinds.emplace_back("sum", DistributedOptimizerOptions{.op = ReduceOp::Sum});
  kinds.emplace_back("Adasum", DistributedOptimizerOptions{.op = ReduceOp::Adasum});
  kinds.emplace_back("accumulation", DistributedOptimizerOptions{.backward_passes_per_step = 2});
  kinds.emplace_back("groups", DistributedOptimizerOptions{.groups = 3});
  kinds.emplace_back("sharded", DistributedOptimizerOptions{.shard_optimizer_state = true});
  kinds.emplace_back("sharded gradients", DistributedOptimizerOptions{.shard_gradients = true});
  kinds.emplace_back("one copy", DistributedOptimizerOptions{.share_parameters = true});
  kinds.emplace_back("fp16", DistributedOptimizerOptions{.compression = Compression::fp16()});
  kinds.emplace_back("int8", DistributedOptimizerOptions{.compression = Compression::int8()});
  kinds.emplace_back("topk", DistributedOptimizerOptions{.compression = Compression::topk(0.1)});
  kinds.emplace_back("powersgd",
                     DistributedOptimizerOptions{.compression = Compression::powersgd(2)});
  for (const auto& [name, options] : kinds) {
    for (const std::string variant : {"SGD", "Adam", "16-bit weights", "SyncBatchNorm"}) {
      if (variant == "16-bit weights" && options.op == ReduceOp::Adasum) continue;
      CAPTURE(name);
      CAPTURE(variant);
      const auto type = variant == "16-bit weights" ? at::kBFloat16 : at::kFloat;
      torch::manual_seed(5);
      Sequential net(torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, 3));
      if (variant == "SyncBatchNorm") {
        Sequential normed(torch::nn::Linear(6, 8), hvd::SyncBatchNorm(8), torch::nn::ReLU(),
                          torch::nn::Linear(8, 3));
        net = normed;
      }
      net->to(type);
      std::unique_ptr<torch::optim::Optimizer> plain;
      if (variant == "Adam") {
        plain = std::make_unique<torch::optim::Adam>(net->parameters(),
                                                     torch::optim::AdamOptions(1e-3));
      } else {
        plain = wrapped::sgd(net->parameters(), 1e-3);
      }
      std::optional<hvd::MasterWeights> masters;
      if (variant == "16-bit weights") masters.emplace(*plain);
      torch::optim::Optimizer& inner =
          masters ? static_cast<torch::optim::Optimizer&>(*masters) : *plain;
      DistributedOptimizer optimizer(inner, net->named_parameters(), options);
      for (int step = 0; step < many_steps(); ++step) {
        if (step % 10 == 9) {  // as schedules do
          for (auto& group : optimizer.param_groups())
            group.options().set_lr(group.options().get_lr() * 0.999);
        }
        optimizer.zero_grad();
        for (int pass = 0; pass < options.backward_passes_per_step; ++pass)
          net->forward(data({4, 6}, at::kFloat, hvd::rank(), step + pass).to(type))
              .square()
              .mean()
              .backward();
        optimizer.step();
      }
      optimizer.check_replicas();
    }
  }
}

}  // namespace
