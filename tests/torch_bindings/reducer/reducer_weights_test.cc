// Weights of the ranks' gradients: N ranks with batches of different sizes train as one process
// with all rows.
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/torch_bindings/support.h"
#include "tests/torch_bindings/wrapped_optimizers.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;
using hvd::Compression;
using hvd::DistributedOptimizer;
using hvd::DistributedOptimizerOptions;
using torch::nn::Sequential;
using torch::optim::Optimizer;
namespace F = torch::nn::functional;

/// Rows of `rank` at `step`; rank 1 has none in every third.
std::int64_t rows_of(int rank, int step) {
  if (rank == 1 && step % 3 == 2) return 0;
  return 2 + rank * 3 + (step + rank) % 4;
}
std::int64_t all_rows(int step) {
  std::int64_t rows = 0;
  for (const int rank : everyone()) rows += rows_of(rank, step);
  return rows;
}
at::Tensor inputs(int step, at::ScalarType type = kDouble) {
  return data({all_rows(step), 6}, kDouble, 0, step).to(type);
}
at::Tensor targets(int step, at::ScalarType type = kDouble) {
  return data({all_rows(step), 3}, kDouble, 1, step).to(type);
}
/// The mean loss over this rank's rows: not a number where there are none.
at::Tensor own_loss(const std::function<at::Tensor(const at::Tensor&)>& forward, int step,
                    at::ScalarType type = kDouble) {
  std::int64_t first = 0;
  for (int rank = 0; rank < hvd::rank(); ++rank) first += rows_of(rank, step);
  const std::int64_t rows = rows_of(hvd::rank(), step);
  return F::mse_loss(forward(inputs(step, type).narrow(0, first, rows)),
                     targets(step, type).narrow(0, first, rows));
}

constexpr int kSteps = 7;

std::unique_ptr<Optimizer> make(bool adam, const Sequential& net) {
  if (adam)
    return std::make_unique<torch::optim::Adam>(net->parameters(), torch::optim::AdamOptions(0.01));
  return wrapped::sgd(net->parameters());
}

/// One process with all rows.
at::Tensor train_alone(bool adam) {
  Sequential net = small_model();
  const auto optimizer = make(adam, net);
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    F::mse_loss(net->forward(inputs(step)), targets(step)).backward();
    optimizer->step();
  }
  return flat(net);
}

at::Tensor train_together(bool adam, const DistributedOptimizerOptions& options,
                          at::ScalarType type = kDouble) {
  Sequential net = small_model(type);
  const auto plain = make(adam, net);
  DistributedOptimizer optimizer(*plain, net->named_parameters(), options);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.set_weight(static_cast<double>(rows_of(hvd::rank(), step)));
    optimizer.zero_grad();
    own_loss([&](const at::Tensor& x) { return net->forward(x); }, step, type).backward();
    optimizer.step();
  }
  CHECK(same_on_all_ranks(flat(net)));
  return flat(net);
}

TEST_CASE(
    "with weights, ranks with batches of different sizes train as one process with all rows") {
  for (const bool adam : {false, true}) {
    CAPTURE(adam);
    const at::Tensor alone = train_alone(adam);
    std::vector<std::pair<std::string, DistributedOptimizerOptions>> all;
    all.emplace_back("plain", DistributedOptimizerOptions{});
    all.emplace_back("groups", DistributedOptimizerOptions{.groups = 3});
    all.emplace_back("predivided", DistributedOptimizerOptions{.gradient_predivide_factor = 3});
    all.emplace_back("own gradients", DistributedOptimizerOptions{.gradients_are_views = false});
    all.emplace_back("sharded", DistributedOptimizerOptions{.shard_optimizer_state = true});
    all.emplace_back("sharded gradients", DistributedOptimizerOptions{.shard_gradients = true});
    all.emplace_back("shared", DistributedOptimizerOptions{.share_parameters = true});
    for (const auto& [name, options] : all) {
      CAPTURE(name);
      CHECK(difference(train_together(adam, options), alone) < 1e-12);
    }
    CHECK(difference(train_together(adam, {}, kFloat).to(kDouble), alone) < 1e-4);
    CHECK(difference(train_together(adam, {.compression = Compression::bf16()}), alone) <
          (adam ? 0.2 : 3e-2));
    CHECK(difference(train_together(adam, {.compression = Compression::fp16()}), alone) <
          (adam ? 0.2 : 5e-3));
  }
}

TEST_CASE(
    "with weights, compressions with a memory reduce the weighted gradients: what leaves nothing "
    "out gives the weighted mean") {
  const at::Tensor alone = train_alone(false);
  CHECK(difference(train_together(false, {.compression = Compression::topk(1)}), alone) < 1e-5);
  CHECK(difference(train_together(false, {.compression = Compression::int8()}), alone) < 5e-2);
  CHECK(difference(train_together(false, {.compression = Compression::powersgd(8)}), alone) < 0.2);
}

TEST_CASE("with weights, a DistributedDataParallel averages over rows as well") {
  Sequential net = small_model();
  hvd::DistributedDataParallel ddp(net);
  const auto optimizer = wrapped::sgd(net->parameters());
  for (int step = 0; step < kSteps; ++step) {
    ddp.set_weight(static_cast<double>(rows_of(hvd::rank(), step)));
    optimizer->zero_grad();
    own_loss([&](const at::Tensor& x) { return ddp(x); }, step).backward();
    optimizer->step();
  }
  CHECK(same_on_all_ranks(flat(net)));
  CHECK(difference(flat(net), train_alone(false)) < 1e-12);
}

TEST_CASE("with weights and several backward passes a step, the weight is that of all their rows") {
  Sequential net = small_model();
  const auto plain = wrapped::sgd(net->parameters());
  DistributedOptimizer optimizer(*plain, net->named_parameters(), {.backward_passes_per_step = 2});
  Sequential alone = small_model();
  const auto reference = wrapped::sgd(alone->parameters());
  for (int step = 0; step < 6; step += 2) {
    const auto rows =
        static_cast<double>(rows_of(hvd::rank(), step) + rows_of(hvd::rank(), step + 1));
    optimizer.zero_grad();
    optimizer.set_weight(rows);
    for (const int pass : {step, step + 1}) {
      const auto own = static_cast<double>(rows_of(hvd::rank(), pass));
      if (own > 0)
        (own_loss([&](const at::Tensor& x) { return net->forward(x); }, pass) * own / rows)
            .backward();
    }
    optimizer.step();
    reference->zero_grad();
    const at::Tensor x = torch::cat({inputs(step), inputs(step + 1)}),
                     y = torch::cat({targets(step), targets(step + 1)});
    F::mse_loss(alone->forward(x), y).backward();
    reference->step();
    CHECK(difference(flat(net), flat(alone)) < 1e-12);
  }
}

TEST_CASE("with weights, an optimizer with a closure decides by the mean loss over all rows") {
  const auto lbfgs = [](const Sequential& net) {
    return torch::optim::LBFGS(
        net->parameters(),
        torch::optim::LBFGSOptions(1).max_iter(5).line_search_fn("strong_wolfe"));
  };
  Sequential net = small_model(), alone = small_model();
  auto plain = lbfgs(net), reference = lbfgs(alone);
  DistributedOptimizer optimizer(plain, net->named_parameters());
  for (int step = 0; step < 2; ++step) {
    optimizer.set_weight(static_cast<double>(rows_of(hvd::rank(), step)));
    optimizer.step([&] {
      optimizer.zero_grad();
      const at::Tensor loss = own_loss([&](const at::Tensor& x) { return net->forward(x); }, step);
      loss.backward();
      return loss;
    });
    reference.step([&] {
      reference.zero_grad();
      const at::Tensor loss = F::mse_loss(alone->forward(inputs(step)), targets(step));
      loss.backward();
      return loss;
    });
    CHECK(difference(flat(net), flat(alone)) < 1e-8);
  }
  CHECK(same_on_all_ranks(flat(net)));
}

TEST_CASE(
    "with weights, sparse gradients are averaged over rows, and those of a rank that counts "
    "nothing leave no trace") {
  for (const bool as_dense : {false, true}) {
    torch::manual_seed(1);
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(6, 2).sparse(true));
    table->to(kDouble);
    torch::optim::SGD plain(table->parameters(), torch::optim::SGDOptions(1));
    DistributedOptimizer optimizer(plain, table->named_parameters(), {.sparse_as_dense = as_dense});
    const int rank = hvd::rank(), ranks = hvd::size();
    for (const bool first_counts : {true, false}) {
      const auto weight = [&](int of) {
        return of == 0 && !first_counts && ranks > 1 ? 0.0 : of + 1.0;
      };
      optimizer.zero_grad();
      optimizer.set_weight(weight(rank));
      at::Tensor loss = table->forward(torch::tensor({rank % 6, 5})).sum() * (rank + 2);
      if (weight(rank) == 0) loss = loss * std::numeric_limits<double>::quiet_NaN();
      loss.backward();
      optimizer.synchronize();
      at::Tensor expected = torch::zeros({6, 2}, kDouble);
      double all = 0;
      for (int of = 0; of < ranks; ++of) {
        all += weight(of);
        if (weight(of) == 0) continue;
        expected[of % 6] += weight(of) * (of + 2);
        expected[5] += weight(of) * (of + 2);
      }
      at::Tensor got = table->weight.grad();
      CHECK(got.is_sparse() != as_dense);
      if (got.is_sparse()) got = got.to_dense();
      CHECK(difference(got, expected / all) < 1e-12);
    }
  }
}

TEST_CASE(
    "with weights in a join(), ranks that have ended count nothing, whatever the division says") {
  for (const bool by_all : {true, false}) {
    Sequential net = small_model(), alone = small_model();
    const auto plain = wrapped::sgd(net->parameters()),
               reference = wrapped::sgd(alone->parameters());
    DistributedOptimizer optimizer(*plain, net->named_parameters());
    const auto steps_of = [](int rank) { return 2 + rank; };
    {
      const auto guard = optimizer.join({.divide_by_initial_world_size = by_all});
      for (int step = 0; step < steps_of(hvd::rank()); ++step) {
        optimizer.set_weight(hvd::rank() + 1);
        optimizer.zero_grad();
        small_loss(net, hvd::rank(), step).backward();
        optimizer.step();
      }
    }
    for (int step = 0; step < steps_of(hvd::size() - 1); ++step) {
      reference->zero_grad();
      at::Tensor sum = torch::zeros({}, kDouble);
      double all = 0;
      for (const int rank : everyone()) {
        if (step >= steps_of(rank)) continue;
        sum = sum + small_loss(alone, rank, step) * (rank + 1);
        all += rank + 1;
      }
      (sum / all).backward();
      reference->step();
    }
    CHECK(difference(flat(net), flat(alone)) < 1e-12);
    CHECK(same_on_all_ranks(flat(net)));
  }
}

TEST_CASE("weights of a process set are those of its ranks") {
  std::vector<int> ranks;
  for (int rank = hvd::size() > 1 ? 1 : 0; rank < hvd::size(); ++rank) ranks.push_back(rank);
  const auto set = hvd::add_process_set(ranks);
  Sequential net = small_model(), alone = small_model();
  const auto plain = wrapped::sgd(net->parameters());
  {
    DistributedOptimizer optimizer(*plain, net->named_parameters(), {.process_set = set});
    optimizer.set_weight(hvd::rank() + 1);
    small_loss(net, hvd::rank(), 0).backward();
    optimizer.step();
  }
  at::Tensor sum = torch::zeros({}, kDouble);
  double all = 0;
  for (const int rank : set.included() ? ranks : std::vector<int>{hvd::rank()}) {
    sum = sum + small_loss(alone, rank, 0) * (rank + 1);
    all += rank + 1;
  }
  (sum / all).backward();
  wrapped::sgd(alone->parameters())->step();
  CHECK(difference(flat(net), flat(alone)) < 1e-12);
  hvd::remove_process_set(set);
}

TEST_CASE(
    "with weights and a GradScaler: the scaled gradients are averaged over rows; a step that is "
    "left out uses the weight up") {
  Sequential net = small_model();
  const auto plain = wrapped::sgd(net->parameters());
  DistributedOptimizer optimizer(*plain, net->named_parameters());
  hvd::GradScaler scaler({.init_scale = 1024});
  for (int step = 0; step < kSteps; ++step) {
    for (const bool bad : {true, false}) {
      if (bad && step != 2) continue;
      optimizer.set_weight(static_cast<double>(rows_of(hvd::rank(), step)));
      optimizer.zero_grad();
      at::Tensor loss = own_loss([&](const at::Tensor& x) { return net->forward(x); }, step);
      if (bad && hvd::rank() == 0) loss = loss * std::numeric_limits<double>::infinity();
      scaler.scale(loss).backward();
      const at::Tensor before = flat(net);
      scaler.step(optimizer);
      scaler.update();
      CHECK(same(before, flat(net)) == bad);
    }
  }
  CHECK(difference(flat(net), train_alone(false)) < 1e-12);
}

TEST_CASE("parameters that are added later have the weight of the step") {
  Sequential net = small_model(), more = small_model(), alone = small_model();
  const auto plain = wrapped::sgd(net->parameters());
  DistributedOptimizer optimizer(*plain, net->named_parameters());
  optimizer.set_weight(hvd::rank() + 1);
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(more->parameters()));
  optimizer.zero_grad();
  small_loss(net, hvd::rank(), 0).backward();
  small_loss(more, hvd::rank(), 0).backward();
  optimizer.step();
  double all = 0;
  at::Tensor sum = torch::zeros({}, kDouble);
  for (const int rank : everyone()) {
    sum = sum + small_loss(alone, rank, 0) * (rank + 1);
    all += rank + 1;
  }
  (sum / all).backward();
  wrapped::sgd(alone->parameters())->step();
  CHECK(difference(flat(net), flat(alone)) < 1e-12);
  CHECK(difference(flat(more), flat(alone)) < 1e-12);
}

}  // namespace
