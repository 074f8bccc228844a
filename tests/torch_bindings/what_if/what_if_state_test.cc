// What happens if I ... : broadcasts of parameters and of optimizers' state.
#include <memory>

#include "tests/torch_bindings/own_optimizer.h"
#include "tests/torch_bindings/shared_folder.h"
#include "tests/torch_bindings/wrapped_optimizers.h"
#include "torch_bindings/collectives/agreement.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat, at::kInt, at::kLong;
using hvd::NamedTensors;

int final_rank() { return hvd::size() - 1; }

TEST_CASE("what happens if I list tensors in another order on some ranks: they go by name") {
  for (int root = 0; root < hvd::size(); ++root) {
    const at::Tensor a = data({3, 2}, kFloat, hvd::rank(), 1),
                     b = data({3, 2}, kFloat, hvd::rank(), 2), c = data({5}, kLong, hvd::rank());
    NamedTensors tensors{{"a", a}, {"b", b}, {"c", c}, {"none", at::Tensor()}};
    std::rotate(tensors.begin(), tensors.begin() + hvd::rank() % 4, tensors.end());
    hvd::broadcast_parameters(tensors, root);
    CHECK(same(a, data({3, 2}, kFloat, root, 1)));
    CHECK(same(b, data({3, 2}, kFloat, root, 2)));
    CHECK(same(c, data({5}, kLong, root)));
  }
}

TEST_CASE("what happens if I register modules in another order on some ranks: they go by name") {
  struct Net : torch::nn::Module {
    Net() {
      for (const char* name : {last() ? "second" : "first", last() ? "first" : "second"})
        register_module(name, torch::nn::Linear(3, 3));
      register_buffer("first_buffer", torch::full({2}, hvd::rank() + 1.0));
    }
  };
  Net net;
  const torch::NoGradGuard no_gradient;
  const auto named = net.named_parameters();
  named["first.weight"].fill_(10 + hvd::rank());
  named["second.weight"].fill_(20 + hvd::rank());
  hvd::broadcast_parameters(net, 0);
  CHECK(torch::equal(named["first.weight"], torch::full({3, 3}, 10.0)));
  CHECK(torch::equal(named["second.weight"], torch::full({3, 3}, 20.0)));
  CHECK(torch::equal(net.named_buffers()["first_buffer"], torch::ones({2})));
}

TEST_CASE("what happens if I give a name twice: InvalidArgument at the call, that names it") {
  const at::Tensor a = torch::ones({3}), b = torch::ones({3});
  for (const at::Tensor& other : {a, b})
    CHECK(contains(error_of<hvd::InvalidArgument>([&] {
                     hvd::broadcast_parameters({{"w", a}, {"v", b}, {"w", other}}, 0);
                   }),
                   "'w'"));
}

TEST_CASE(
    "what happens if ranks list other names, shapes or types: Mismatch on all, that says who has "
    "what, and nothing changes") {
  if (hvd::size() == 1) return;
  const at::Tensor a = data({3}, kFloat, hvd::rank()), b = data({3}, kFloat, hvd::rank());
  const auto text_of = [&](const NamedTensors& usual, const NamedTensors& of_last) {
    return error_of<hvd::Mismatch>([&] { hvd::broadcast_parameters(last() ? of_last : usual, 0); });
  };
  const NamedTensors both{{"a", a}, {"b", b}};
  CHECK(contains(text_of(both, {}), grouping("tensor 'a' is float32 [3], tensor 'b' is float32 [3]",
                                             "no tensor 'a', no tensor 'b'")));
  CHECK(contains(text_of({}, both),
                 grouping("no tensor 'a', no tensor 'b'",
                          "tensor 'a' is float32 [3], tensor 'b' is float32 [3]")));
  CHECK(
      contains(text_of(both, {{"a", a}}), grouping("tensor 'b' is float32 [3]", "no tensor 'b'")));
  CHECK(contains(text_of(both, {{"c", b}, {"a", a}}),
                 grouping("tensor 'b' is float32 [3], no tensor 'c'",
                          "no tensor 'b', tensor 'c' is float32 [3]")));
  CHECK(contains(text_of(both, {{"b", b}, {"a", torch::ones({4})}}),
                 grouping("tensor 'a' is float32 [3]", "tensor 'a' is float32 [4]")));
  CHECK(contains(text_of(both, {{"b", b.to(kDouble)}, {"a", a}}),
                 grouping("tensor 'b' is float32 [3]", "tensor 'b' is float64 [3]")));
  CHECK(contains(text_of(both, {{"b", at::Tensor()}, {"a", a}}),
                 grouping("tensor 'b' is float32 [3]", "tensor 'b' is undefined")));
  CHECK(contains(
      error_of<hvd::Mismatch>([&] { hvd::broadcast_parameters(both, last() ? final_rank() : 0); }),
      "the root is rank"));
  NamedTensors many;
  for (int i = 0; i < 9; ++i) many.emplace_back("t" + std::to_string(i), a);
  for (auto& [name, tensor] : many) tensor = tensor.clone();
  CHECK(contains(text_of(many, {}), "6 more differ"));
  CHECK(same(a, data({3}, kFloat, hvd::rank())));
  hvd::broadcast_parameters(both, 0);  // and goes on
  CHECK(same(a, data({3}, kFloat, 0)));
}

TEST_CASE("what happens if weights are tied: they are sent once, under all their names") {
  Tied net(true, hvd::rank());
  const auto before = hvd::stats().tensors_submitted;
  hvd::broadcast_parameters(net, final_rank());
  // weight, bias, and what the ranks agree on
  if (hvd::size() > 1) CHECK(hvd::stats().tensors_submitted - before == 3);
  CHECK(same(net->second.detach(), data({3, 3}, kFloat, final_rank())));
  CHECK(net->second.is_same(net->weight));
  if (hvd::size() == 1) return;
  // Tied on some ranks only.
  const at::Tensor one = torch::ones({2}), other = last() ? torch::ones({2}) : one;
  const std::string text = error_of<hvd::Mismatch>([&] {
    hvd::broadcast_parameters({{"x", one}, {"y", other}}, 0);
  });
  INFO(text);
  CHECK(contains(text, "tensor 'x, y' is float32 [2], no tensor 'x'"));
}

TEST_CASE(
    "what happens if buffers have types that no collective has, no elements, other strides: they "
    "arrive") {
  const int root = final_rank();
  const auto filled = [](int rank) {
    NamedTensors tensors;
    for (const auto type :
         {at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn, at::kComplexHalf}) {
      const std::int64_t bytes = at::elementSize(type);
      tensors.emplace_back(
          at::toString(type),
          data({3, 8}, at::kByte, rank).slice(1, 0, bytes).contiguous().view(type));
    }
    tensors.emplace_back("empty", torch::zeros({0, 3}, kInt));
    tensors.emplace_back("scalar", torch::tensor(rank + 1, kLong));
    tensors.emplace_back(
        "channels last",
        data({2, 3, 4, 4}, kFloat, rank).contiguous(at::MemoryFormat::ChannelsLast));
    tensors.emplace_back("strided", data({4, 6}, kFloat, rank).slice(1, 0, 6, 2));
    tensors.emplace_back("expanded", data({2, 1}, kFloat, rank).expand({2, 5}));
    return tensors;
  };
  const NamedTensors mine = filled(hvd::rank()), expected = filled(root);
  hvd::broadcast_parameters(mine, root);
  for (std::size_t i = 0; i < mine.size(); ++i) {
    CAPTURE(mine[i].first);
    const at::Tensor got = mine[i].second.contiguous(), wanted = expected[i].second.contiguous();
    CHECK(std::memcmp(got.const_data_ptr(), wanted.const_data_ptr(), got.nbytes()) == 0);
  }
  CHECK(mine[7].second.is_contiguous(at::MemoryFormat::ChannelsLast));
  const at::Tensor sparse = torch::eye(3).to_sparse();
  CHECK(contains(error_of<hvd::InvalidArgument>([&] {
                   hvd::broadcast_parameters({{"s", sparse}}, 0);
                 }),
                 "'s' is sparse"));
}

TEST_CASE("what happens if a buffer has the name of a parameter: both arrive") {
  struct Net : torch::nn::Module {
    Net()
        : parameter(register_parameter("x", torch::full({2}, 1.0 + hvd::rank()))),
          buffer(register_buffer("x", torch::full({2}, 5.0 + hvd::rank()))) {}
    at::Tensor parameter, buffer;
  };
  Net net;
  hvd::broadcast_parameters(net, 0);
  CHECK(torch::equal(net.parameter.detach(), torch::full({2}, 1.0)));
  CHECK(torch::equal(net.buffer, torch::full({2}, 5.0)));
}

// ------------------------------------------------------------------------------- optimizers' state

template <class Net>
void train_on(Net& net, torch::optim::Optimizer& optimizer, int data_of, int steps) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    net->forward(data({4, 3}, kFloat, data_of, step)).square().sum().backward();
    optimizer.step();
  }
}

/// Of an optimizer of the user's own, on ranks that took other steps with other options. `refused`:
/// the words on all ranks; empty: it works.
template <Overrides kHas>
void check_own(int steps_of_root, int steps_of_others, const std::string& refused, bool wrap) {
  const int root = final_rank(), mine = hvd::rank() == root ? steps_of_root : steps_of_others;
  torch::nn::Linear net(3, 2);
  hvd::broadcast_parameters(net, 0);
  const double rate = 0.01 * (hvd::rank() + 1),
               decay = kHas.options || kHas.save ? 0.1 * (hvd::rank() + 1) : 0.5;
  OwnOptimizer<kHas> optimizer(net->parameters(), rate, decay);
  std::unique_ptr<hvd::DistributedOptimizer> wrapper;
  train_on(net, optimizer, hvd::rank(), mine);
  if (wrap)
    wrapper = std::make_unique<hvd::DistributedOptimizer>(optimizer, net->named_parameters());
  torch::optim::Optimizer& used =
      wrap ? static_cast<torch::optim::Optimizer&>(*wrapper) : optimizer;
  const auto* const options = &optimizer.options();
  if (!refused.empty() && hvd::size() > 1) {
    const std::string text =
        error_of<hvd::InvalidArgument>([&] { hvd::broadcast_optimizer_state(used, root); });
    CHECK_MESSAGE(contains(text, refused), text);
    CHECK(optimizer.steps() == (mine == 0 ? -1 : mine));
    CHECK(optimizer.options().rate == rate);
    CHECK(optimizer.options().decay == decay);
    return;
  }
  hvd::broadcast_optimizer_state(used, root);
  CHECK(&optimizer.options() == options);
  CHECK(optimizer.options().rate == 0.01 * (root + 1));
  CHECK(optimizer.options().decay == (kHas.options || kHas.save ? 0.1 * (root + 1) : 0.5));
  CHECK(optimizer.steps() == (steps_of_root == 0 ? -1 : steps_of_root));
  if (wrap)
    CHECK(static_cast<OwnOptions<kHas>&>(wrapper->param_groups()[0].options()).decay ==
          optimizer.options().decay);
  hvd::broadcast_parameters(net, root);
  train_on(net, used, 0, 2);
  for (const auto& parameter : net->parameters()) CHECK(same_on_all_ranks(parameter));
}

TEST_CASE(
    "what happens if my own optimizer overrides neither save nor load: options and states travel "
    "by their serialize") {
  for (const bool wrap : {false, true}) {
    CAPTURE(wrap);
    check_own<Overrides{}>(3, 1, "", wrap);
    check_own<Overrides{}>(0, 2, "", wrap);
    check_own<Overrides{}>(0, 0, "", wrap);
    check_own<Overrides{.rate = false}>(2, 1, "", wrap);
    check_own<Overrides{.options = false}>(2, 1, "", wrap);  // the learning rate, and a warning
    check_own<Overrides{.options = false, .state = false}>(0, 1, "", wrap);
    check_own<Overrides{.reads_into = true}>(2, 1, "", wrap);
  }
}

TEST_CASE(
    "what happens if my own optimizer has something that LibTorch cannot move: InvalidArgument on "
    "all ranks, nothing changes") {
  for (const bool wrap : {false, true}) {
    CAPTURE(wrap);
    check_own<Overrides{.rate = false, .options = false}>(1, 1, "neither serialize nor get_lr",
                                                          wrap);
    check_own<Overrides{.state = false}>(2, 1, "cannot be serialized", wrap);
    check_own<Overrides{}>(2, 0, "does not override load", wrap);  // nothing to copy a state from
    check_own<Overrides{.save = true, .load = false}>(2, 0, "does not override load", wrap);
    check_own<Overrides{.state = false, .save = true, .load = false}>(2, 1, "does not bring back",
                                                                      wrap);
  }
}

TEST_CASE(
    "what happens if my own optimizer overrides save and load: they are used, whatever else is "
    "overridden") {
  for (const bool wrap : {false, true}) {
    CAPTURE(wrap);
    check_own<Overrides{.save = true}>(3, 1, "", wrap);
    check_own<Overrides{.save = true}>(3, 0, "", wrap);
    check_own<Overrides{
        .rate = false, .options = false, .state = false, .save = true, .clone_state = false}>(
        3, 0, "", wrap);
    check_own<Overrides{.rate = false, .options = false, .state = false, .save = true}>(0, 2, "",
                                                                                        wrap);
    check_own<Overrides{.save = true, .load = false}>(2, 1, "", wrap);  // by the parts
  }
}

/// A layer and its optimizer after two steps, in which it got a state for both parameters on the
/// root, and for the weight alone on the others.
template <Overrides kHas>
struct PartlyStepped {
  explicit PartlyStepped(int of_root) : root(of_root) {
    hvd::broadcast_parameters(net, 0);
    net->bias.set_requires_grad(hvd::rank() == root);
    train_on(net, optimizer, hvd::rank(), 2);
  }
  /// Returns with what it was refused.
  std::string broadcast_state() {
    return error_of<hvd::InvalidArgument>([&] { hvd::broadcast_optimizer_state(optimizer, root); });
  }
  int root;
  torch::nn::Linear net{3, 2};
  OwnOptimizer<kHas> optimizer{net->parameters(), 0.1, 0.5};
};

TEST_CASE(
    "what happens if only one parameter has a state on some ranks: it is copied, or refused on all "
    "ranks, never shared") {
  const int root = final_rank();
  const auto run = [&]<Overrides kHas>() {
    PartlyStepped<kHas> stepped(root);
    auto& net = stepped.net;
    auto& optimizer = stepped.optimizer;
    const std::string text = stepped.broadcast_state();
    net->bias.set_requires_grad(true);
    if (text != "(no error)") return text;
    hvd::broadcast_parameters(net, root);
    train_on(net, optimizer, 0, 2);
    for (const auto& parameter : net->parameters()) CHECK(same_on_all_ranks(parameter));
    return text;
  };
  CHECK(run.template operator()<Overrides{}>() == "(no error)");
  const std::string text = run.template operator()<Overrides{.reads_into = true}>();
  if (hvd::size() > 1)
    CHECK_MESSAGE((text == "(no error)" || contains(text, "several states share")), text);
}

TEST_CASE(
    "what happens if a load is refused when states were read into already: they are what they "
    "were, whether or not they can be copied") {
  const int root = final_rank();
  const auto run = [&]<Overrides kHas>() {
    PartlyStepped<kHas> stepped(root);
    auto& optimizer = stepped.optimizer;
    const auto state_of_weight = [&] {  // which is read first
      return static_cast<const OwnState<kHas>*>(
          optimizer.state()[stepped.net->weight.unsafeGetTensorImpl()].get());
    };
    const at::Tensor momentum = state_of_weight()->momentum.clone();
    const std::string text = stepped.broadcast_state();
    if (text != "(no error)") {
      REQUIRE(state_of_weight() != nullptr);
      CHECK(same(state_of_weight()->momentum, momentum));
      CHECK(state_of_weight()->steps == 2);
      if (hvd::rank() != root) CHECK(optimizer.state().size() == 1);
    }
    return text;
  };
  const std::string text = run.template operator()<Overrides{.clone_state = false}>();
  CHECK_MESSAGE(contains(text, hvd::size() > 1 ? "has no state to copy" : "(no error)"), text);
  run.template operator()<Overrides{.reads_into = true}>();  // into tensors that copies share
}

TEST_CASE(
    "what happens if weights are tied: their optimizer's state is sent once, and steps go on as in "
    "one process") {
  const int root = final_rank();
  const auto run = [&](auto make) {
    Tied net;
    auto optimizer = make(net->parameters());
    train_on(net, optimizer, hvd::rank(), hvd::rank() + 1);
    hvd::broadcast_parameters(net, root);
    hvd::broadcast_optimizer_state(optimizer, root);
    CHECK(optimizer.param_groups()[0].params().size() == 3);  // the list is as it was
    train_on(net, optimizer, 0, 3);
    for (const auto& parameter : net->parameters()) CHECK(same_on_all_ranks(parameter));
    Tied alone;  // one process that does what the root did
    auto reference = make(alone->parameters());
    train_on(alone, reference, root, root + 1);
    train_on(alone, reference, 0, 3);
    for (std::size_t i = 0; i < 3; ++i)
      CHECK(torch::equal(net->parameters()[i], alone->parameters()[i]));
  };
  run([](auto parameters) {
    return torch::optim::Adam(std::move(parameters), torch::optim::AdamOptions(0.01));
  });
  run([](auto parameters) {
    return torch::optim::SGD(std::move(parameters), torch::optim::SGDOptions(0.001).momentum(0.9));
  });
  run([](auto parameters) { return OwnOptimizer<Overrides{}>(std::move(parameters), 0.001, 0.9); });
}

TEST_CASE(
    "what happens if ranks have other parameter groups, or only some shard: Mismatch on all, "
    "nothing changes") {
  if (hvd::size() == 1) return;
  torch::nn::Linear net(3, 2), wide(3, 5);
  const auto refused = [&](torch::optim::Optimizer& optimizer) {
    return error_of<hvd::Mismatch>([&] { hvd::broadcast_optimizer_state(optimizer, 0); });
  };
  torch::optim::SGD sgd((last() ? wide : net)->parameters(), 0.1);
  CHECK(contains(
      refused(sgd),
      grouping("parameter 0 of group 0 is float32 [2, 3], parameter 1 of group 0 is float32 [2]",
               "parameter 0 of group 0 is float32 [5, 3], parameter 1 of group 0 is float32 [5]")));
  torch::optim::SGD plain(net->parameters(), 0.1);
  if (last()) plain.add_param_group(torch::optim::OptimizerParamGroup(wide->parameters()));
  CHECK(contains(refused(plain), "the number of parameter groups is 2"));
  torch::optim::Adam adam(net->parameters());
  hvd::DistributedOptimizer optimizer(adam, net->named_parameters(),
                                      {.shard_optimizer_state = last()});
  CHECK(contains(refused(optimizer),
                 grouping("the optimizer's state is not sharded, parameter 'weight' of group 0 is "
                          "float32 [2, 3], parameter 'bias' of group 0 is float32 [2]",
                          "the optimizer's state is sharded, parameter 'weight' of group 0 is "
                          "number 0, float32 [2, 3], parameter 'bias' of group 0 is number 1, "
                          "float32 [2]")));
}

TEST_CASE(
    "what happens if a sharded optimizer has its parameters in another order on some rank: "
    "Mismatch "
    "on all, as its state goes by place") {
  if (hvd::size() == 1) return;
  const at::Tensor a = torch::ones({3}, torch::requires_grad()),
                   b = torch::ones({3}, torch::requires_grad());
  torch::optim::Adam adam(last() ? std::vector<at::Tensor>{b, a} : std::vector<at::Tensor>{a, b});
  hvd::DistributedOptimizer optimizer(adam, {{"a", a}, {"b", b}}, {.shard_optimizer_state = true});
  CHECK(contains(
      error_of<hvd::Mismatch>([&] { hvd::broadcast_optimizer_state(optimizer, 0); }),
      grouping("parameter 'a' of group 0 is number 0, float32 [3], parameter 'b' of group 0 is "
               "number 1, float32 [3]",
               "parameter 'a' of group 0 is number 1, float32 [3], parameter 'b' of group 0 is "
               "number 0, float32 [3]")));
}

TEST_CASE(
    "what happens if one rank cannot load what the root sends: all throw its words, and all keep "
    "what they had") {
  struct Picky : torch::optim::SGD {
    using SGD::SGD;
    void load(torch::serialize::InputArchive& archive) override {
      SGD::load(archive);
      if (last()) throw std::runtime_error("not on this rank");
    }
  };
  if (hvd::size() == 1) return;
  torch::nn::Linear net(3, 2);
  const double rate = 0.1 * (hvd::rank() + 1);
  Picky sgd(net->parameters(), torch::optim::SGDOptions(rate).momentum(0.9));
  train_on(net, sgd, hvd::rank(), 1);
  const at::Tensor momentum =
      static_cast<torch::optim::SGDParamState&>(*sgd.state().at(net->weight.unsafeGetTensorImpl()))
          .momentum_buffer()
          .clone();
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::broadcast_optimizer_state(sgd, 0); }),
                 "not on this rank"));
  CHECK(sgd.param_groups()[0].options().get_lr() == rate);
  CHECK(same(
      static_cast<torch::optim::SGDParamState&>(*sgd.state().at(net->weight.unsafeGetTensorImpl()))
          .momentum_buffer(),
      momentum));
}

// ----------------------------------------------------------------------------------------- objects

TEST_CASE(
    "what happens if one rank's object cannot be written: all throw its words, nobody waits") {
  struct UnwritableImpl : torch::nn::Module {
    void save(torch::serialize::OutputArchive& archive) const override {
      if (last()) throw std::runtime_error("no words for it");
      Module::save(archive);
    }
  };
  struct Unwritable : torch::nn::ModuleHolder<UnwritableImpl> {
    using torch::nn::ModuleHolder<UnwritableImpl>::ModuleHolder;
  };
  const Unwritable object;
  const std::string who =
      "rank " + std::to_string(final_rank()) + " cannot write its object: no words for it";
  CHECK(contains(
      error_of<hvd::InvalidArgument>([&] { hvd::broadcast_object(object, final_rank()); }), who));
  CHECK(contains(error_of<hvd::InvalidArgument>(
                     [&] { hvd::allgather_object(std::vector<Unwritable>{object}); }),
                 who));
  CHECK(hvd::allgather_object(hvd::rank()).size() == static_cast<std::size_t>(hvd::size()));
}

TEST_CASE("what happens if ranks give objects of different types: a Mismatch on all, who go on") {
  if (hvd::size() == 1) return;
  const auto give = [](const auto& broadcast_or_gather) {
    return last() ? error_of<hvd::Mismatch>([&] { broadcast_or_gather(std::string("q")); })
                  : error_of<hvd::Mismatch>([&] { broadcast_or_gather(std::vector<double>{1.0}); });
  };
  const std::string words = "rank " + std::to_string(final_rank()) + ": string";
  CHECK(contains(give([](const auto& object) { hvd::broadcast_object(object, 0); }), words));
  CHECK(contains(give([](const auto& object) { hvd::allgather_object(object); }), words));
  CHECK(contains(error_of<hvd::Mismatch>([&] { hvd::broadcast_object(1, last() ? 1 : 0); }),
                 "root rank 1") == (final_rank() != 0));
  CHECK(hvd::allgather_object(hvd::rank()).size() == static_cast<std::size_t>(hvd::size()));
}

TEST_CASE(
    "what happens if only one rank needs what all have: texts of any length are gathered there "
    "alone") {
  const auto text_of = [](int rank) {
    return std::string(static_cast<std::size_t>(rank == 1 ? 0 : 57 + 64 * rank),
                       static_cast<char>('a' + rank));
  };
  const auto texts = hvd::detail::gather_text(text_of(hvd::rank()), {});
  CHECK(texts.size() == (hvd::rank() == 0 ? static_cast<std::size_t>(hvd::size()) : 0));
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const std::string expected = text_of(static_cast<int>(i));
    CHECK(std::string(static_cast<const char*>(texts[i].const_data_ptr()), texts[i].nbytes()) ==
          expected);
  }
}

TEST_CASE(
    "what happens if my own optimizer has no state, and is sharded: its options go to all ranks, "
    "by broadcast and by file") {
  const SharedFolder folder;
  for (const bool of_gradients : {false, true}) {
    for (const int steps : {0, 1}) {
      torch::nn::Linear net(40, 40);
      hvd::broadcast_parameters(net, 0);
      wrapped::SignSgd own(net->parameters(), wrapped::SignOptions(0.25 * (hvd::rank() + 1)));
      const auto rate = [&own] { return own.param_groups()[0].options().get_lr(); };
      hvd::DistributedOptimizer optimizer(
          own, net->named_parameters(),
          {.shard_optimizer_state = true, .shard_gradients = of_gradients});
      hvd::broadcast_optimizer_state(optimizer, final_rank());
      CHECK(rate() == 0.25 * (final_rank() + 1));
      CHECK(optimizer.param_groups()[0].options().get_lr() == rate());
      for (int step = 0; step < steps; ++step) {
        net->forward(data({2, 40}, kFloat, hvd::rank())).sum().backward();
        optimizer.step();
      }
      hvd::Checkpoint(folder.file()).save(net, optimizer, steps);
      own.param_groups()[0].options().set_lr(7);
      CHECK(hvd::Checkpoint(folder.file()).load(net, optimizer) == steps);
      CHECK(rate() == 0.25 * (final_rank() + 1));
    }
  }
}

}  // namespace
