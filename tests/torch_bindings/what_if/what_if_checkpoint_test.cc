// What happens if I ... : checkpoints.
#include <filesystem>
#include <fstream>

#include "tests/torch_bindings/own_optimizer.h"
#include "tests/torch_bindings/shared_folder.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;
using hvd::Checkpoint;
using hvd::CheckpointError;

template <class Net>
void steps_of(Net& net, torch::optim::Optimizer& optimizer, int steps, int variant = 0) {
  for (int step = 0; step < steps; ++step) {
    optimizer.step([&] {
      optimizer.zero_grad();
      const at::Tensor loss = net->forward(data({4, 3}, kFloat, 0, step + variant)).square().sum();
      loss.backward();
      return loss;
    });
  }
}

template <class Net>
std::vector<at::Tensor> copies_of(const Net& net) {
  std::vector<at::Tensor> copies;
  for (const auto& parameter : net->parameters()) copies.push_back(parameter.detach().clone());
  return copies;
}
bool same_all(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

/// A run of two parts gives what an unbroken one gives.
template <class Net, class MakeNet, class MakeOptimizer>
void goes_on(MakeNet make_net, MakeOptimizer make_optimizer, int steps_before_load = 0) {
  const SharedFolder folder;
  Net net = make_net();
  auto optimizer = make_optimizer(net->parameters());
  steps_of(net, optimizer, 3);
  Checkpoint(folder.file()).save(net, optimizer, 3);
  steps_of(net, optimizer, 3, 7);
  Net resumed = make_net();
  auto again = make_optimizer(resumed->parameters());
  steps_of(resumed, again, steps_before_load, 20);
  CHECK(Checkpoint(folder.file()).load(resumed, again) == 3);
  CHECK(again.param_groups()[0].params().size() == optimizer.param_groups()[0].params().size());
  steps_of(resumed, again, 3, 7);
  CHECK(same_all(copies_of(net), copies_of(resumed)));
}

TEST_CASE("what happens if I save a model with tied weights: it goes on as if it had not stopped") {
  const auto tied = [] { return Tied(); };
  for (const int before : {0, 2}) {
    goes_on<Tied>(
        tied,
        [](auto p) { return torch::optim::Adam(std::move(p), torch::optim::AdamOptions(0.01)); },
        before);
    goes_on<Tied>(
        tied,
        [](auto p) {
          return torch::optim::SGD(std::move(p), torch::optim::SGDOptions(0.01).momentum(0.9));
        },
        before);
    goes_on<Tied>(
        tied,
        [](auto p) {
          return torch::optim::LBFGS(std::move(p), torch::optim::LBFGSOptions(0.1).max_iter(3));
        },
        before);
  }
  goes_on<Tied>(
      tied, [](auto p) { return OwnOptimizer<Overrides{.save = true}>(std::move(p), 0.01, 0.9); });
}

TEST_CASE(
    "what happens if the model in the file is tied and mine is not, or the other way: refused on "
    "all ranks, or equal") {
  const SharedFolder folder;
  const Checkpoint checkpoint(folder.file());
  Tied tied, untied(false);
  torch::optim::SGD of_tied(tied->parameters(), 0.1), of_untied(untied->parameters(), 0.1);
  const auto before = copies_of(untied);
  checkpoint.save(tied, of_tied, 1);
  CHECK(contains(error_of<CheckpointError>([&] { checkpoint.load(untied, of_untied); }),
                 "different size"));
  CHECK(same_all(copies_of(untied), before));
  // as many parameters as the tied one has
  torch::optim::SGD two({untied->weight, untied->bias}, 0.1);
  CHECK(checkpoint.load(untied, two) == 1);
  CHECK(same(untied->second.detach(), tied->second.detach()));

  Tied other(false);
  torch::optim::SGD of_other({other->weight, other->bias}, 0.1);
  checkpoint.save(other, of_other, 2);
  const auto kept = copies_of(tied);
  CHECK(contains(error_of<CheckpointError>([&] { checkpoint.load(tied, of_tied); }),
                 "'first' and 'second' are one tensor in the model"));
  CHECK(same_all(copies_of(tied), kept));
  checkpoint.save(untied, two, 3);  // equal values
  CHECK(checkpoint.load(tied, of_tied) == 3);
}

TEST_CASE(
    "what happens if my own optimizer overrides neither save nor load: saved in parts, loaded "
    "where it has a state to copy") {
  const auto linear = [] {
    torch::nn::Linear net(3, 2);
    hvd::broadcast_parameters(net, 0);
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : net->parameters()) parameter.copy_(data(parameter.sizes(), kFloat, 0));
    return net;
  };
  const auto make = []<Overrides kHas>() {
    return [](auto p) { return OwnOptimizer<kHas>(std::move(p), 0.01, 0.9); };
  };
  using Net = torch::nn::Linear;
  goes_on<Net>(linear, make.template operator()<Overrides{}>(), 2);
  goes_on<Net>(linear, make.template operator()<Overrides{.rate = false}>(), 1);
  goes_on<Net>(linear, make.template operator()<Overrides{.save = true}>(), 0);
  goes_on<Net>(
      linear,
      make.template
      operator()<Overrides{.rate = false, .options = false, .state = false, .save = true}>(),
      0);

  const SharedFolder folder;
  const Checkpoint checkpoint(folder.file());
  Net net = linear();
  OwnOptimizer<Overrides{}> optimizer(net->parameters(), 0.25, 0.5);
  steps_of(net, optimizer, 2);
  checkpoint.save(net, optimizer, 2);
  {
    Net fresh = linear();
    const auto before = copies_of(fresh);
    OwnOptimizer<Overrides{}> other(fresh->parameters(), 0.125, 0.25);
    CHECK(contains(error_of<CheckpointError>([&] { checkpoint.load(fresh, other); }),
                   "let it take a step on every rank before"));
    CHECK(same_all(copies_of(fresh), before));
    CHECK(other.options().rate == 0.125);
    steps_of(fresh, other, 1);
    CHECK(checkpoint.load(fresh, other) == 2);
    CHECK(other.options().rate == 0.25);
    CHECK(other.options().decay == 0.5);
    other.options().rate = 0.125;
    CHECK(Checkpoint(folder.file(), {.load_options = false}).load(fresh, other) == 2);
    CHECK(other.options().rate == 0.125);
    CHECK(other.steps() == 2);
  }
  OwnOptimizer<Overrides{.state = false}> lost(net->parameters(), 0.1, 0.5);
  steps_of(net, lost, 1);
  CHECK(contains(error_of<CheckpointError>([&] { checkpoint.save(net, lost, 3); }),
                 "cannot be serialized"));
  CHECK(Checkpoint(folder.file()).load(net, optimizer) == 2);  // the old file is there
  OwnOptimizer<Overrides{.rate = false, .options = false}> plain(net->parameters(), 0.1, 0.5);
  checkpoint.save(net, plain, 4);  // it has no state
  CHECK(contains(error_of<CheckpointError>([&] { checkpoint.load(net, plain); }),
                 "load_options = false"));
  CHECK(Checkpoint(folder.file(), {.load_options = false}).load(net, plain) == 4);
}

TEST_CASE(
    "what happens if I save an optimizer of my own that is sharded: whole, where it overrides save "
    "and load, and its state the rest") {
  with_and_without_one_copy();
  const SharedFolder folder;
  const Checkpoint checkpoint(folder.file());
  using Mine = OwnOptimizer<Overrides{.save = true}>;
  const auto run = [](torch::optim::Optimizer& optimizer, torch::nn::Sequential& net, int begin,
                      int end) {
    for (int step = begin; step < end; ++step) {
      optimizer.zero_grad();
      small_loss(net, hvd::rank(), step).backward();
      optimizer.step();
    }
  };
  const auto options = [](bool shard) {
    return hvd::DistributedOptimizerOptions{.shard_optimizer_state = shard,
                                            .share_parameters = shard && one_copy};
  };
  auto net = small_model(), alone = small_model();
  Mine inner(net->parameters(), 0.01, 0.9), inner_alone(alone->parameters(), 0.01, 0.9);
  hvd::DistributedOptimizer optimizer(inner, net->named_parameters(), options(true)),
      whole(inner_alone, alone->named_parameters(), options(false));
  run(optimizer, net, 0, 3);
  run(whole, alone, 0, 3);
  checkpoint.save(net, optimizer, 3);
  run(optimizer, net, 3, 5);
  run(whole, alone, 3, 5);
  CHECK(same_all(copies_of(net), copies_of(alone)));
  for (const bool shard : {true, false}) {
    auto resumed = small_model();
    Mine again(resumed->parameters(), 0.5, 0.5);
    hvd::DistributedOptimizer wrapper(again, resumed->named_parameters(), options(shard));
    CHECK(checkpoint.load(resumed, wrapper) == 3);
    run(wrapper, resumed, 3, 5);
    CHECK(same_all(copies_of(resumed), copies_of(alone)));
  }
  optimizer.unshard();
  run(optimizer, net, 5, 7);
  run(whole, alone, 5, 7);
  CHECK(same_all(copies_of(net), copies_of(alone)));
}

TEST_CASE(
    "what happens if I save an optimizer of my own that is sharded and lacks an override: refused "
    "on all ranks, and it goes on") {
  if (hvd::size() == 1) return;
  const SharedFolder folder;
  const auto refused = [&]<Overrides kHas>(const std::string& words) {
    CAPTURE(words);
    auto net = small_model(), alone = small_model();
    OwnOptimizer<kHas> inner(net->parameters(), 0.01, 0.9),
        inner_alone(alone->parameters(), 0.01, 0.9);
    hvd::DistributedOptimizer optimizer(inner, net->named_parameters(),
                                        {.shard_optimizer_state = true});
    hvd::DistributedOptimizer whole(inner_alone, alone->named_parameters());
    for (int step = 0; step < 3; ++step) {
      small_loss(net, hvd::rank(), step).backward();
      small_loss(alone, hvd::rank(), step).backward();
      optimizer.step();
      whole.step();
      optimizer.zero_grad();
      whole.zero_grad();
      CHECK(same_all(copies_of(net), copies_of(alone)));
      const std::string text =
          error_of<CheckpointError>([&] { Checkpoint(folder.file()).save(net, optimizer, 1); });
      INFO(text);
      CHECK(contains(text, words));
    }
  };
  refused.template operator()<Overrides{}>("overrides neither save nor load");
  refused.template operator()<Overrides{.state = false, .save = true}>(
      "serialize and clone of the states: ");
  refused.template operator()<Overrides{.save = true, .clone_state = false}>(
      "serialize and clone of the states: ");
  refused.template operator()<Overrides{.save = true, .reads_into = true}>(
      "tensors that copies share");
}

TEST_CASE(
    "what happens if only some ranks shard their optimizer: Mismatch on all, and the old file "
    "stays") {
  const SharedFolder folder;
  const Checkpoint checkpoint(folder.file());
  torch::nn::Linear net(3, 2);
  hvd::broadcast_parameters(net, 0);
  torch::optim::Adam adam(net->parameters());
  checkpoint.save(net, adam, 1);
  if (hvd::size() == 1) return;
  hvd::DistributedOptimizer optimizer(adam, net->named_parameters(),
                                      {.shard_optimizer_state = last()});
  CHECK(contains(error_of<hvd::Mismatch>([&] { checkpoint.save(net, optimizer, 2); }),
                 grouping("the optimizer is not sharded", "the optimizer is sharded")));
  torch::optim::Adam other(net->parameters());
  CHECK(checkpoint.load(net, other) == 1);
}

TEST_CASE(
    "what happens if my of_rank or my optimizer's save throws on one rank: its words on all, and "
    "the old file stays") {
  const SharedFolder folder;
  torch::nn::Linear net(3, 2);
  hvd::broadcast_parameters(net, 0);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  Checkpoint(folder.file()).save(net, sgd, 1);
  const auto before = copies_of(net);
  bool odd = false;
  const Checkpoint checkpoint(folder.file(), {.of_rank = [&odd]() -> std::vector<at::Tensor> {
                                if (last() && odd) throw 42;
                                if (last()) throw std::runtime_error("no memory of that");
                                return {};
                              }});
  const std::string who = "rank " + std::to_string(hvd::size() - 1) + ": ";
  CHECK(contains(error_of<CheckpointError>([&] { checkpoint.save(net, sgd, 2); }),
                 who + "no memory of that"));
  CHECK(contains(error_of<CheckpointError>([&] { checkpoint.load(net, sgd); }),
                 who + "no memory of that"));
  odd = true;
  CHECK(contains(error_of<CheckpointError>([&] { checkpoint.save(net, sgd, 2); }),
                 who + "an exception"));
  struct Full : torch::optim::SGD {
    using SGD::SGD;
    void save(torch::serialize::OutputArchive& archive) const override {
      if (last()) throw std::runtime_error("disk full");
      SGD::save(archive);
    }
  };
  Full full(net->parameters(), torch::optim::SGDOptions(0.1));
  CHECK(contains(error_of<CheckpointError>([&] { Checkpoint(folder.file()).save(net, full, 3); }),
                 who + "disk full"));
  CHECK(Checkpoint(folder.file()).load(net, sgd) == 1);
  const std::filesystem::directory_iterator all(folder.file(""));
  CHECK(std::distance(begin(all), end(all)) == 1);  // nothing half written
  CHECK(same_all(copies_of(net), before));
}

TEST_CASE(
    "what happens if each host has its own disk: the first rank's file counts, whatever the others "
    "find") {
  const SharedFolder folder;
  torch::nn::Linear net(3, 2);
  hvd::broadcast_parameters(net, 0);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  steps_of(net, sgd, 2);
  const Checkpoint local(folder.file("of_rank_" + std::to_string(hvd::rank()) + ".pt"));
  local.save(net, sgd, 5);
  CHECK(std::filesystem::exists(local.path()) == (hvd::rank() == 0));
  const auto kept = copies_of(net);
  if (last() && hvd::size() > 1) std::ofstream(local.path()) << "damaged";
  steps_of(net, sgd, 1);
  CHECK(local.exists());
  CHECK(local.load(net, sgd) == 5);
  CHECK(same_all(copies_of(net), kept));
  // The other way: all but the first have a good file.
  if (hvd::rank() == 0) std::filesystem::copy(local.path(), folder.file("good.pt"));
  hvd::barrier();
  const Checkpoint other(folder.file(hvd::rank() == 0 ? "none.pt" : "good.pt"));
  CHECK(!other.exists());
  CHECK(contains(error_of<CheckpointError>([&] { other.load(net, sgd); }), "rank 0: cannot open"));
  if (hvd::rank() == 0) std::ofstream(folder.file("none.pt")) << "damaged";
  CHECK(
      contains(error_of<CheckpointError>([&] { other.load(net, sgd); }), "rank 0: it is damaged"));
  CHECK(same_all(copies_of(net), kept));
}

TEST_CASE(
    "what happens if one rank's model or optimizer does not fit the file: refused on all, nothing "
    "changes on any") {
  const SharedFolder folder;
  const Checkpoint checkpoint(folder.file());
  torch::nn::Linear net(3, 2);
  hvd::broadcast_parameters(net, 0);
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.01));
  steps_of(net, adam, 2);
  checkpoint.save(net, adam, 2);
  steps_of(net, adam, 1);
  const auto before = copies_of(net);
  const auto step_of = [](torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
    return static_cast<torch::optim::AdamParamState&>(
               *optimizer.state().at(parameter.unsafeGetTensorImpl()))
        .step();
  };
  // Another kind of optimizer on the last rank, and everywhere a learning rate of its own
  torch::optim::SGD sgd(net->parameters(), 0.5);
  torch::optim::Optimizer& mine = last() ? static_cast<torch::optim::Optimizer&>(sgd) : adam;
  mine.param_groups()[0].options().set_lr(0.25);
  const std::string text = error_of<CheckpointError>([&] { checkpoint.load(net, mine); });
  CHECK_MESSAGE(contains(text, "rank " + std::to_string(hvd::size() - 1) +
                                   ": the state of its optimizer does not fit"),
                text);
  CHECK(same_all(copies_of(net), before));
  CHECK(mine.param_groups()[0].options().get_lr() == 0.25);
  CHECK(step_of(adam, net->weight) == 3);
  // More parameters, fewer parameters
  torch::nn::Sequential more(torch::nn::Linear(3, 2), torch::nn::Linear(2, 2));
  torch::optim::Adam of_more(more->parameters());
  CHECK(contains(error_of<CheckpointError>([&] { checkpoint.load(more, of_more); }),
                 "no module '0'"));
  torch::nn::Linear fewer(torch::nn::LinearOptions(3, 2).bias(false));
  torch::optim::Adam of_fewer(fewer->parameters());
  CHECK(contains(error_of<CheckpointError>([&] { checkpoint.load(fewer, of_fewer); }),
                 "it has 'bias', which the model has not"));
}

TEST_CASE(
    "what happens if modules register their buffers in another order when the run goes on: each "
    "gets its own") {
  struct Net : torch::nn::Module {
    explicit Net(bool turned) {
      register_parameter("weight", torch::ones({2}));
      for (const char* name : {turned ? "b" : "a", turned ? "a" : "b"})
        register_buffer(name, torch::full({2}, (*name == 'a' ? 10.0 : 20.0) + hvd::rank()));
    }
  };
  const SharedFolder folder;
  const Net saved(false);
  torch::optim::SGD sgd(saved.parameters(), 0.1);
  Checkpoint(folder.file()).save(saved, sgd, 1);
  Net loaded(true);
  {
    const torch::NoGradGuard no_gradient;
    for (auto& buffer : loaded.buffers()) buffer.zero_();
  }
  torch::optim::SGD other(loaded.parameters(), 0.1);
  Checkpoint(folder.file()).load(loaded, other);
  CHECK(torch::equal(loaded.named_buffers()["a"], torch::full({2}, 10.0 + hvd::rank())));
  CHECK(torch::equal(loaded.named_buffers()["b"], torch::full({2}, 20.0 + hvd::rank())));
}

TEST_CASE(
    "what happens if compression's memory is large: it goes to the rank that writes, and back to "
    "its own") {
  const SharedFolder folder;
  std::vector<at::Tensor> memory{data({1000 + 100 * hvd::rank()}, kFloat, hvd::rank()),
                                 data({3}, kDouble, hvd::rank())};
  const Checkpoint checkpoint(folder.file(), {.of_rank = [&] { return memory; }});
  torch::nn::Linear net(3, 2);
  hvd::broadcast_parameters(net, 0);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  checkpoint.save(net, sgd, 1);
  for (auto& tensor : memory) tensor.fill_(-1);
  checkpoint.load(net, sgd);
  CHECK(same(memory[0], data({1000 + 100 * hvd::rank()}, kFloat, hvd::rank())));
  CHECK(same(memory[1], data({3}, kDouble, hvd::rank())));
}

TEST_CASE(
    "what happens if a process set saves by itself: its first rank writes, the others are not "
    "asked") {
  const SharedFolder folder;
  const auto set = hvd::add_process_set(hvd::size() > 1 ? std::vector<int>{hvd::size() - 1}
                                                        : std::vector<int>{0});
  torch::nn::Linear net(3, 2);
  hvd::broadcast_parameters(net, 0);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  const Checkpoint checkpoint(folder.file(), {.process_set = set});
  if (set.included()) {
    checkpoint.save(net, sgd, 4);
    CHECK(checkpoint.load(net, sgd) == 4);
  } else {
    CHECK_THROWS_AS(checkpoint.save(net, sgd, 4), hvd::InvalidArgument);
    CHECK_THROWS_AS(checkpoint.load(net, sgd), hvd::InvalidArgument);
  }
  hvd::remove_process_set(set);
}

TEST_CASE(
    "what happens if two checkpoints share a folder, and steps go backwards: each keeps what it "
    "wrote last") {
  const SharedFolder folder;
  const Checkpoint best(folder.file("best.pt"), {.keep_last = 2}),
      run(folder.file(), {.keep_last = 3});
  torch::nn::Linear net(3, 2);
  hvd::broadcast_parameters(net, 0);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  const auto found = [&](const std::string& name) {
    return Checkpoint(folder.file(name)).load(net, sgd);
  };
  for (const int step : {1, 2, 7, 3}) {
    run.save(net, sgd, step);
    best.save(net, sgd, 100 - step);
  }
  CHECK(found("run.pt") == 3);
  CHECK(found("run.pt.1") == 7);
  CHECK(found("run.pt.2") == 2);
  CHECK(found("best.pt") == 97);
  CHECK(found("best.pt.1") == 93);
  const std::filesystem::directory_iterator all(folder.file(""));
  CHECK(std::distance(begin(all), end(all)) == 5);  // nothing half written
}

}  // namespace
