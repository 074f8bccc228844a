// What happens if I ... : clip gradients.
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tests/torch_bindings/support.h"
#include "torch_bindings/reducer/reducer.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;
using hvd::DistributedOptimizer;
using hvd::DistributedOptimizerOptions;
using torch::nn::Sequential;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

/// One process with the average of all ranks' losses, clipped as LibTorch does. Returns the norms.
std::vector<double> train_alone(Sequential& net, int steps, double max_norm, double norm_type) {
  torch::optim::Adam plain(net->parameters(), torch::optim::AdamOptions(0.01));
  std::vector<double> norms;
  for (int step = 0; step < steps; ++step) {
    plain.zero_grad();
    at::Tensor sum = torch::zeros({}, net->parameters()[0].options().requires_grad(false));
    for (const int rank : everyone()) sum = sum + small_loss(net, rank, step);
    (sum / hvd::size()).backward();
    norms.push_back(torch::nn::utils::clip_grad_norm_(net->parameters(), max_norm, norm_type));
    plain.step();
  }
  return norms;
}

TEST_CASE(
    "what happens if I call hvd::clip_grad_norm_ before step(): the gradients of all ranks "
    "together are clipped, once reduced") {
  with_and_without_one_copy();
  for (const auto type : {kDouble, kFloat}) {
    for (const double norm_type : {2.0, 1.0, 3.5, kUnbounded}) {
      for (const bool sharded : {false, true}) {
        const double tolerance = type == kDouble ? 1e-12 : 1e-5;
        Sequential net = small_model(type), alone = small_model(type);
        torch::optim::Adam plain(net->parameters(), torch::optim::AdamOptions(0.01));
        DistributedOptimizer optimizer(
            plain, net->named_parameters(),
            {.shard_optimizer_state = sharded, .share_parameters = sharded && one_copy});
        const auto norms = train_alone(alone, 3, 0.05, norm_type);
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          small_loss(net, hvd::rank(), step).backward();
          const double norm = hvd::clip_grad_norm_(optimizer, 0.05, norm_type);
          CHECK(norm == doctest::Approx(norms[static_cast<std::size_t>(step)]).epsilon(tolerance));
          const auto before = hvd::stats().tensors_submitted;
          // again: nothing is left to clip
          CHECK(hvd::clip_grad_norm_(optimizer, 1e9, norm_type) <= 0.05 * (1 + tolerance));
          CHECK(hvd::stats().tensors_submitted == before);
          optimizer.step();
        }
        CHECK(difference(flat(net), flat(alone)) < 1e3 * tolerance);
        CHECK(same_on_all_ranks(flat(net)));
      }
    }
  }
}

TEST_CASE(
    "what happens if hvd::clip_grad_norm_ meets sparse, tied, empty and absent gradients: each "
    "counts once, or not") {
  struct Net : torch::nn::Module {
    torch::nn::Embedding table{nullptr};
    at::Tensor idle, empty, tied;
    Net() {
      table = register_module("table",
                              torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 2).sparse(true)));
      idle = register_parameter("idle", torch::ones({3}));
      empty = register_parameter("empty", torch::ones({0, 2}));
      tied = register_parameter("tied", torch::ones({2}));
      register_parameter("tied_again", tied);
      const torch::NoGradGuard no_gradient;
      table->weight.fill_(1);
    }
  };
  const auto net = std::make_shared<Net>();
  SGD plain({net->table->weight, net->idle, net->empty, net->tied, net->tied}, SGDOptions(0.1));
  DistributedOptimizer optimizer(plain, net->named_parameters());
  CHECK(hvd::clip_grad_norm_(optimizer, 1) == 0);  // no gradient anywhere
  // Every rank gives 3 to row 1 (twice), and 4 to `tied`.
  (net->table->forward(torch::tensor({1, 1})).sum() * 1.5 + (net->tied * 4).sum() +
   net->empty.sum())
      .backward();
  const double norm = hvd::clip_grad_norm_(optimizer, 1);
  CHECK(norm == doctest::Approx(std::sqrt(2 * 9 + 2 * 16)));
  CHECK(!net->idle.grad().defined());
  CHECK(net->table->weight.grad().is_sparse());
  CHECK(net->table->weight.grad().to_dense()[1][0].item<double>() == doctest::Approx(3 / norm));
  CHECK(net->tied.grad()[0].item<double>() == doctest::Approx(4 / norm));
  optimizer.step();
  CHECK(same_on_all_ranks(net->table->weight));
}

TEST_CASE(
    "what happens if I call hvd::clip_grad_value_ before step(): each element of the reduced "
    "gradients is clipped, once reduced") {
  with_and_without_one_copy();
  std::vector<DistributedOptimizerOptions> all;
  all.push_back({});
  all.push_back({.groups = 3});
  all.push_back({.gradients_are_views = false});
  all.push_back({.shard_optimizer_state = true, .share_parameters = one_copy});
  if (!one_copy) all.push_back({.shard_gradients = true});
  for (const auto& options : all) {
    Sequential net = small_model(), alone = small_model();
    torch::optim::SGD plain(net->parameters(), SGDOptions(0.1).momentum(0.9)),
        reference(alone->parameters(), SGDOptions(0.1).momentum(0.9));
    DistributedOptimizer optimizer(plain, net->named_parameters(), options);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      small_loss(net, hvd::rank(), step).backward();
      hvd::clip_grad_value_(optimizer, 0.02);
      const auto before = hvd::stats().tensors_submitted;
      hvd::clip_grad_value_(optimizer, 0.5);  // again: nothing is left to clip
      CHECK(hvd::stats().tensors_submitted == before);
      optimizer.step();
      reference.zero_grad();
      at::Tensor sum = torch::zeros({}, kDouble);
      for (const int rank : everyone()) sum = sum + small_loss(alone, rank, step);
      (sum / hvd::size()).backward();
      bool clips = false;
      for (const auto& parameter : alone->parameters())
        clips = clips || parameter.grad().abs().max().item<double>() > 0.02;
      CHECK(clips);
      torch::nn::utils::clip_grad_value_(alone->parameters(), 0.02);
      reference.step();
    }
    CHECK(difference(flat(net), flat(alone)) < 1e-12);
    CHECK(same_on_all_ranks(flat(net)));
  }
}

TEST_CASE(
    "what happens if hvd::clip_grad_value_ meets sparse gradients, masters and wrong bounds: "
    "values, fp32 gradients, InvalidArgument") {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(6, 2).sparse(true));
  hvd::broadcast_parameters(*table, 0);
  SGD plain(table->parameters(), SGDOptions(0.1));
  DistributedOptimizer optimizer(plain, table->named_parameters());
  hvd::clip_grad_value_(optimizer, 1);  // no gradient anywhere
  table->forward(torch::tensor({1, 1})).sum().backward();
  hvd::clip_grad_value_(optimizer, 1.5);
  CHECK(table->weight.grad().is_sparse());
  CHECK(table->weight.grad().to_dense()[1][0].item<float>() == 1.5F);
  optimizer.step();
  for (const double bound : {-1.0, std::nan("")})
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::clip_grad_value_(optimizer, bound); }),
                   "clip_value"));

  // A gradient of 8, scaled by 4: what is clipped is the fp32 gradient that the optimizer sees.
  const at::Tensor half = torch::ones({2}, at::kHalf).requires_grad_();
  SGD of_halves({half}, SGDOptions(1));
  hvd::MasterWeights masters(of_halves);
  DistributedOptimizer around(masters, {{"half", half}});
  hvd::GradScaler scaler({.init_scale = 4});
  scaler.scale((half * 8).sum()).backward();
  scaler.unscale_(around);
  hvd::clip_grad_value_(around, 0.25);
  scaler.step(around);
  scaler.update();
  CHECK(half[0].item<float>() == 0.75F);
  around.zero_grad();
  (half * 8).sum().backward();
  around.synchronize();
  hvd::clip_grad_value_(masters, 0.5);
  around.step();
  CHECK(half[0].item<float>() == 0.25F);
}

TEST_CASE(
    "what happens if I clip with a wrong norm or limit: InvalidArgument, before anything is sent") {
  Sequential net = small_model();
  SGD plain(net->parameters(), SGDOptions(0.1));
  DistributedOptimizer optimizer(plain, net->named_parameters());
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::clip_grad_norm_(optimizer, -1); }),
                 "max_norm"));
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::clip_grad_norm_(optimizer, 1, 0); }),
                 "norm_type"));
}

TEST_CASE(
    "what happens if I clip between backward() and step() as in one process: an error on all ranks "
    "that says what to call") {
  with_and_without_one_copy();
  std::vector<DistributedOptimizerOptions> all;
  all.push_back({});
  all.push_back({.compression = hvd::Compression::bf16()});
  all.push_back({.groups = 3});
  all.push_back({.backward_passes_per_step = 2});
  all.push_back({.shard_optimizer_state = true, .share_parameters = one_copy});
  all.push_back({.gradients_are_views = false});
  for (const auto& options : all) {
    Sequential net = small_model(), alone = small_model();
    SGD plain(net->parameters(), SGDOptions(0.1));
    DistributedOptimizer optimizer(plain, net->named_parameters(), options);
    const auto give = [&](int step) {
      optimizer.zero_grad();
      for (int pass = 0; pass < options.backward_passes_per_step; ++pass)
        small_loss(net, hvd::rank(), step + pass).backward();
    };
    const auto refused = [&](const std::function<void()>& change) {
      give(0);
      change();
      const at::Tensor before = flat(net);
      const std::string text = error_of<hvd::InvalidArgument>([&] { optimizer.step(); });
      if (hvd::size() == 1) {
        CHECK(text == "(no error)");  // a world of one is one process
        return;
      }
      CHECK(contains(text, "call synchronize() before clipping"));
      CHECK(contains(text, "gradient of '"));
      CHECK(same(flat(net), before));
    };
    refused([&] { torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01); });
    refused([&] { torch::nn::utils::clip_grad_value_(net->parameters(), 0.01); });
    refused([&] { net->parameters()[3].mutable_grad().div_(2); });
    refused([&] { net->parameters()[1].mutable_grad() = net->parameters()[1].grad() * 0.5; });
    // It works again, and what only reads gradients is no change.
    give(3);
    at::Tensor looked_at = torch::zeros({}, kDouble);
    for (const auto& parameter : net->parameters())
      looked_at += parameter.grad().data().norm() + parameter.grad().detach().sum();
    optimizer.synchronize();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 0.05);
    optimizer.step();
    CHECK(same_on_all_ranks(flat(net)));
  }
}

TEST_CASE(
    "what happens if one rank alone clips before step(): an error there, Mismatch on all in what "
    "comes next, and then all go on") {
  with_and_without_one_copy();
  if (hvd::size() == 1) return;
  std::vector<DistributedOptimizerOptions> all;
  all.push_back({});
  all.push_back({.compression = hvd::Compression::bf16()});
  all.push_back({.shard_optimizer_state = true, .share_parameters = one_copy});
  all.push_back({.gradients_are_views = false});
  for (const auto& options : all) {
    Sequential net = small_model();
    SGD plain(net->parameters(), SGDOptions(0.1));
    DistributedOptimizer optimizer(plain, net->named_parameters(), options);
    const auto give = [&](int step) {
      optimizer.zero_grad();
      small_loss(net, hvd::rank(), step).backward();
    };
    give(0);
    optimizer.step();
    give(1);
    if (last()) torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01);
    std::string text;
    if (last()) {
      CHECK(contains(error_of<hvd::InvalidArgument>([&] { optimizer.step(); }), "before clipping"));
    } else {
      text = error_of<hvd::Mismatch>([&] { optimizer.step(); });
      CHECK(contains(text, options.shard_optimizer_state
                               ? last_rank() + " has made no step: gradient of '"
                               : "(no error)"));
    }
    if (options.shard_optimizer_state) CHECK(same_on_all_ranks(flat(net)));
    give(2);
    const auto step = [&] { optimizer.step(); };
    if (options.shard_optimizer_state) {
      step();  // they have heard of it, and none has made a step
    } else {
      text = error_of<hvd::Mismatch>(step);
      INFO(text);
      CHECK(contains(text, last_rank() + " has not made its last step, as the gradient of '"));
      hvd::broadcast_parameters(*net, 0);
      give(3);
      step();
    }
    CHECK(same_on_all_ranks(flat(net)));
  }
}

TEST_CASE(
    "what happens if one rank alone clips under LBFGS or GradScaler: an error there, Mismatch on "
    "the others, and then all go on") {
  if (hvd::size() == 1) return;
  Sequential net = small_model();
  torch::optim::LBFGS lbfgs(net->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3));
  DistributedOptimizer by_closure(lbfgs, net->named_parameters());
  bool clips = last();
  const auto step = [&] {
    by_closure.step([&] {
      by_closure.zero_grad();
      const at::Tensor loss = small_loss(net, hvd::rank(), 0);
      loss.backward();
      if (clips) net->parameters()[0].mutable_grad().mul_(0.5);
      return loss;
    });
  };
  if (last()) {
    CHECK(contains(error_of<hvd::InvalidArgument>(step), "before clipping"));
  } else {
    CHECK(contains(error_of<hvd::Mismatch>(step), last_rank() + ": gradient of '"));
  }
  clips = false;
  step();
  CHECK(same_on_all_ranks(flat(net)));

  SGD plain(net->parameters(), SGDOptions(0.1));
  DistributedOptimizer optimizer(plain, net->named_parameters());
  hvd::GradScaler scaler({.init_scale = 4});
  for (int number = 0; number < 3; ++number) {
    optimizer.zero_grad();
    scaler.scale(small_loss(net, hvd::rank(), number)).backward();
    if (number == 1 && last()) net->parameters()[0].mutable_grad().mul_(0.5);
    const auto unscale = [&] { scaler.unscale_(optimizer); };
    if (number == 1) {
      const std::string text =
          last() ? error_of<hvd::InvalidArgument>(unscale) : error_of<hvd::Mismatch>(unscale);
      CHECK(contains(text, last() ? "before clipping" : last_rank() + ": gradient of '"));
      continue;
    }
    scaler.step(optimizer);
    scaler.update();
  }
  CHECK(same_on_all_ranks(flat(net)));
}

TEST_CASE(
    "what happens if I clip before step() where gradients are taken bucket by bucket, as on a GPU: "
    "the same error") {
  int number = 0;
  for (const bool views : {true, false}) {
    Sequential net = small_model(kFloat);
    std::vector<hvd::GradientReducer::Named> named;
    for (const auto& item : net->named_parameters()) named.push_back({item.key(), item.value()});
    const auto reducer = std::make_shared<hvd::GradientReducer>(
        named, DistributedOptimizerOptions{.groups = 2, .gradients_are_views = views}, number++,
        "clipped", hvd::GradientReducer::Taking::Together);
    reducer->hook();
    for (const bool clipped : {true, false, true}) {
      small_loss(net, hvd::rank(), 0).backward();
      if (clipped) torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01);
      const std::string text = error_of<hvd::InvalidArgument>([&] { reducer->synchronize(); });
      CHECK(contains(text, "before clipping") == (clipped && hvd::size() > 1));
      reducer->settle();
      net->zero_grad();
      // Thrown away by the module: a new count.
      small_loss(net, hvd::rank(), 1).backward();
      net->zero_grad();
      small_loss(net, hvd::rank(), 2).backward();
      reducer->synchronize();
      std::vector<at::Tensor> all;
      for (const int rank : everyone()) {
        Sequential other = small_model(kFloat);
        small_loss(other, rank, 2).backward();
        all.push_back(other->parameters()[0].grad());
      }
      CHECK(difference(net->parameters()[0].grad(), reduced(all, hvd::ReduceOp::Average)) < 1e-6);
      reducer->settle();
      net->zero_grad();
    }
    reducer->unhook();
  }
}

TEST_CASE(
    "what happens if I clip before step() in a world of one: it counts, as without the wrapper") {
  const bool included = hvd::rank() == 0;
  const hvd::ProcessSet set = hvd::add_process_set({0});
  if (included) {
    for (const auto& compression : {hvd::Compression::none(), hvd::Compression::fp16()}) {
      Sequential net = small_model(), alone = small_model();
      SGD plain(net->parameters(), SGDOptions(0.1)),
          reference(alone->parameters(), SGDOptions(0.1));
      DistributedOptimizer optimizer(plain, net->named_parameters(),
                                     {.compression = compression, .process_set = set});
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        reference.zero_grad();
        small_loss(net, 0, step).backward();
        small_loss(alone, 0, step).backward();
        torch::nn::utils::clip_grad_norm_(net->parameters(), 0.05);
        torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.05);
        optimizer.step();
        reference.step();
        CHECK(same(flat(net), flat(alone)));
      }
    }
  }
  hvd::remove_process_set(set);
}

TEST_CASE(
    "what happens if I clip after GradScaler::unscale_(): the unscaled gradients of all ranks, "
    "reduced once") {
  Sequential net = small_model(), alone = small_model();
  torch::optim::Adam plain(net->parameters(), torch::optim::AdamOptions(0.01));
  DistributedOptimizer optimizer(plain, net->named_parameters());
  hvd::GradScaler scaler({.init_scale = 1024});
  const auto norms = train_alone(alone, 3, 0.05, 2);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    scaler.scale(small_loss(net, hvd::rank(), step)).backward();
    scaler.unscale_(optimizer);
    CHECK(hvd::clip_grad_norm_(optimizer, 0.05) ==
          doctest::Approx(norms[static_cast<std::size_t>(step)]));
    scaler.step(optimizer);
    scaler.update();
  }
  CHECK(difference(flat(net), flat(alone)) < 1e-9);
}

TEST_CASE("what happens if I clip 16-bit gradients: their norm is that of an fp32 computation") {
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    at::Tensor weight = torch::ones({1000}, at::TensorOptions(type)).requires_grad_();
    SGD plain({weight}, SGDOptions(0.1));
    DistributedOptimizer optimizer(plain);
    (weight * (1 + hvd::rank())).sum().backward();
    const double norm = hvd::grad_norm(optimizer);
    CHECK(norm == doctest::Approx(std::sqrt(1000) * (hvd::size() + 1) / 2).epsilon(1e-5));
  }
}

}  // namespace
