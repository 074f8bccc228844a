// What happens if I ... : give the ranks' gradients weights.
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tests/torch_bindings/support.h"
#include "tests/torch_bindings/wrapped_optimizers.h"

namespace {

using namespace hvd::test;
using at::kDouble;
using hvd::DistributedOptimizer;
using hvd::DistributedOptimizerOptions;
using hvd::InvalidArgument;
using hvd::Mismatch;
using torch::nn::Sequential;

/// The parameters after a step in which `rank`'s mean gradient counts `weight(rank)`.
template <class Weight>
at::Tensor weighted(const Weight& weight, int step = 0) {
  Sequential net = small_model();
  at::Tensor sum = torch::zeros({}, kDouble);
  double all = 0;
  for (const int rank : everyone()) {
    sum = sum + small_loss(net, rank, step) * weight(rank);
    all += weight(rank);
  }
  (sum / all).backward();
  wrapped::sgd(net->parameters())->step();
  return flat(net);
}
at::Tensor plain_mean() {
  return weighted([](int) { return 1.0; });
}

struct Training {
  explicit Training(const DistributedOptimizerOptions& options = {})
      : optimizer(*plain, net->named_parameters(), options) {}
  void backward(int step = 0) {
    optimizer.zero_grad();
    small_loss(net, hvd::rank(), step).backward();
  }
  Sequential net = small_model();
  std::unique_ptr<torch::optim::Optimizer> plain = wrapped::sgd(net->parameters());
  DistributedOptimizer optimizer;
};

TEST_CASE(
    "what happens if I set a weight that is none: InvalidArgument, and the step is as if I had "
    "not") {
  Training one;
  for (const double weight : {-1.0, std::nan(""), std::numeric_limits<double>::infinity(), 1e17})
    CHECK(contains(error_of<InvalidArgument>([&] { one.optimizer.set_weight(weight); }),
                   "rows or tokens"));
  one.backward();
  one.optimizer.step();
  CHECK(difference(flat(one.net), plain_mean()) < 1e-12);
}

TEST_CASE(
    "what happens if I set weights with Sum or Adasum: InvalidArgument on every rank that does") {
  for (const auto op : {hvd::ReduceOp::Sum, hvd::ReduceOp::Adasum}) {
    Training one({.op = op});
    CHECK(contains(error_of<InvalidArgument>([&] { one.optimizer.set_weight(3); }),
                   "ReduceOp::Average"));
  }
}

TEST_CASE(
    "what happens if only one rank sets a weight: a Mismatch on all ranks that names it, whatever "
    "else is set; then all is well") {
  std::vector<DistributedOptimizerOptions> all;
  all.push_back({});
  all.push_back({.groups = 3});
  all.push_back({.compression = hvd::Compression::bf16()});
  all.push_back({.compression = hvd::Compression::topk(1)});      // all parameters go compressed
  all.push_back({.compression = hvd::Compression::powersgd(1)});  // some do
  all.push_back({.gradient_predivide_factor = 2});
  all.push_back({.shard_optimizer_state = true});
  all.push_back({.shard_gradients = true});
  all.push_back({.gradients_are_views = false});
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (const bool last_sets : {true, false}) {
      CAPTURE(i);
      CAPTURE(last_sets);
      Training one(all[i]);
      const at::Tensor before = flat(one.net);
      one.optimizer.zero_grad();
      if (last() == last_sets) one.optimizer.set_weight(3);
      one.backward();
      if (hvd::size() == 1) {
        one.optimizer.step();
        continue;
      }
      const std::string text = error_of<Mismatch>([&] { one.optimizer.step(); });
      CHECK(!contains(text, "(no error)"));
      if (i != 3) CHECK(contains(text, "has called set_weight()"));
      if (i != 3 && last_sets) CHECK(contains(text, last_rank() + " has called set_weight()"));
      CHECK(same(flat(one.net), before));
      // The weight is still there: nothing goes on silently without it.
      one.backward();
      CHECK(!contains(error_of<Mismatch>([&] { one.optimizer.step(); }), "(no error)"));
      if (i >= 3 && i <= 4) continue;  // what was remembered of the gradients is another
      one.optimizer.zero_grad();
      one.optimizer.set_weight(hvd::rank() + 1);
      one.backward();
      one.optimizer.step();
      const double bound = i == 2 ? 1e-2 : 1e-12;
      CHECK(difference(flat(one.net), weighted([](int rank) { return rank + 1.0; })) < bound);
    }
  }
}

TEST_CASE(
    "what happens if only one rank sets a weight, and I reduce again without a new backward pass: "
    "as if it had not failed") {
  if (hvd::size() == 1) return;
  Training one;
  one.optimizer.zero_grad();
  if (last()) one.optimizer.set_weight(3);
  one.backward();
  CHECK(!contains(error_of<Mismatch>([&] { one.optimizer.synchronize(); }), "(no error)"));
  one.optimizer.set_weight(hvd::rank() + 1);
  one.optimizer.step();
  CHECK(difference(flat(one.net), weighted([](int rank) { return rank + 1.0; })) < 1e-12);
}

TEST_CASE(
    "what happens if a weighted round fails: Mismatch on all, and gradients are as backward has "
    "left them") {
  if (hvd::size() == 1) return;
  const auto type = last() ? at::kFloat : kDouble;
  for (const bool views : {true, false}) {
    Sequential net = small_model(type), alone = small_model(type);
    const auto plain = wrapped::sgd(net->parameters());
    DistributedOptimizer optimizer(*plain, net->named_parameters(), {.gradients_are_views = views});
    optimizer.set_weight(hvd::rank() + 1);
    small_loss(net, hvd::rank(), 0).backward();
    CHECK(contains(error_of<Mismatch>([&] { optimizer.step(); }), "float64"));
    small_loss(alone, hvd::rank(), 0).backward();
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      CHECK(difference(net->parameters()[i].grad(), alone->parameters()[i].grad()) <
            (last() ? 1e-6 : 1e-12));
  }
}

TEST_CASE(
    "what happens if only one rank sets a weight of a DistributedDataParallel: a Mismatch on all, "
    "and the next pass is a plain one") {
  Sequential net = small_model();
  hvd::DistributedDataParallel ddp(net);
  CHECK(contains(error_of<InvalidArgument>([&] { ddp.set_weight(-1); }), "rows or tokens"));
  const auto pass = [&] {
    torch::mse_loss(ddp(data({5, 6}, kDouble, hvd::rank())), data({5, 3}, kDouble, hvd::rank(), 1))
        .backward();
  };
  if (hvd::size() > 1) {
    if (last()) ddp.set_weight(3);
    const std::string text = error_of<Mismatch>(pass);
    CHECK(contains(text, last_rank() + " has called set_weight()"));
  }
  net->zero_grad();
  ddp.set_weight(hvd::rank() + 1);  // of one pass
  pass();
  net->zero_grad();
  pass();
  wrapped::sgd(net->parameters())->step();
  CHECK(difference(flat(net), plain_mean()) < 1e-12);
}

TEST_CASE(
    "what happens if I set the weight after backward() or after synchronize(): InvalidArgument "
    "that says when to; the step goes on") {
  Training one;
  one.backward();
  CHECK(contains(error_of<InvalidArgument>([&] { one.optimizer.set_weight(2); }),
                 "before the step's first backward()"));
  one.optimizer.synchronize();
  CHECK(contains(error_of<InvalidArgument>([&] { one.optimizer.set_weight(2); }), "after step()"));
  one.optimizer.step();
  CHECK(difference(flat(one.net), plain_mean()) < 1e-12);
  Training two({.backward_passes_per_step = 2});
  two.backward();
  CHECK(contains(error_of<InvalidArgument>([&] { two.optimizer.set_weight(2); }),
                 "all rows or tokens of the step"));
}

TEST_CASE(
    "what happens if I set the weight once: it is that of one step; the next is a plain average") {
  Training one;
  one.optimizer.set_weight(hvd::rank() + 1);
  one.backward();
  one.optimizer.step();
  CHECK(difference(flat(one.net), weighted([](int rank) { return rank + 1.0; })) < 1e-12);
  one.optimizer.set_weight(7);
  one.optimizer.set_weight(hvd::size() - hvd::rank());  // the last one counts
  one.backward(1);
  const at::Tensor before = flat(one.net).clone();
  one.optimizer.step();
  CHECK(!same(before, flat(one.net)));
  CHECK(same_on_all_ranks(flat(one.net)));
  Training two;
  for (int step = 0; step < 2; ++step) {
    if (step == 0) two.optimizer.set_weight(hvd::rank() + 1);
    two.backward(step);
    two.optimizer.step();
  }
  Training three;
  for (int step = 0; step < 2; ++step) {
    three.optimizer.set_weight(step == 0 ? hvd::rank() + 1 : 4);  // all the same: a plain average
    three.backward(step);
    three.optimizer.step();
  }
  CHECK(difference(flat(two.net), flat(three.net)) < 1e-12);
}

TEST_CASE("what happens if all ranks say 0: the gradients are zeros, and no NaN") {
  for (const auto& compression :
       {hvd::Compression::none(), hvd::Compression::fp16(), hvd::Compression::int8()}) {
    Training one({.compression = compression});
    one.optimizer.zero_grad();
    one.optimizer.set_weight(0);
    (small_loss(one.net, hvd::rank(), 0) * std::numeric_limits<double>::quiet_NaN()).backward();
    const at::Tensor before = flat(one.net);
    one.optimizer.synchronize();
    for (const auto& parameter : one.net->parameters()) CHECK(!parameter.grad().any().item<bool>());
    one.optimizer.step();
    CHECK(same(flat(one.net), before));
  }
}

TEST_CASE(
    "what happens if a rank with weight 0 has made no backward pass: it counts as one whose "
    "gradients are thrown away") {
  Training one;
  one.optimizer.zero_grad();
  const bool idle = last() && hvd::size() > 1;
  one.optimizer.set_weight(idle ? 0 : 2);
  if (!idle) small_loss(one.net, hvd::rank(), 0).backward();
  one.optimizer.step();
  CHECK(difference(flat(one.net), weighted([](int rank) {
                     return rank == hvd::size() - 1 && rank > 0 ? 0.0 : 2.0;
                   })) < 1e-12);
}

TEST_CASE(
    "what happens if I clip with weights: the weighted mean of all ranks is clipped, and not "
    "reduced again") {
  Training one;
  one.optimizer.set_weight(hvd::rank() + 1);
  one.backward();
  const double norm = hvd::clip_grad_norm_(one.optimizer, 1e9);
  CHECK(hvd::clip_grad_norm_(one.optimizer, 1e9) == norm);
  one.optimizer.step();
  CHECK(difference(flat(one.net), weighted([](int rank) { return rank + 1.0; })) < 1e-12);
}

TEST_CASE(
    "what happens if I throw gradients away after set_weight(): the weight stays for the step that "
    "is made") {
  Training one;
  one.optimizer.set_weight(hvd::rank() + 1);
  one.backward(1);
  one.backward(0);  // zero_grad() first
  one.optimizer.step();
  CHECK(difference(flat(one.net), weighted([](int rank) { return rank + 1.0; })) < 1e-12);
}

TEST_CASE(
    "what happens if I call backward() again after synchronize() with weights: what has come since "
    "is averaged with the same weights") {
  Training one;
  const auto weight = [](int rank) { return rank + 1.0; };
  one.optimizer.set_weight(weight(hvd::rank()));
  one.backward();
  one.optimizer.synchronize();
  small_loss(one.net, hvd::rank(), 1).backward();
  one.optimizer.step();
  Sequential alone = small_model();
  at::Tensor sum = torch::zeros({}, kDouble);
  double all = 0;
  for (const int rank : everyone()) {
    sum = sum + (small_loss(alone, rank, 0) + small_loss(alone, rank, 1)) * weight(rank);
    all += weight(rank);
  }
  (sum / all).backward();
  wrapped::sgd(alone->parameters())->step();
  CHECK(difference(flat(one.net), flat(alone)) < 1e-12);
}

TEST_CASE(
    "what happens if I set a weight in a step that synchronizes by itself (skip_synchronize): it "
    "ends with that step") {
  Training one;
  one.optimizer.set_weight(hvd::rank() + 1);
  one.backward();
  one.optimizer.synchronize();
  {
    const auto skip = one.optimizer.skip_synchronize();
    one.optimizer.step();
  }
  CHECK(difference(flat(one.net), weighted([](int rank) { return rank + 1.0; })) < 1e-12);
  one.backward(1);
  one.optimizer.step();
  CHECK(same_on_all_ranks(flat(one.net)));
}

TEST_CASE(
    "what happens if ranks take different branches of a model with weights: a missing gradient "
    "counts as zeros, with its weight") {
  Sequential net = small_model();
  torch::manual_seed(2);
  torch::nn::Linear extra(3, 1);
  extra->to(kDouble);
  std::vector<at::Tensor> parameters = net->parameters();
  for (const auto& parameter : extra->parameters()) parameters.push_back(parameter);
  const auto plain = wrapped::sgd(parameters);
  DistributedOptimizer optimizer(*plain);
  optimizer.set_weight(hvd::rank() + 1);
  at::Tensor loss = small_loss(net, hvd::rank(), 0);
  if (hvd::rank() == 0) loss = loss + extra->forward(torch::ones({2, 3}, kDouble)).sum();
  loss.backward();
  optimizer.synchronize();
  const double all = hvd::size() * (hvd::size() + 1) / 2.0;
  CHECK(extra->bias.grad().item<double>() == doctest::Approx(2 / all));
}

TEST_CASE(
    "what happens if a group that came later has a gradient on one rank alone, with weights: the "
    "others count as zeros there") {
  Sequential net = small_model();
  torch::manual_seed(2);
  torch::nn::Linear extra(3, 1);
  extra->to(kDouble);
  const auto plain = wrapped::sgd(net->parameters());
  DistributedOptimizer optimizer(*plain);
  const auto step = [&](int number, bool with_extra) {
    optimizer.zero_grad();
    optimizer.set_weight(hvd::rank() + 1);
    at::Tensor loss = small_loss(net, hvd::rank(), number);
    if (with_extra) loss = loss + extra->forward(torch::ones({2, 3}, kDouble)).sum();
    loss.backward();
    optimizer.synchronize();
  };
  step(0, false);
  optimizer.step();
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(extra->parameters()));
  step(1, true);  // all have it: the ranks know of the group
  CHECK(extra->bias.grad().item<double>() == doctest::Approx(2));
  optimizer.step();
  for (int number = 2; number < 5; ++number) {
    step(number, last());
    // 2 size / (size (size + 1) / 2)
    CHECK(extra->bias.grad().item<double>() == doctest::Approx(4.0 / (hvd::size() + 1)));
    optimizer.step();
  }
  // Each rank has what the others have not.
  for (int number = 5; number < 8; ++number) {
    optimizer.zero_grad();
    optimizer.set_weight(1);
    if (hvd::rank() == 0) {
      small_loss(net, 0, number).backward();
    } else {
      extra->forward(torch::ones({2, 3}, kDouble)).sum().backward();
    }
    optimizer.synchronize();
    CHECK(net->parameters()[0].grad().defined());
    if (hvd::size() > 1)
      CHECK(extra->bias.grad().item<double>() ==
            doctest::Approx(2.0 * (hvd::size() - 1) / hvd::size()));
    optimizer.step();
  }
  CHECK(same_on_all_ranks(flat(net)));
}

TEST_CASE(
    "what happens if I set a weight in a step that a GradScaler leaves out: it ends with that "
    "step") {
  Training one;
  hvd::GradScaler scaler({.init_scale = 4});
  for (const bool bad : {true, false}) {
    one.optimizer.zero_grad();
    if (bad) one.optimizer.set_weight(hvd::rank() + 1);
    const double spoil = bad && last() ? std::numeric_limits<double>::infinity() : 1;
    scaler.scale(small_loss(one.net, hvd::rank(), 0) * spoil).backward();
    scaler.step(one.optimizer);
    scaler.update();
  }
  CHECK(difference(flat(one.net), plain_mean()) < 1e-12);
}

TEST_CASE(
    "what happens if I add a group after set_weight(), or unfreeze a layer: its gradients have the "
    "weight, too") {
  const double expected = [] {  // of gradients that are the rank
    double sum = 0, all = 0;
    for (const int rank : everyone()) {
      sum += rank * (rank + 1.0);
      all += rank + 1.0;
    }
    return sum / all;
  }();
  at::Tensor first = torch::zeros({3}, torch::requires_grad()),
             later = torch::zeros({3}, torch::requires_grad());
  torch::optim::SGD sgd({first}, 0.1);
  DistributedOptimizer optimizer(sgd);
  optimizer.set_weight(hvd::rank() + 1);
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({later}));
  ((first + later) * hvd::rank()).sum().backward();
  optimizer.synchronize();
  CHECK(torch::allclose(later.grad(), torch::full({3}, expected)));

  Sequential net(torch::nn::Linear(1, 1), torch::nn::Linear(1, 1));
  hvd::broadcast_parameters(net, 0);
  for (auto& parameter : net[0]->parameters()) parameter.requires_grad_(false);
  hvd::DistributedDataParallel ddp(net);
  for (int step = 0; step < 4; ++step) {
    net->zero_grad();
    if (step == 1)
      for (auto& parameter : net[0]->parameters()) parameter.requires_grad_(true);
    ddp.set_weight(hvd::rank() + 1);
    (ddp(torch::ones({1, 1})) * hvd::rank()).sum().backward();
    if (step == 0) continue;
    const double slope = net[1]->parameters()[0].item<double>();
    CHECK(net[0]->parameters()[1].grad().item<double>() == doctest::Approx(slope * expected));
  }
}

}  // namespace
