// broadcast_parameters and broadcast_optimizer_state.
#include <memory>

#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using Tensors = std::vector<at::Tensor>;
using at::kDouble, at::kFloat, at::kHalf, at::kInt, at::kLong;
using torch::optim::Optimizer;

struct NetImpl : torch::nn::Module {
  NetImpl()
      : convolution(register_module("convolution", torch::nn::Conv2d(3, 4, 3))),
        norm(register_module("norm", torch::nn::BatchNorm2d(4))) {
    convolution->weight = register_parameter(
        "weight_last",
        convolution->weight.detach().contiguous(at::MemoryFormat::ChannelsLast).requires_grad_());
    counts = register_buffer("counts", torch::zeros({3}, kInt));
    mask = register_buffer("mask", torch::zeros({4}, at::kBool));
    wide = register_parameter("wide", torch::zeros({2, 3}, kDouble));
    turned = register_buffer("turned", torch::zeros({4, 6}, kHalf).t());
    every_second = register_buffer("every_second", torch::zeros({4, 6}).slice(1, 0, 6, 2));
    nothing = register_buffer("nothing", torch::zeros({0}));
    undefined = register_buffer("undefined", at::Tensor());
  }
  torch::nn::Conv2d convolution;
  torch::nn::BatchNorm2d norm;
  at::Tensor counts, mask, wide, turned, every_second, nothing, undefined;
};
TORCH_MODULE(Net);

void fill(const torch::nn::Module& module, int rank) {
  const torch::NoGradGuard no_gradient;
  int variant = 0;
  const auto set = [&](at::Tensor tensor) {
    if (tensor.defined()) tensor.copy_(data(tensor.sizes(), tensor.scalar_type(), rank, variant++));
  };
  for (auto& item : module.named_parameters()) set(item.value());
  for (auto& item : module.named_buffers()) set(item.value());
}

TEST_CASE(
    "broadcast_parameters: parameters and buffers of all types and layouts, from every root") {
  for (int root = 0; root < hvd::size(); ++root) {
    Net net;
    Net expected;
    fill(*net, hvd::rank());
    fill(*expected, root);
    net->norm->num_batches_tracked.fill_(hvd::rank() + 100);
    expected->norm->num_batches_tracked.fill_(root + 100);
    const auto strides = net->convolution->weight.strides().vec();
    hvd::broadcast_parameters(*net, root);
    for (const auto& item : expected->named_parameters())
      CHECK(same(net->named_parameters()[item.key()].detach(), item.value().detach()));
    for (const auto& item : expected->named_buffers()) {
      CAPTURE(item.key());
      if (item.value().defined()) CHECK(same(net->named_buffers()[item.key()], item.value()));
    }
    CHECK(net->norm->num_batches_tracked.item<std::int64_t>() == root + 100);
    CHECK(net->convolution->weight.strides() == at::IntArrayRef(strides));
    for (const auto& parameter : net->parameters())
      CHECK((parameter.is_leaf() && parameter.requires_grad()));
  }
}

TEST_CASE("broadcast_parameters: holders, pairs, dictionaries") {
  const int root = hvd::size() - 1;
  torch::nn::Sequential net(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
  fill(*net, hvd::rank());
  hvd::broadcast_parameters(net, root);
  for (const auto& parameter : net->parameters()) CHECK(same_on_all_ranks(parameter));
  for (const auto& buffer : net->buffers()) CHECK(same_on_all_ranks(buffer));

  const auto held = std::make_shared<NetImpl>();
  fill(*held, hvd::rank());
  hvd::broadcast_parameters(held, root);
  CHECK(same_on_all_ranks(held->wide));
  const std::shared_ptr<torch::nn::Module> base = held;
  fill(*held, hvd::rank());
  hvd::broadcast_parameters(base, root);
  CHECK(same_on_all_ranks(held->wide));
  const auto of_linear = std::make_shared<torch::nn::LinearImpl>(3, 2);
  hvd::broadcast_parameters(of_linear, root);
  CHECK(same_on_all_ranks(of_linear->weight));
  CHECK_THROWS_AS(hvd::broadcast_parameters(std::shared_ptr<NetImpl>(), root),
                  hvd::InvalidArgument);

  const at::Tensor a = data({3, 2}, kFloat, hvd::rank());
  const at::Tensor b = data({4}, kLong, hvd::rank());
  hvd::broadcast_parameters({{"a", a}, {"undefined", at::Tensor()}, {"b", b}}, root);
  CHECK(same(a, data({3, 2}, kFloat, root)));
  CHECK(same(b, data({4}, kLong, root)));

  fill(*net, hvd::rank());
  hvd::broadcast_parameters(net->named_parameters().pairs(), 0);
  CHECK(same_on_all_ranks(net->parameters()[0]));
  fill(*net, hvd::rank());
  hvd::broadcast_parameters(net->named_parameters(), 0);
  CHECK(same_on_all_ranks(net->parameters()[0]));
  hvd::broadcast_parameters(hvd::NamedTensors{}, 0);
  CHECK_THROWS_AS(hvd::broadcast_parameters(*net, hvd::size()), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::broadcast_parameters(*net, -1), hvd::InvalidArgument);
}

TEST_CASE(
    "broadcast_parameters: models that differ raise Mismatch on all ranks, and change nothing") {
  if (hvd::size() == 1) return;
  torch::nn::Sequential net;
  for (int i = 0; i < 10; ++i) net->push_back(torch::nn::Linear(3, 3));
  net->push_back(torch::nn::Linear(3, last() ? 4 : 5));
  fill(*net, hvd::rank());
  const at::Tensor kept = net->parameters()[0].detach().clone();
  const std::string text = error_of<hvd::Mismatch>([&] { hvd::broadcast_parameters(*net, 0); });
  INFO(text);
  CHECK(contains(text, "tensor '10.weight' is "));
  CHECK(contains(text, "[4, 3]"));
  CHECK(contains(text, "[5, 3]"));
  CHECK(contains(text, "rank " + std::to_string(hvd::size() - 1) + ": "));
  CHECK(same(net->parameters()[0].detach(), kept));
  torch::nn::Linear good(3, 2);
  hvd::broadcast_parameters(*good, 0);
  CHECK(same_on_all_ranks(good->weight));
}

torch::nn::Linear trained(Optimizer& optimizer, torch::nn::Linear layer, int steps) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    layer->forward(data({4, 3}, kFloat, hvd::rank(), step)).square().sum().backward();
    optimizer.step();
  }
  return layer;
}

template <class Type, class Options>
void check_state(Options mine, bool wrap, int steps_of_root, int steps_of_others) {
  const int root = hvd::size() - 1;
  torch::nn::Linear layer(3, 2);
  fill(*layer, hvd::rank());
  Type optimizer(layer->parameters(), mine);
  trained(optimizer, layer, hvd::rank() == root ? steps_of_root : steps_of_others);
  std::unique_ptr<hvd::DistributedOptimizer> wrapper;
  if (wrap)
    wrapper = std::make_unique<hvd::DistributedOptimizer>(optimizer, layer->named_parameters());
  const at::Tensor weight = layer->weight.detach().clone();
  const auto* const options_before = &optimizer.param_groups()[0].options();
  if (wrap) {
    hvd::broadcast_optimizer_state(*wrapper, root);
  } else {
    hvd::broadcast_optimizer_state(optimizer, root);
  }
  CHECK(same(layer->weight.detach(), weight));
  CHECK(&optimizer.param_groups()[0].options() == options_before);
  // Bit for bit: what torch::save writes, but for the addresses that it uses as keys. So compare
  // what the root has, tensor by tensor.
  const auto options = hvd::allgather_object(optimizer.param_groups()[0].options().get_lr());
  CHECK(options == std::vector<double>(static_cast<std::size_t>(hvd::size()), 0.1 * (root + 1)));
  if (wrap) CHECK(wrapper->param_groups()[0].options().get_lr() == 0.1 * (root + 1));
  CHECK(hvd::allgather_object(optimizer.state().size()) ==
        std::vector<std::size_t>(static_cast<std::size_t>(hvd::size()),
                                 hvd::allgather_object(optimizer.state().size()).back()));
  // The same gradients on all ranks from here on, on the same parameters: states that differ in a
  // bit would show.
  hvd::broadcast_parameters(*layer, root);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    layer->forward(data({4, 3}, kFloat, 0, step)).square().sum().backward();
    (wrap ? static_cast<Optimizer&>(*wrapper) : optimizer).step();
    CHECK(same_on_all_ranks(layer->weight));
    CHECK(same_on_all_ranks(layer->bias));
  }
}

TEST_CASE("broadcast_optimizer_state") {
  using namespace torch::optim;
  const double rate = 0.1 * (hvd::rank() + 1);
  for (const bool wrap : {false, true}) {
    for (const auto& [of_root, of_others] :
         std::vector<std::pair<int, int>>{{3, 0}, {2, 5}, {0, 3}, {0, 0}}) {
      CAPTURE(wrap);
      CAPTURE(of_root);
      CAPTURE(of_others);
      check_state<SGD>(SGDOptions(rate).momentum(0.5 + 0.1 * hvd::rank()), wrap, of_root,
                       of_others);
      check_state<Adam>(
          AdamOptions(rate).betas({0.5 + 0.1 * hvd::rank(), 0.9}).amsgrad(hvd::rank() % 2 == 1),
          wrap, of_root, of_others);
      check_state<Adagrad>(AdagradOptions(rate), wrap, of_root, of_others);
      check_state<RMSprop>(RMSpropOptions(rate).centered(hvd::rank() % 2 == 1), wrap, of_root,
                           of_others);
    }
  }
}

TEST_CASE("broadcast_optimizer_state: every field of Adam's state and options") {
  const int root = hvd::size() - 1;
  torch::nn::Linear layer(3, 2);
  fill(*layer, hvd::rank());
  torch::optim::Adam optimizer(layer->parameters(),
                               torch::optim::AdamOptions(0.1 * (hvd::rank() + 1))
                                   .betas({0.1 * (hvd::rank() + 1), 0.99})
                                   .weight_decay(hvd::rank()));
  trained(optimizer, layer, hvd::rank() + 1);
  hvd::broadcast_optimizer_state(optimizer, root);
  const auto& options =
      static_cast<const torch::optim::AdamOptions&>(optimizer.param_groups()[0].options());
  CHECK(options.lr() == 0.1 * (root + 1));
  CHECK(std::get<0>(options.betas()) == 0.1 * (root + 1));
  CHECK(options.weight_decay() == root);
  for (const auto& parameter : layer->parameters()) {
    auto& state = static_cast<torch::optim::AdamParamState&>(
        *optimizer.state().at(parameter.unsafeGetTensorImpl()));
    CHECK(state.step() == root + 1);
    CHECK(same_on_all_ranks(state.exp_avg()));
    CHECK(same_on_all_ranks(state.exp_avg_sq()));
    CHECK(state.exp_avg().abs().sum().item<float>() > 0);
  }
}

TEST_CASE("broadcast_optimizer_state: LBFGS, and one that cannot be saved") {
  const int root = hvd::size() - 1;
  torch::nn::Linear layer(3, 2);
  fill(*layer, hvd::rank());
  torch::optim::LBFGS optimizer(layer->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3));
  const auto step = [&](int rank) {
    optimizer.step([&] {
      optimizer.zero_grad();
      const at::Tensor loss = layer->forward(data({4, 3}, kFloat, rank)).square().sum();
      loss.backward();
      return loss;
    });
  };
  step(hvd::rank());
  hvd::broadcast_optimizer_state(optimizer, root);
  hvd::broadcast_parameters(*layer, root);
  step(0);
  CHECK(same_on_all_ranks(layer->weight));

  struct Unsavable : torch::optim::SGD {
    using SGD::SGD;
    void save(torch::serialize::OutputArchive&) const override {
      TORCH_CHECK(false, "no place for it");
    }
  };
  Unsavable other(layer->parameters(), torch::optim::SGDOptions(0.1));
  CHECK(
      contains(error_of<hvd::InvalidArgument>([&] { hvd::broadcast_optimizer_state(other, root); }),
               "no place for it"));
}

// ----------------------------------------------------------------------------------------- objects

struct Plain {
  int a;
  double b;
  bool operator==(const Plain&) const = default;
};

struct Pointed : torch::nn::Module {
  Pointed() { register_module("linear", linear); }
  torch::nn::Linear linear{2, 1};
};

/// Both collectives carry `make(rank)`.
template <class Make>
void check_object(Make make) {
  const int root = hvd::size() - 1;
  CHECK(hvd::broadcast_object(make(hvd::rank()), root) == make(root));
  const auto all = hvd::allgather_object(make(hvd::rank()));
  REQUIRE(all.size() == static_cast<std::size_t>(hvd::size()));
  for (int r = 0; r < hvd::size(); ++r) CHECK(all[static_cast<std::size_t>(r)] == make(r));
}

TEST_CASE("broadcast_optimizer_state: a state that one rank refuses is taken by none") {
  if (hvd::size() == 1) return;
  using torch::optim::SGD, torch::optim::SGDOptions, torch::optim::SGDParamState;
  struct Refusing : SGD {
    using SGD::SGD;
    void load(torch::serialize::InputArchive&) override { TORCH_CHECK(false, "not mine"); }
  };
  at::Tensor weight = torch::zeros({3}, torch::requires_grad());
  const SGDOptions options = SGDOptions(0.1).momentum(0.9);
  SGD plain({weight}, options);
  Refusing refusing({weight}, options);
  SGD& mine = last() ? refusing : plain;
  (weight * (1.0 + hvd::rank())).sum().backward();
  mine.step();
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::broadcast_optimizer_state(mine, 0); }),
                 "not mine"));
  REQUIRE(mine.state().size() == 1);
  const auto& state = static_cast<const SGDParamState&>(*mine.state().begin()->second);
  CHECK(torch::equal(state.momentum_buffer(), torch::full({3}, 1.0 + hvd::rank())));
}

TEST_CASE("objects") {
  using Map = std::map<std::string, std::vector<int>>;
  check_object([](int r) { return r * 7; });
  check_object([](int r) { return 0.1 * r; });
  check_object([](int r) { return Plain{r, r / 3.0}; });
  check_object([](int r) {
    return std::string(static_cast<std::size_t>(r * 1000), 'a') + '\0' + std::to_string(r);
  });
  // empty on rank 0
  check_object([](int r) { return std::string(static_cast<std::size_t>(r), 'x'); });
  check_object([](int r) {
    return std::vector<std::string>(static_cast<std::size_t>(r), "rank " + std::to_string(r));
  });
  check_object([](int r) { return std::vector<bool>{r % 2 == 0, true, false}; });
  check_object([](int r) { return Map{{"rank", {r, r + 1}}, {std::to_string(r), {}}}; });
  check_object([](int r) { return std::pair<int, std::string>{r, "x"}; });
  check_object([](int r) { return std::map<int, double>{{r, 0.5 * r}, {-1, 2.5}}; });
  check_object([](int r) {
    return std::unordered_map<std::int64_t, bool>{{r, true}, {-1, false}};
  });
  check_object(
      [](int r) { return r == 0 ? std::nullopt : std::optional<std::string>(std::to_string(r)); });
  check_object([](int r) {
    return std::tuple<int, std::string, std::vector<double>>{r, "x", {0.5 * r}};
  });
  check_object([](int r) {
    using Variant = std::variant<int, std::string, std::vector<double>>;
    if (r == 0) return Variant(5);
    return r == 1 ? Variant("one") : Variant(std::vector<double>{0.5 * r});
  });
  check_object([](int r) { return std::set<std::string>{std::to_string(r), "x"}; });
  check_object([](int r) {
    return std::unordered_map<std::string, int>{{std::to_string(r), r}, {"x", 2}};
  });
  check_object([](int r) { return std::array<std::string, 2>{std::to_string(r), "x"}; });

  for (const auto type : kTypes) {
    const at::Tensor mine = data({hvd::rank() + 1, 2}, type, hvd::rank());
    CHECK(same(hvd::broadcast_object(mine, hvd::size() - 1),
               data({hvd::size(), 2}, type, hvd::size() - 1)));
    CHECK(same(mine, data({hvd::rank() + 1, 2}, type, hvd::rank())));
    const Tensors all = hvd::allgather_object(mine);
    for (int r = 0; r < hvd::size(); ++r)
      CHECK(same(all[static_cast<std::size_t>(r)], data({r + 1, 2}, type, r)));
  }
  CHECK(same(hvd::broadcast_object(torch::tensor(2.5 + hvd::rank()), 0), torch::tensor(2.5)));
  const Tensors list =
      hvd::broadcast_object(Tensors(static_cast<std::size_t>(hvd::rank() + 2), rank_tensor(1)), 0);
  REQUIRE(list.size() == 2);
  CHECK(same(list[1], torch::ones({3})));

  torch::nn::Linear linear(3, 2);
  torch::nn::init::constant_(linear->weight, hvd::rank());
  const auto modules = hvd::allgather_object(linear);
  for (int r = 0; r < hvd::size(); ++r)
    CHECK(same(modules[static_cast<std::size_t>(r)]->weight.detach(),
               torch::full({2, 3}, static_cast<float>(r))));
  CHECK(same(linear->weight.detach(), torch::full({2, 3}, static_cast<float>(hvd::rank()))));
  const torch::nn::Linear received = hvd::broadcast_object(linear, hvd::size() - 1);
  CHECK(same(received->weight.detach(), torch::full({2, 3}, static_cast<float>(hvd::size() - 1))));
  const auto pointed = std::make_shared<Pointed>();  // which cannot be cloned
  torch::nn::init::constant_(pointed->linear->weight, hvd::rank());
  const auto all_pointed = hvd::allgather_object(pointed);
  for (int r = 0; r < hvd::size(); ++r)
    CHECK(same(all_pointed[static_cast<std::size_t>(r)]->linear->weight.detach(),
               torch::full({1, 2}, static_cast<float>(r))));
  CHECK(hvd::broadcast_object(pointed, hvd::size() - 1) == pointed);
  CHECK(same(pointed->linear->weight.detach(),
             torch::full({1, 2}, static_cast<float>(hvd::size() - 1))));
  // tensors inside share nothing with the given ones
  const auto pair = hvd::broadcast_object(std::pair(rank_tensor(0), hvd::rank()), 0);
  CHECK(same(pair.first, torch::zeros({3})));
  CHECK_THROWS_AS(hvd::broadcast_object(1, hvd::size()), hvd::InvalidArgument);
}

}  // namespace
