// Worlds beside the global one, whose members meet in a store of LibTorch's: operations on tensors
// and their gradients, wrappers that train in them, and what is refused.
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <optional>
#include <string>
#include <vector>

#include "tests/torch_bindings/shared_folder.h"
#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kFloat;
using hvd::ReduceOp;

/// Makes a world of these ranks of the global one; none on the others.
std::optional<hvd::World> world_of(const SharedFolder& folder, const std::vector<int>& ranks,
                                   const std::string& name) {
  const auto place = std::find(ranks.begin(), ranks.end(), hvd::rank());
  if (place == ranks.end()) return std::nullopt;
  const auto store =
      c10::make_intrusive<c10d::FileStore>(folder.file(name), static_cast<int>(ranks.size()));
  return hvd::World(hvd::rendezvous_in(store, static_cast<int>(place - ranks.begin()),
                                       static_cast<int>(ranks.size()), name));
}

/// All ranks, the last one first.
std::vector<int> reversed_ranks() {
  std::vector<int> ranks;
  for (int rank = hvd::size() - 1; rank >= 0; --rank) ranks.push_back(rank);
  return ranks;
}

TEST_CASE(
    "worlds: operations on tensors, as members, by an option and in a scope, with their "
    "gradients") {
  const SharedFolder folder;
  const int size = hvd::size();
  {
    const auto made = world_of(folder, reversed_ranks(), "reversed");
    const hvd::World& world = *made;
    const int rank = world.rank();
    CHECK(rank == size - 1 - hvd::rank());
    const at::Tensor mine = torch::full({3}, rank + 1, kFloat);
    const at::Tensor sum = torch::full({3}, size * (size + 1) / 2, kFloat);
    CHECK(same(world.allreduce(mine, {.op = ReduceOp::Sum}), sum));
    CHECK(same(hvd::allreduce(mine, {.op = ReduceOp::Sum, .world = world}), sum));
    CHECK(same(world.run([&] { return hvd::allreduce(mine, {.op = ReduceOp::Sum}); }), sum));
    CHECK(same(world.allreduce_async(mine, {.op = ReduceOp::Sum}).wait(), sum));
    CHECK(same(
        world.grouped_allreduce(std::vector<at::Tensor>{mine, 2 * mine}, {.op = ReduceOp::Sum})[1],
        2 * sum));
    CHECK(same(world.grouped_allreduce({mine, 2 * mine}, {.op = ReduceOp::Sum})[1], 2 * sum));
    CHECK(torch::allclose(world.grouped_allreduce({mine, 2 * mine})[0], sum / size));
    CHECK(same(world.broadcast(mine, {.root_rank = 0}), torch::full({3}, 1, kFloat)));
    CHECK(world.broadcast_object(rank * 10, size - 1) == (size - 1) * 10);
    const auto names = world.allgather_object(std::to_string(rank));
    REQUIRE(names.size() == static_cast<std::size_t>(size));
    CHECK(names.back() == std::to_string(size - 1));
    CHECK(world.allgather_object(rank, hvd::global_process_set()).front() == 0);
    CHECK(world.allgather(torch::full({rank + 1}, rank, kFloat)).size(0) == size * (size + 1) / 2);
    const auto exchanged = world.alltoall(torch::full({size}, rank, kFloat));
    CHECK(same(exchanged.output, torch::arange(size, kFloat)));
    CHECK(same(world.reducescatter(torch::full({size}, rank + 1, kFloat), {.op = ReduceOp::Sum}),
               sum.slice(0, 0, 1)));
    auto repeated = mine.clone();
    auto op = world.allreduce_init(repeated, {.op = ReduceOp::Max});
    op.start();
    CHECK(same(op.wait(), torch::full({3}, size, kFloat)));

    // A set's numbers are those of its world, whoever asks.
    const hvd::ProcessSet both =
        world.add_process_set(world.run([] { return hvd::global_process_set().ranks(); }));
    CHECK(both.rank() == rank);
    CHECK(both.size() == size);
    CHECK(both.included());
    CHECK(contains(
        error_of<hvd::InvalidArgument>([&] { hvd::allreduce(mine, {.process_set = both}); }),
        "another world"));
    auto output = torch::zeros({3 * size});
    CHECK(contains(error_of<hvd::InvalidArgument>(
                       [&] { hvd::allgather_into(output, mine, {.process_set = both}); }),
                   "another world"));

    // The gradient of a sum is the sum of the ranks' gradients: by the world's ranks, also where
    // backward runs outside of any scope.
    at::Tensor input = torch::full({2}, rank + 1, kFloat).requires_grad_();
    at::Tensor result = world.run([&] { return hvd::allgather(input); });
    (result * torch::arange(result.numel(), kFloat)).sum().backward();
    // the average, as Horovod has it
    CHECK(same(input.grad(), torch::arange(2 * rank, 2 * rank + 2, kFloat)));
    input.mutable_grad() = at::Tensor();
    world.allreduce(input, {.op = ReduceOp::Sum}).sum().backward();
    CHECK(same(input.grad(), torch::full({2}, size, kFloat)));
    CHECK(same(hvd::allreduce(mine, {.op = ReduceOp::Sum}), sum));  // the global world goes on

    // What was made in the global world stays there, also where it is used inside of a scope.
    const int global = hvd::rank();
    at::Tensor other = torch::full({2}, global + 1, kFloat).requires_grad_();
    at::Tensor gathered = hvd::allgather(other);
    auto shared = torch::full({3}, global, kFloat);
    auto in_global = hvd::broadcast_init(shared, {.root_rank = 0});
    auto copied = torch::full({3, 2}, global, kFloat).t();  // not as it lies in memory
    auto in_world = world.run([&] { return hvd::broadcast_init(copied, {.root_rank = 0}); });
    in_world.start();
    in_world.wait();
    CHECK(same(copied, torch::full({2, 3}, size - 1, kFloat)));  // the global world's last rank
    world.run([&] {
      (gathered * torch::arange(gathered.numel(), kFloat)).sum().backward();
      in_global.start();
      in_global.wait();
    });
    CHECK(same(other.grad(), torch::arange(2 * global, 2 * global + 2, kFloat)));
    CHECK(same(shared, torch::zeros({3})));

    // What is computed again is computed in the world of the first time.
    at::Tensor again = torch::ones({2}).requires_grad_();
    const auto by_rank = [](const at::Tensor& from) {
      return from * (hvd::rank() + 1) * hvd::allreduce(torch::ones({2}));
    };
    world.run([&] { return hvd::checkpoint(by_rank, again); }).sum().backward();
    CHECK(same(again.grad(), torch::full({2}, rank + 1, kFloat)));
    CHECK(world.stats().tensors_submitted > 0);
  }
  hvd::barrier();
}

TEST_CASE("worlds: of some ranks only, several at once; the others know nothing of them") {
  const SharedFolder folder;
  if (hvd::size() > 1) {
    const auto first = world_of(folder, {0, hvd::size() - 1}, "ends");
    const auto second = world_of(folder, {0}, "alone");
    for (int round = 0; round < 3; ++round) {
      if (first)
        CHECK(same(first->allreduce(torch::ones({2}), {.op = ReduceOp::Sum}),
                   torch::full({2}, 2, kFloat)));
      if (second)
        CHECK(same(second->allreduce(torch::ones({2}), {.op = ReduceOp::Sum}), torch::ones({2})));
    }
    if (first && hvd::size() > 2)
      CHECK_THROWS_AS(first->broadcast(torch::ones({2}), {.root_rank = 2}), hvd::InvalidArgument);
  }
  hvd::barrier();
}

struct SmallNet : torch::nn::Module {
  SmallNet()
      : first(register_module("first", torch::nn::Linear(4, 6))),
        norm(register_module("norm", hvd::SyncBatchNorm(6))) {}
  at::Tensor forward(const at::Tensor& input) { return norm(first(input)).pow(2).sum(); }
  torch::nn::Linear first;
  hvd::SyncBatchNorm norm;
};

/// Trains a little by the wrapper, and returns the parameters. `share`: which of the data is this
/// rank's.
std::vector<at::Tensor> train(int share, bool wrap_module) {
  torch::manual_seed(3);
  auto net = std::make_shared<SmallNet>();
  std::vector<at::Tensor> parameters;
  const auto batch = [share](int step) {
    return torch::arange(12, kFloat).view({3, 4}) * (share + 1) / 10 + step;
  };
  if (wrap_module) {
    hvd::DistributedDataParallel<SmallNet> wrapped(net);
    torch::optim::SGD optimizer(net->parameters(), 0.01);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      wrapped.forward(batch(step)).backward();
      optimizer.step();
    }
  } else {
    hvd::broadcast_parameters(*net, 0);
    torch::optim::Adam inner(net->parameters(), 0.01);
    hvd::DistributedOptimizer optimizer(inner, net->named_parameters(),
                                        {.shard_optimizer_state = true});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      net->forward(batch(step)).backward();
      optimizer.step();
    }
  }
  for (const auto& parameter : net->parameters()) parameters.push_back(parameter.detach().clone());
  return parameters;
}

TEST_CASE(
    "worlds: wrappers train in the world that they are made in, with the numbers of the global "
    "one") {
  const SharedFolder folder;
  {
    std::vector<int> ranks = reversed_ranks();
    std::reverse(ranks.begin(), ranks.end());
    const auto world = world_of(folder, ranks, "training");
    for (const bool wrap_module : {true, false}) {
      CAPTURE(wrap_module);
      const auto expected = train(hvd::rank(), wrap_module);
      const auto trained = world->run([&] { return train(hvd::rank(), wrap_module); });
      for (std::size_t i = 0; i < expected.size(); ++i) CHECK(same(trained[i], expected[i]));
    }
    // Made in one world, used in another: refused, as its ranks are others.
    auto net = std::make_shared<SmallNet>();
    torch::optim::SGD inner(net->parameters(), 0.01);
    const auto optimizer = world->run([&] {
      return std::make_unique<hvd::DistributedOptimizer>(inner, net->named_parameters());
    });
    CHECK(contains(error_of<hvd::InvalidArgument>([&] { optimizer->step(); }),
                   "made in the world 'training'"));
    world->run([&] { optimizer->zero_grad(); });
  }
  hvd::barrier();
}

TEST_CASE(
    "worlds: wrappers of worlds that have only some ranks in common, and guards that end outside "
    "of the scope") {
  const SharedFolder folder;
  if (hvd::size() > 2) {
    // Rank 0 makes twice as many as each of the others.
    const auto first = world_of(folder, {0, 1}, "first"),
               second = world_of(folder, {0, 2}, "second");
    for (const auto* const world : {&first, &second}) {
      if (!*world) continue;
      for (const bool wrap_module : {true, false}) {
        const auto trained = (*world)->run([&] { return train((*world)->rank(), wrap_module); });
        for (const auto& parameter : trained) {
          const auto all = (*world)->allgather(parameter.unsqueeze(0));
          CHECK(same(all[0], all[1]));
        }
      }
      // The average is over the world's ranks, wherever it is waited for.
      const at::Tensor sparse = torch::ones({1, 2}).to_sparse() * (2 + 4 * (*world)->rank());
      CHECK(same((*world)->sparse_allreduce_async(sparse).wait().to_dense(),
                 torch::full({1, 2}, 4, kFloat)));
      torch::nn::Linear net(2, 2);
      torch::optim::SGD inner(net->parameters(), 0.01);
      const auto optimizer = (*world)->run([&] {
        return std::make_unique<hvd::DistributedOptimizer>(inner, net->named_parameters());
      });
      auto guard = (*world)->run([&] { return optimizer->join(); });
      guard.end();
    }
  }
  hvd::barrier();
}

}  // namespace
