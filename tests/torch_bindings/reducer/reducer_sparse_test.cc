// Sparse gradients.
#include <memory>

#include "tests/torch_bindings/wrapped_optimizers.h"

namespace reducer_sparse_test {
namespace {

using namespace hvd::test;
using namespace hvd::test::wrapped;
using hvd::DistributedOptimizer;

TEST_CASE(
    "sparse gradients travel as indices and values, also where some ranks have none; the same as "
    "dense ones") {
  struct Net : torch::nn::Module {
    torch::nn::Embedding table{nullptr};
    torch::nn::Linear head{nullptr};
    explicit Net(bool sparse) {
      table = register_module(
          "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 4).sparse(sparse)));
      head = register_module("head", torch::nn::Linear(4, 2));
      const torch::NoGradGuard no_gradient;
      for (auto& parameter : parameters())
        parameter.copy_(torch::arange(parameter.numel()).reshape(parameter.sizes()) * 0.01);
    }
  };
  const auto train = [](bool sparse, hvd::DistributedOptimizerOptions options) {
    const auto net = std::make_shared<Net>(sparse);
    const auto wrapped = sgd(net->parameters(), 0.1, 0);
    DistributedOptimizer optimizer(*wrapped, net->named_parameters(), std::move(options));
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      const bool uses_table = step % 2 == 1 || hvd::rank() != 0;
      const at::Tensor words =
          uses_table
              ? net->table->forward(torch::tensor({hvd::rank(), step, (step + hvd::rank()) % 10}))
              : torch::ones({3, 4});
      net->head->forward(words).pow(2).sum().backward();
      optimizer.step();
    }
    CHECK(same_on_all_ranks(net->table->weight));
    return std::pair(net->table->weight.detach().clone(), net->head->weight.detach().clone());
  };
  const auto expected = train(false, {});
  const auto travelled = train(true, {});
  const auto made_dense = train(true, {.sparse_as_dense = true});
  CHECK(torch::allclose(travelled.first, expected.first));
  CHECK(torch::allclose(travelled.second, expected.second));
  CHECK(torch::allclose(made_dense.first, expected.first));
  for (const auto& options : {hvd::DistributedOptimizerOptions{.op = hvd::ReduceOp::Sum},
                              hvd::DistributedOptimizerOptions{.backward_passes_per_step = 2},
                              hvd::DistributedOptimizerOptions{.shard_optimizer_state = true}}) {
    const auto dense = train(false, options);
    const auto sparse = train(true, options);
    CHECK(torch::allclose(sparse.first, dense.first));
    CHECK(torch::allclose(sparse.second, dense.second));
  }
  // by the same rule, in and out of buckets
  const auto predivided = train(true, {.gradient_predivide_factor = 5});
  CHECK(torch::allclose(predivided.first, expected.first));
  CHECK(torch::allclose(predivided.second, expected.second));
  // which leaves matrices that are as small as they are
  const auto left = train(true, {.compression = hvd::Compression::powersgd(4)});
  CHECK(torch::allclose(left.first, expected.first));
  CHECK(torch::allclose(left.second, expected.second));
}

TEST_CASE("a gradient that is sparse in two dimensions, which some rank has not, or has dense") {
  for (const bool dense : {true, false}) {
    const auto train = [&](bool sparse) {
      const at::Tensor weight = torch::ones({4, 3}).requires_grad_();
      const auto wrapped = sgd({weight}, 0.1, 0);
      DistributedOptimizer optimizer(*wrapped, {{"weight", weight}});
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        if (hvd::rank() == 0) {
          torch::gather(weight, 1, torch::full({4, 1}, step, at::kLong), sparse).sum().backward();
        } else if (dense) {
          (weight.sum() * hvd::rank()).backward();
        }
        optimizer.step();
      }
      CHECK(same_on_all_ranks(weight));
      return weight.detach();
    };
    CHECK(torch::allclose(train(true), train(false)));
  }
}

TEST_CASE("a sparse gradient that no rank has is none afterwards") {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(5, 3).sparse(true));
  hvd::broadcast_parameters(table, 0);
  const auto wrapped = sgd(table->parameters(), 0.1, 0);
  DistributedOptimizer optimizer(*wrapped, table->named_parameters());
  table->forward(torch::tensor({0, hvd::rank()})).sum().backward();
  optimizer.step();  // the ranks know now that it is sparse
  optimizer.zero_grad();
  optimizer.synchronize();
  CHECK(!table->weight.grad().defined());
}

}  // namespace
}  // namespace reducer_sparse_test
