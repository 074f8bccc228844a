// hvd::checkpoint: bit for bit the gradients without it, with less kept on the way.
#include <ATen/autocast_mode.h>

#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "tests/torch_bindings/tied_net.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;
using hvd::DistributedOptimizer;
using torch::optim::SGD, torch::optim::SGDOptions;

/// Blocks that use their input several times, draw random numbers and share a matrix.
struct BlockNet : torch::nn::Module {
  explicit BlockNet(bool with_checkpoints) : checkpoints(with_checkpoints) {
    shared = register_parameter("shared", data({8, 8}, kFloat, 0, 1) * 0.2);
    for (int i = 0; i < 3; ++i) {
      wide->push_back(torch::nn::Linear(8, 24));
      narrow->push_back(torch::nn::Linear(24, 8));
    }
    register_module("wide", wide);
    register_module("narrow", narrow);
    const torch::NoGradGuard no_gradient;
    int variant = 2;
    for (auto& parameter : parameters())
      parameter.copy_(data(parameter.sizes(), kFloat, 0, variant++) * 0.17);
  }
  at::Tensor block(const at::Tensor& x, int i) {
    const at::Tensor q = x.matmul(shared), k = torch::tanh(x), v = x * 0.37;
    const at::Tensor mixed = torch::softmax(q.matmul(k.t()), 1).matmul(v);
    const auto index = static_cast<std::size_t>(i);
    const at::Tensor h = torch::dropout(
        torch::gelu(wide[index]->as<torch::nn::Linear>()->forward(mixed)), 0.3, true);
    ++calls;
    return narrow[index]->as<torch::nn::Linear>()->forward(h) + torch::sigmoid(x);
  }
  at::Tensor forward(at::Tensor x) {
    for (int i = 0; i < 3; ++i) {
      if (checkpoints) {
        x = x +
            hvd::checkpoint(
                [this](const at::Tensor& input, int number) { return block(input, number); }, x, i);
      } else {
        x = x + block(x, i);
      }
    }
    return x.matmul(shared);
  }
  at::Tensor loss(int rank, int step) {
    torch::manual_seed(40 + rank * 7 + step);
    return forward(data({5, 8}, kFloat, rank, step) * 0.3).square().mean();
  }
  bool checkpoints;
  int calls = 0;
  at::Tensor shared;
  torch::nn::ModuleList wide, narrow;
};

void check_same_gradients(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto left = a.parameters(), right = b.parameters();
  for (std::size_t i = 0; i < left.size(); ++i) CHECK(same(left[i].grad(), right[i].grad()));
}

TEST_CASE(
    "checkpoint: gradients, and random numbers before and after, are bit for bit those without "
    "it") {
  BlockNet with(true), without(false);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor mine = with.loss(hvd::rank(), step);
    const at::Tensor drawn_after_forward = torch::rand({3});
    mine.backward();
    const at::Tensor drawn = torch::rand({3});
    const at::Tensor other = without.loss(hvd::rank(), step);
    CHECK(same(drawn_after_forward, torch::rand({3})));
    other.backward();
    CHECK(same(drawn, torch::rand({3})));
    CHECK(same(mine.detach(), other.detach()));
    check_same_gradients(with, without);
  }
  CHECK(without.calls == 9);
  CHECK(with.calls == 18);
}

TEST_CASE("checkpoint: a function that is called again is left when all is there") {
  int finished = 0;
  const at::Tensor weight = data({4, 4}, kFloat, 0, 1).requires_grad_();
  const at::Tensor bias = data({4}, kFloat, 0, 2).requires_grad_();
  const at::Tensor x = data({3, 4}, kFloat, hvd::rank());
  const auto part = [&](const at::Tensor& input) {
    // of which autograd keeps nothing
    const at::Tensor result = torch::tanh(input.matmul(weight)).matmul(weight) + bias;
    ++finished;
    return result;
  };
  hvd::checkpoint(part, x).sum().backward();
  CHECK(finished == 1);
  const at::Tensor gradient = weight.grad().clone();
  weight.mutable_grad().reset();
  // nothing may leave that
  hvd::checkpoint([&](const at::Tensor& input) noexcept { return part(input); }, x)
      .sum()
      .backward();
  CHECK(finished == 3);
  CHECK(same(weight.grad(), gradient));
}

TEST_CASE(
    "checkpoint with a DistributedOptimizer: reduced once for each parameter, the same parameters "
    "bit for bit") {
  for (const bool shard : {false, true}) {
    for (const int passes : {1, 2}) {
      CAPTURE(shard);
      CAPTURE(passes);
      BlockNet with(true), without(false);
      std::uint64_t submitted[2] = {0, 0};
      for (BlockNet* const net : {&with, &without}) {
        SGD sgd(net->parameters(), SGDOptions(0.1).momentum(0.9));
        DistributedOptimizer optimizer(
            sgd, net->named_parameters(),
            {.backward_passes_per_step = passes, .shard_optimizer_state = shard});
        for (int step = 0; step < 3; ++step) {
          const auto before = hvd::stats().tensors_submitted;
          step_together(*net, optimizer, step, passes);
          submitted[net == &with ? 0 : 1] += hvd::stats().tensors_submitted - before;
        }
        if (shard) optimizer.unshard();
      }
      CHECK(submitted[0] == submitted[1]);
      for (std::size_t i = 0; i < with.parameters().size(); ++i)
        CHECK(same(with.parameters()[i].detach(), without.parameters()[i].detach()));
      CHECK(equal_on_all_ranks(with));
    }
  }
}

TEST_CASE("checkpoint with DistributedDataParallel: hooks are called as without it") {
  std::vector<std::vector<at::Tensor>> gradients;
  for (const bool checkpoints : {true, false}) {
    const auto net = std::make_shared<BlockNet>(checkpoints);
    hvd::DistributedDataParallel<BlockNet> ddp(net);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      torch::manual_seed(hvd::rank() + step);
      ddp.forward(data({5, 8}, kFloat, hvd::rank(), step) * 0.3).square().mean().backward();
    }
    auto& all = gradients.emplace_back();
    for (const auto& parameter : net->parameters()) all.push_back(parameter.grad().clone());
  }
  for (std::size_t i = 0; i < gradients[0].size(); ++i)
    CHECK(same(gradients[0][i], gradients[1][i]));
  CHECK(same_on_all_ranks(gradients[0][0]));
}

TEST_CASE(
    "checkpoint within checkpoint: gradients are the same, and each part is computed again from "
    "the one around it") {
  std::vector<at::Tensor> gradients[2];
  int calls = 0;
  for (const bool checkpoints : {true, false}) {
    BlockNet net(false);
    const auto maybe = [checkpoints](const auto& part, const auto&... inputs) {
      return checkpoints ? hvd::checkpoint(part, inputs...) : part(inputs...);
    };
    torch::manual_seed(3);
    const at::Tensor x = (data({5, 8}, kFloat, hvd::rank()) * 0.3).requires_grad_();
    const at::Tensor all = maybe(
        [&](const at::Tensor& outer) {
          const at::Tensor a =
              maybe([&](const at::Tensor& h) { return net.block(h, 0) * h; }, outer);
          const auto inner = [&](const at::Tensor& h, const at::Tensor& g) {
            return maybe([&net](const at::Tensor& f) { return net.block(f, 1); }, h + g);
          };
          const at::Tensor b = maybe(inner, a, outer);
          return torch::tanh(b) + a;
        },
        x.exp());
    all.square().mean().backward();
    gradients[checkpoints ? 0 : 1] = {x.grad()};
    for (const auto& parameter : net.parameters())
      if (parameter.grad().defined()) gradients[checkpoints ? 0 : 1].push_back(parameter.grad());
    if (checkpoints) calls = net.calls;
  }
  REQUIRE(gradients[0].size() == gradients[1].size());
  for (std::size_t i = 0; i < gradients[0].size(); ++i)
    CHECK(same(gradients[0][i], gradients[1][i]));
  CHECK(calls > 4);
}

struct Results {
  at::Tensor first;
  std::vector<at::Tensor> rest;
};

TEST_CASE("checkpoint takes and returns what a function does") {
  const at::Tensor x = data({3}, kDouble, 0).requires_grad_(), y = data({3}, kDouble, 1),
                   index = torch::tensor({2, 0, 1});
  const auto expect = [&](const at::Tensor& result, const at::Tensor& plain) {
    const auto mine = torch::autograd::grad({result}, {x}),
               theirs = torch::autograd::grad({plain}, {x});
    CHECK(same(mine[0], theirs[0]));
  };
  const auto part = [](const at::Tensor& a, const at::Tensor& none, const std::string& text,
                       const at::Tensor& places, double factor) {
    const at::Tensor b = a.exp().index_select(0, places) * factor;
    return (none.defined() ? none : b.sin()).sum() * static_cast<double>(text.size());
  };
  expect(hvd::checkpoint(part, x * 2, at::Tensor(), "four", index, 0.3),
         part(x * 2, {}, "four", index, 0.3));

  const auto of_vector = [&](std::vector<at::Tensor> all, std::optional<at::Tensor> more,
                             const std::pair<at::Tensor, int>& pair) {
    all.push_back(more ? *more : pair.first);
    return Results{(all[0].exp() * all[1]).sum(),
                   {(all[2].cos() * pair.first.sin() * pair.second).sum()}};
  };
  const std::vector<at::Tensor> two{x * 1, y};
  for (const bool more : {true, false}) {
    const std::optional<at::Tensor> third = more ? std::optional<at::Tensor>(x * 3) : std::nullopt;
    const Results mine = hvd::checkpoint(of_vector, two, third, std::pair(x * 5, 2)),
                  plain = of_vector(two, third, {x * 5, 2});
    expect(mine.first + mine.rest[0], plain.first + plain.rest[0]);
  }
  const auto of_map = [](const std::map<std::string, at::Tensor>& all) {
    return (all.at("exponent").exp() * all.at("factor").sin()).sum();
  };
  const std::map<std::string, at::Tensor> named{{"exponent", x * 1}, {"factor", x * 2}};
  expect(hvd::checkpoint(of_map, named), of_map(named));
  const at::Tensor spoilt = hvd::checkpoint(of_map, named);
  named.at("factor").detach().zero_();  // an input as any other
  CHECK_THROWS_AS(spoilt.backward(), hvd::InvalidArgument);

  const auto [a, b] = hvd::checkpoint(
      [](const at::Tensor& h) { return std::tuple(h.exp().sum(), h.sin().sum()); }, x * 1);
  expect(a * b, x.exp().sum() * x.sin().sum());

  auto only = std::make_unique<double>(0.7);  // a function that can only be moved
  expect(hvd::checkpoint(
             [factor = std::move(only)](const at::Tensor& h) { return (h.exp() * *factor).sum(); },
             x * 1),
         (x.exp() * 0.7).sum());
  torch::nn::Linear linear(torch::nn::LinearOptions(3, 3).bias(false));
  linear->to(kDouble);
  torch::nn::Sequential sequential(linear, torch::nn::Tanh());
  expect(hvd::checkpoint(sequential, x * 1).sum(), sequential->forward(x * 1).sum());
  expect(hvd::checkpoint(
             [](torch::nn::Linear& layer, const at::Tensor& h) { return layer(h).exp().sum(); },
             std::ref(linear), x * 1),
         linear(x * 1).exp().sum());
  at::Tensor result;
  hvd::checkpoint([&](const at::Tensor& h) { result = h.exp().sum(); }, x * 1);  // returns nothing
  const at::Tensor first = result;
  CHECK(same(torch::autograd::grad({first}, {x})[0], x.detach().exp()));
}

TEST_CASE("checkpoint: a function with a state of its own begins again where it began") {
  struct Counting {
    double factor = 1;
    at::Tensor operator()(const at::Tensor& h) {
      factor *= 2;
      return (h.exp() * factor).sum();
    }
  };
  Counting function;
  const at::Tensor x = data({3}, kDouble, 0).requires_grad_();
  const at::Tensor result = hvd::checkpoint(function, x * 1);
  CHECK(function.factor == 2);
  result.backward();
  CHECK(function.factor == 2);
  CHECK(same(x.grad(), x.detach().exp() * 2));
}

TEST_CASE("checkpoint without gradients is a plain call") {
  int calls = 0;
  const at::Tensor x = data({3}, kDouble, 0).requires_grad_();
  const auto part = [&](const at::Tensor& h) {
    ++calls;
    return h.exp().sum();
  };
  {
    const torch::NoGradGuard no_gradient;
    CHECK(!hvd::checkpoint(part, x).requires_grad());
  }
  {
    const torch::InferenceMode inference;
    hvd::checkpoint(part, x);
  }
  CHECK(!hvd::checkpoint(part, x.detach()).requires_grad());
  CHECK(calls == 3);
}

TEST_CASE("checkpoint: what is computed on the way is freed, and what is computed again too") {
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  std::vector<Weak> all;
  const auto alive = [&] {
    return std::count_if(all.begin(), all.end(),
                         [](const Weak& storage) { return !storage.expired(); });
  };
  const auto note = [&](at::Tensor tensor) {
    all.emplace_back(tensor.storage().getWeakStorageImpl());
    return tensor;
  };
  const at::Tensor x = data({64}, kDouble, 0).requires_grad_();
  const auto part = [&](const at::Tensor& h) {
    return note(note(note(h.exp()).sin()).tanh()).mul(2);
  };
  at::Tensor y = hvd::checkpoint(
      [&](const at::Tensor& h) { return hvd::checkpoint(part, hvd::checkpoint(part, h)); }, x * 1);
  CHECK(all.size() == 6);
  CHECK(alive() == 0);
  y.sum().backward({}, /*retain_graph=*/true);
  CHECK(all.size() > 6);
  CHECK(alive() == 0);  // of what backward has done with
  const at::Tensor gradient = x.grad().clone();
  x.mutable_grad().reset();
  y.sum().backward();
  CHECK(same(x.grad(), gradient));
  CHECK(alive() == 0);
  const std::weak_ptr<int> function = [&] {
    const auto captured = std::make_shared<int>(1);
    hvd::checkpoint([captured](const at::Tensor& h) { return h.exp(); }, x).sum().backward();
    return std::weak_ptr(captured);
  }();
  CHECK(function.expired());
}

TEST_CASE("checkpoint: what is computed again does not outlive a backward pass that throws") {
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  std::vector<Weak> all;
  const auto note = [&](at::Tensor tensor) {
    all.emplace_back(tensor.storage().getWeakStorageImpl());
    return tensor;
  };
  bool fails = true;
  const at::Tensor x = data({64}, kDouble, 0).requires_grad_();
  const auto part = [&](const at::Tensor& h) {
    const at::Tensor middle = note(h.exp());
    middle.register_hook([&](const at::Tensor&) {
      if (fails) throw std::out_of_range("the dog ate it");
    });
    return note(middle.sin()).tanh().mul(2);
  };
  const at::Tensor y =
      hvd::checkpoint(
          [&](const at::Tensor& h) { return hvd::checkpoint(part, hvd::checkpoint(part, h)); },
          x * 1)
          .sum();
  for (int i = 0; i < 2; ++i)
    CHECK_THROWS_AS(y.backward({}, /*retain_graph=*/true), std::out_of_range);
  CHECK(all.size() > 6);
  CHECK(std::all_of(all.begin(), all.end(), [](const Weak& storage) { return storage.expired(); }));
  fails = false;
  y.backward();
  const at::Tensor a = x.detach().requires_grad_();
  const auto plain = [](const at::Tensor& h) { return h.exp().sin().tanh().mul(2); };
  plain(plain(a)).sum().backward();
  CHECK(same(x.grad(), a.grad()));
}

TEST_CASE("checkpoint: backward for some inputs only, twice, and to be differentiated") {
  const at::Tensor x = data({4}, kDouble, 0).requires_grad_(),
                   w = data({4}, kDouble, 1).requires_grad_();
  const auto part = [&](const at::Tensor& h) { return (h.exp() * w.sin()).tanh() * w; };
  const auto make = [&](bool checkpoints) {
    return (checkpoints ? hvd::checkpoint(part, x * 2) : part(x * 2)).sum();
  };
  const at::Tensor mine = make(true), plain = make(false);
  for (const at::Tensor& input : {w, x, w})
    CHECK(same(torch::autograd::grad({mine}, {input}, {}, true)[0],
               torch::autograd::grad({plain}, {input}, {}, true)[0]));
  const auto second = [&](const at::Tensor& result) {
    const at::Tensor first =
        torch::autograd::grad({result}, {x}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.square().sum()}, {x, w});
  };
  const auto of_mine = second(make(true)), of_plain = second(make(false));
  for (std::size_t i = 0; i < 2; ++i) CHECK(same(of_mine[i], of_plain[i]));
  const auto penalised = [&](const at::Tensor& h) {  // a backward pass within the function
    const at::Tensor inner = h.detach().requires_grad_();
    const at::Tensor slope =
        torch::autograd::grad({(inner.exp() * w).sum()}, {inner}, {}, true, true)[0];
    return (slope.square() * h.sin()).sum();
  };
  CHECK(same(torch::autograd::grad({hvd::checkpoint(penalised, x * 1)}, {w})[0],
             torch::autograd::grad({penalised(x * 1)}, {w})[0]));
}

TEST_CASE(
    "checkpoint: a backward pass within the function, the last that saves anything, again and "
    "again") {
  const at::Tensor x = data({3}, kDouble, 0).requires_grad_(),
                   w = data({3}, kDouble, 0, 1).requires_grad_();
  const auto force = [&](const at::Tensor& h) {
    return torch::autograd::grad({(h.exp() * w).sum()}, {h}, {}, true, true)[0];
  };
  for (int i = 0; i < 100; ++i)
    CHECK(same(torch::autograd::grad({hvd::checkpoint(force, x * 1).sum()}, {w})[0],
               torch::autograd::grad({force(x * 1).sum()}, {w})[0]));
}

TEST_CASE(
    "checkpoint: what the function throws when it is called again comes out of backward, and all "
    "goes on afterwards") {
  bool fails = false;
  const at::Tensor x = data({3}, kDouble, 0).requires_grad_();
  const auto part = [&](const at::Tensor& h) {
    const at::Tensor random = torch::rand({3}, kDouble);
    if (fails) throw std::out_of_range("the dog ate it");
    return (h.exp() * random).sum();
  };
  torch::manual_seed(5);
  const at::Tensor y = hvd::checkpoint(part, x * 1);
  const at::Tensor z = x.exp().sum();
  const at::Tensor next = [] {
    const auto generator = at::globalContext().defaultGenerator(at::kCPU);
    return generator.get_state();
  }();
  fails = true;
  CHECK(contains(error_of<std::out_of_range>([&] { y.backward({}, true); }), "the dog ate it"));
  CHECK(torch::equal(next, at::globalContext().defaultGenerator(at::kCPU).get_state()));
  z.backward({}, true);
  x.mutable_grad().reset();
  fails = false;
  y.backward();
  torch::manual_seed(5);
  CHECK(same(x.grad(), x.detach().exp() * torch::rand({3}, kDouble)));
  CHECK_THROWS_AS(hvd::checkpoint(
                      [](const at::Tensor& h) -> at::Tensor {
                        throw std::out_of_range(std::to_string(h.size(0)));
                      },
                      x),
                  std::out_of_range);
  x.exp().sum().backward();  // saved as ever
}

TEST_CASE("checkpoint refuses what it cannot do again") {
  const at::Tensor x = data({3}, kDouble, 0).requires_grad_(),
                   w = data({3}, kDouble, 1).requires_grad_();
  const auto change = [](const at::Tensor& tensor) {
    const torch::NoGradGuard no_gradient;
    tensor.add_(1);
  };
  const auto said = [](const at::Tensor& y) {
    return error_of<hvd::InvalidArgument>([&] { y.backward(); });
  };
  const auto part = [&](const at::Tensor& h) { return (h.exp() * w).sum(); };
  at::Tensor input = x * 1;
  at::Tensor y = hvd::checkpoint(part, input);
  change(input);
  CHECK(contains(said(y), "input of the function (float64 [3]) has been changed in place"));
  y = hvd::checkpoint([&](at::Tensor h) { return h.mul_(2).exp().sum(); }, x * 1);
  CHECK(contains(said(y), "or by the function itself"));
  y = hvd::checkpoint(part, x * 1);
  change(w);
  CHECK(contains(said(y), "a tensor that backward needs (float64 [3]) has been changed in place"));
  y = hvd::checkpoint(
      [&](const at::Tensor& h) {
        at::Tensor e = h.exp();
        const at::Tensor s = e.sin();
        e.mul_(2);
        return (s * w).sum() + e.sum();
      },
      x * 1);
  CHECK(contains(said(y), "has been changed in place"));
  int calls = 0;
  y = hvd::checkpoint(
      [&](const at::Tensor& h) { return (++calls == 1 ? h.exp().sin() : h.exp()).sum(); }, x * 1);
  CHECK(contains(said(y), "saved 1 tensors for backward, and 2 before"));
  calls = 0;
  y = hvd::checkpoint(
      [&](const at::Tensor& h) { return (++calls == 1 ? h : h.slice(0, 0, 2)).exp().sum(); },
      x * 1);
  CHECK(contains(said(y), "was Double [3] and is float64 [2] now"));
}

TEST_CASE("checkpoint under autocast: computed again in the same types, wherever backward runs") {
  std::vector<at::Tensor> gradients[2];
  for (const bool checkpoints : {true, false}) {
    BlockNet net(checkpoints);
    at::Tensor loss;
    {
      const hvd::AutocastGuard autocast(at::kCPU, at::kBFloat16);
      loss = net.loss(hvd::rank(), 0).to(kFloat);
    }
    loss.backward();
    CHECK(!at::autocast::is_autocast_enabled(at::kCPU));
    for (const auto& parameter : net.parameters())
      gradients[checkpoints ? 0 : 1].push_back(parameter.grad());
  }
  for (std::size_t i = 0; i < gradients[0].size(); ++i)
    CHECK(same(gradients[0][i], gradients[1][i]));
}

struct NormNet : torch::nn::Module {
  explicit NormNet(bool with_checkpoints) : checkpoints(with_checkpoints) {
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    of_all = register_module(
        "of_all", torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(6).momentum(std::nullopt)));
    together = register_module("together", hvd::SyncBatchNorm(6));
    instance = register_module(
        "instance",
        torch::nn::InstanceNorm1d(torch::nn::InstanceNorm1dOptions(6).track_running_stats(true)));
  }
  at::Tensor part(const at::Tensor& x) {
    at::Tensor own = torch::ones({}, at::kLong), real = torch::ones({}, x.options());
    own += 2;  // the function's own counters, which the graph saves
    real += 1;
    const at::Tensor once = of_all(norm(x)).exp() * own * real;
    return together(instance(norm(once).unsqueeze(2).expand({-1, -1, 3})).sum(2)) * x;
  }
  at::Tensor forward(const at::Tensor& x) {
    return checkpoints ? hvd::checkpoint([this](const at::Tensor& h) { return part(h); }, x)
                       : part(x);
  }
  bool checkpoints;
  torch::nn::BatchNorm1d norm{nullptr}, of_all{nullptr};
  hvd::SyncBatchNorm together{nullptr};
  torch::nn::InstanceNorm1d instance{nullptr};
};

TEST_CASE(
    "checkpoint: batch norm's running statistics take each batch once, also where Module::to() has "
    "made its counter a floating number") {
  for (const auto type : {kFloat, kDouble}) {
    NormNet with(true), without(false);
    if (type == kDouble) with.to(type), without.to(type);
    const at::Tensor x = data({4, 6}, type, hvd::rank());
    for (int step = 0; step < 2; ++step)
      for (NormNet* const net : {&with, &without}) {
        net->zero_grad();
        net->forward((x * (step + 1)).requires_grad_()).square().sum().backward();
      }
    check_same_gradients(with, without);
    for (const auto& buffer : with.named_buffers()) {
      CAPTURE(buffer.key());
      CHECK(same(buffer.value(), without.named_buffers()[buffer.key()]));
    }
    CHECK(
        (with.norm->num_batches_tracked.scalar_type() == (type == kDouble ? kDouble : at::kLong)));
    CHECK(with.norm->num_batches_tracked.item<std::int64_t>() == 4);
  }
}

TEST_CASE("checkpoint in several threads at once") {
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (std::size_t t = 0; t < 4; ++t)
    threads.emplace_back([t, &wrong] {
      const at::Tensor x = data({6}, kDouble, static_cast<int>(t)).requires_grad_();
      for (int i = 0; i < 20; ++i) {
        x.mutable_grad().reset();
        hvd::checkpoint([](const at::Tensor& h) { return h.exp().sin(); }, x * 1).sum().backward();
        const at::Tensor e = x.detach().exp();
        if (difference(x.grad(), e * e.cos()) > 1e-12) ++wrong[t];
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(4, 0));
}

}  // namespace
