// What happens if I ... : ranks with different numbers of batches.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "tests/torch_bindings/norm_net.h"

namespace what_if_uneven {
namespace {

using namespace hvd::test;
using namespace hvd::test::norm_net;
using hvd::DistributedDataParallel;

// ----------------------------------------------------------------------- uneven numbers of batches

/// Rank r has so many batches.
int batches(int rank, bool last_has_least) {
  return 2 + (last_has_least ? hvd::size() - 1 - rank : rank);
}
int most_batches() { return 1 + hvd::size(); }

TEST_CASE(
    "what happens if ranks have different numbers of batches, with join(): those that have ended "
    "count as zeros") {
  for (const bool last_has_least : {false, true}) {
    for (const bool divide_by_all : {true, false}) {
      Sequential net = model(false);
      Sequential alone = model(false);
      Ddp ddp(net);
      const auto make = [](Sequential& of) {
        return torch::optim::SGD(of->parameters(), torch::optim::SGDOptions(0.005).momentum(0.9));
      };
      auto optimizer = make(net);
      auto reference = make(alone);
      for (int epoch = 0; epoch < 2; ++epoch) {
        {
          auto guard =
              ddp.join({.divide_by_initial_world_size = divide_by_all, .optimizer = &optimizer});
          for (int step = 0; step < batches(hvd::rank(), last_has_least); ++step) {
            optimizer.zero_grad();
            loss(ddp, hvd::rank(), step).backward();
            optimizer.step();
          }
        }
        for (int step = 0; step < most_batches(); ++step) {
          reference.zero_grad();
          at::Tensor sum = torch::zeros({}, kDouble);
          int training = 0;
          for (const int rank : everyone()) {
            if (step >= batches(rank, last_has_least)) continue;
            sum = sum + loss(*alone, rank, step);
            ++training;
          }
          (sum / (divide_by_all ? hvd::size() : training)).backward();
          reference.step();
        }
        CHECK(is_same_on_all_ranks(*net));
        CHECK(difference(flat(net), flat(alone)) < 1e-11);
      }
    }
  }
}

TEST_CASE(
    "what happens in join() with batch norm: statistics are those of the first rank that still "
    "trains, in the end of the last one") {
  for (const bool last_has_least : {false, true}) {
    Sequential net = model(true);
    Ddp ddp(net);
    torch::optim::SGD optimizer(net->parameters(), 0.01);
    {
      auto guard = ddp.join();
      for (int step = 0; step < batches(hvd::rank(), last_has_least); ++step) {
        optimizer.zero_grad();
        const at::Tensor value = loss(ddp, hvd::rank(), step);
        {
          const auto local = ddp.no_sync();  // a pass that is not reduced sends nothing
          loss(ddp, hvd::rank(), step + 1).backward();
        }
        value.backward();
        optimizer.step();
      }
      guard.end();
      guard.end();  // nothing a second time
    }
    CHECK(is_same_on_all_ranks(*net));
    CHECK(norm_of(net)->num_batches_tracked.item<std::int64_t>() > most_batches());
    loss(ddp, hvd::rank(), 0).backward();  // and on without a guard
    for (auto& parameter : net->parameters()) CHECK(same_on_all_ranks(parameter.grad()));
    ddp.eval();
    CHECK(same_on_all_ranks(ddp.forward(input(0, 1))));
  }
}

TEST_CASE(
    "what happens if I evaluate in join(): all that train have the same statistics; and after a "
    "pass without backward, at its end: each rank may evaluate alone") {
  Sequential net = model(true);
  Ddp ddp(net);
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  {
    const auto guard = ddp.join();
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      loss(ddp, hvd::rank(), step).backward();
      optimizer.step();
      CHECK(is_same_on_all_ranks(*net));
    }
    if (hvd::rank() == 0) ddp.forward(input(0, 2));  // the others may have ended
  }
  ddp.eval();
  if (hvd::rank() == 0) ddp.forward(input(0, 3));
  CHECK(is_same_on_all_ranks(*net));
}

TEST_CASE(
    "what happens if a rank in join() has no batch at all, or all have equally many: it is as it "
    "should be") {
  for (const bool none : {false, true}) {
    Sequential net = model(true);
    Ddp ddp(net);
    torch::optim::SGD optimizer(net->parameters(), 0.01);
    const int count = none && hvd::rank() == 0 && hvd::size() > 1 ? 0 : 3;
    {
      const auto guard = ddp.join();
      for (int step = 0; step < count; ++step) {
        optimizer.zero_grad();
        loss(ddp, hvd::rank(), step).backward();
        optimizer.step();
      }
    }
    CHECK(is_same_on_all_ranks(*net));
    CHECK(norm_of(net)->num_batches_tracked.item<std::int64_t>() == 3);
  }
}

TEST_CASE(
    "what happens if ranks have different numbers of batches with DistributedOptimizer: "
    "optimizer.join() does the same") {
  for (const bool divide_by_all : {true, false}) {
    Sequential net = model(false);
    Sequential alone = model(false);
    torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.01));
    torch::optim::Adam reference(alone->parameters(), torch::optim::AdamOptions(0.01));
    hvd::DistributedOptimizer optimizer(adam, net->named_parameters());
    for (int epoch = 0; epoch < 2; ++epoch) {
      {
        auto guard = optimizer.join({.divide_by_initial_world_size = divide_by_all});
        for (int step = 0; step < batches(hvd::rank(), false); ++step) {
          optimizer.zero_grad();
          loss(*net, hvd::rank(), step).backward();
          optimizer.step();
        }
      }
      for (int step = 0; step < most_batches(); ++step) {
        reference.zero_grad();
        at::Tensor sum = torch::zeros({}, kDouble);
        int training = 0;
        for (const int rank : everyone()) {
          if (step >= batches(rank, false)) continue;
          sum = sum + loss(*alone, rank, step);
          ++training;
        }
        (sum / (divide_by_all ? hvd::size() : training)).backward();
        reference.step();
      }
      CHECK(is_same_on_all_ranks(*net));
      CHECK(difference(flat(net), flat(alone)) < 1e-10);
    }
  }
}

TEST_CASE("what happens with Sum in join(): it is that of the ranks that still train, as it is") {
  for (const bool divide_by_all : {true, false}) {
    at::Tensor weight = torch::zeros({3}, torch::requires_grad());
    torch::optim::SGD sgd({weight}, 1.0);
    hvd::DistributedOptimizer optimizer(sgd, {}, {.op = hvd::ReduceOp::Sum});
    double expected = 0;
    {
      const auto guard = optimizer.join({.divide_by_initial_world_size = divide_by_all});
      for (int step = 0; step < batches(hvd::rank(), false); ++step) {
        optimizer.zero_grad();
        (weight * (1.0 + hvd::rank())).sum().backward();
        optimizer.step();
      }
    }
    for (const int rank : everyone()) expected -= batches(rank, false) * (1.0 + rank);
    CHECK(torch::equal(weight.detach(), torch::full({3}, expected)));
  }
}

TEST_CASE(
    "what happens if I add a group to an optimizer in join(): it is joined, too; ranks that differ "
    "in it hear so in the end") {
  for (const bool divide_by_all : {true, false}) {
    at::Tensor first = torch::zeros({4}, torch::requires_grad()),
               later = torch::zeros({4}, torch::requires_grad());
    torch::optim::SGD sgd({first}, torch::optim::SGDOptions(1).momentum(0.5));
    hvd::DistributedOptimizer optimizer(sgd);
    const auto train = [&](int steps) {
      for (int step = 0; step < steps; ++step) {
        optimizer.zero_grad();
        ((first + later) * (1.0 + hvd::rank())).sum().backward();
        optimizer.step();
      }
    };
    {
      const auto guard = optimizer.join({.divide_by_initial_world_size = divide_by_all});
      optimizer.add_param_group(torch::optim::OptimizerParamGroup({later}));
      train(batches(hvd::rank(), false));
    }
    CHECK(torch::equal(first, later));
    CHECK(same_on_all_ranks(later));
    train(1);  // and on without a guard
    CHECK(torch::equal(first, later));
    CHECK(same_on_all_ranks(later));
  }
  at::Tensor first = torch::zeros({4}, torch::requires_grad()),
             later = torch::zeros({4}, torch::requires_grad());
  torch::optim::SGD sgd({first}, 1.0);
  hvd::DistributedOptimizer optimizer(sgd);
  const auto only_after_some_have_ended = [&] {
    const auto guard = optimizer.join();
    for (int step = 0; step < (hvd::rank() == 0 ? 1 : 3); ++step) {
      optimizer.zero_grad();
      (first + later).sum().backward();
      optimizer.step();
      if (step == 0 && hvd::rank() != 0)
        optimizer.add_param_group(torch::optim::OptimizerParamGroup({later}));
    }
  };
  const std::string text = error_of<hvd::Mismatch>(only_after_some_have_ended);
  CAPTURE(text);
  CHECK(contains(text, hvd::size() == 1 ? "(no error)" : "added"));
}

TEST_CASE(
    "what happens if one rank has changed a gradient under way in join() and catches the error: "
    "those that train hear of it") {
  const int culprit = hvd::size() - 1;
  for (const int at_step : {0, 1, batches(culprit, false) - 1}) {
    Sequential net = model(false);
    torch::optim::SGD sgd(net->parameters(), 0.01);
    hvd::DistributedOptimizer optimizer(sgd, net->named_parameters());
    int refused = 0, heard = 0;
    {
      const auto guard = optimizer.join({.divide_by_initial_world_size = false});
      for (int step = 0; step < batches(hvd::rank(), false); ++step) {
        optimizer.zero_grad();
        loss(*net, hvd::rank(), step).backward();
        if (hvd::rank() == culprit && step == at_step) net->parameters()[0].mutable_grad().mul_(2);
        try {
          optimizer.step();
        } catch (const hvd::InvalidArgument&) {
          ++refused;
        } catch (const hvd::Mismatch&) {
          ++heard;
        }
      }
    }
    // It has not made the step that the others have made: in each one that they make together they
    // hear so, until the guard's end.
    const auto steps_after = [&](int rank) {
      return std::max(0, batches(rank, false) - at_step - 1);
    };
    int of_others = 0;
    for (const int rank : everyone())
      of_others = std::max(of_others, rank == culprit ? 0 : steps_after(rank));
    CHECK(refused == (hvd::rank() == culprit && hvd::size() > 1 ? 1 : 0));
    CHECK(heard == std::min(steps_after(hvd::rank()),
                            hvd::rank() == culprit ? of_others : steps_after(culprit)));
    CHECK(is_same_on_all_ranks(*net));
  }
}

TEST_CASE(
    "what happens if I use LBFGS in join(): its loss, as its gradients, is that of the ranks that "
    "still train") {
  for (const bool divide_by_all : {true, false}) {
    Sequential net = model(false);
    Sequential alone = model(false);
    const auto make = [](Sequential& of) {
      return torch::optim::LBFGS(
          of->parameters(),
          torch::optim::LBFGSOptions(0.5).max_iter(3).line_search_fn("strong_wolfe"));
    };
    auto lbfgs = make(net);
    auto reference = make(alone);
    hvd::DistributedOptimizer optimizer(lbfgs, net->named_parameters());
    {
      const auto guard = optimizer.join({.divide_by_initial_world_size = divide_by_all});
      for (int step = 0; step < batches(hvd::rank(), false); ++step)
        optimizer.step([&] {
          optimizer.zero_grad();
          const at::Tensor value = loss(*net, hvd::rank(), step);
          value.backward();
          return value;
        });
    }
    for (int step = 0; step < most_batches(); ++step)
      reference.step([&] {
        reference.zero_grad();
        at::Tensor sum = torch::zeros({}, kDouble);
        int training = 0;
        for (const int rank : everyone()) {
          if (step >= batches(rank, false)) continue;
          sum = sum + loss(*alone, rank, step);
          ++training;
        }
        const at::Tensor value = sum / (divide_by_all ? hvd::size() : training);
        value.backward();
        return value;
      });
    CHECK(is_same_on_all_ranks(*net));
    CHECK(difference(flat(net), flat(alone)) < 1e-8);
  }
}

TEST_CASE(
    "what happens if one rank leaves join() by an exception: the others get RankFailed, and nobody "
    "waits for good") {
  struct Own : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  const int culprit = hvd::size() - 1;
  for (const bool in_backward : {false, true}) {
    for (const int at_step : {0, 1, 3}) {  // at 3 the other ranks, but the one before, have ended
      Sequential net = model(true);
      Ddp ddp(net);
      torch::optim::SGD optimizer(net->parameters(), 0.01);
      const auto train = [&] {
        const auto guard = ddp.join();
        const int count = hvd::rank() == culprit ? 4 : hvd::rank() == culprit - 1 ? 5 : 2;
        for (int step = 0; step < count; ++step) {
          optimizer.zero_grad();
          if (hvd::rank() == culprit && step == at_step && !in_backward) throw Own("no file");
          const at::Tensor value = loss(ddp, hvd::rank(), step);
          if (hvd::rank() == culprit && step == at_step) {
            net->ptr(0)->as<Linear>()->weight.register_hook(
                [](const at::Tensor& gradient) -> at::Tensor {
                  throw Own("in backward");
                  return gradient;
                });
            value.backward();
          }
          value.backward();
          optimizer.step();
        }
      };
      if (hvd::rank() == culprit) {
        CHECK_THROWS_AS(train(), Own);
      } else {
        const std::string text = error_of<hvd::RankFailed>(train);
        CAPTURE(text);
        CHECK(contains(text, "rank " + std::to_string(culprit) + " left"));
      }
      // All go on together after a broadcast.
      hvd::broadcast_parameters(net, 0);
      Sequential fresh = model(true);
      Ddp again(fresh);
      loss(again, hvd::rank(), 0).backward();
      CHECK(same_on_all_ranks(fresh->parameters()[0].grad()));
      if (in_backward && hvd::rank() == culprit) net->ptr(0)->as<Linear>()->weight.remove_hook(0);
      net->zero_grad();
      loss(ddp, hvd::rank(), 0).backward();
      CHECK(same_on_all_ranks(net->parameters()[0].grad()));
    }
  }
}

TEST_CASE(
    "what happens if one rank leaves an optimizer's join() by an exception: all may go on after a "
    "broadcast") {
  Sequential net = model(false);
  torch::optim::SGD sgd(net->parameters(), 0.01);
  hvd::DistributedOptimizer optimizer(sgd, net->named_parameters());
  const auto step = [&](int number) {
    optimizer.zero_grad();
    loss(*net, hvd::rank(), number).backward();
    optimizer.step();
  };
  const auto train = [&] {
    const auto guard = optimizer.join();
    step(0);
    if (last()) throw std::logic_error("no file");
    step(1);
  };
  if (last()) {
    CHECK_THROWS_AS(train(), std::logic_error);
  } else {
    CHECK_THROWS_AS(train(), hvd::RankFailed);
  }
  hvd::broadcast_parameters(*net, 0);
  CHECK(error_of<hvd::Mismatch>([&] { step(2); }) == "(no error)");
  CHECK(is_same_on_all_ranks(*net));
}

TEST_CASE(
    "what happens if I unfreeze a layer in join() after a rank has ended: a Mismatch on all until "
    "that rank has, too") {
  Sequential net = model(false), alone = model(false);
  const auto freeze = [&](bool frozen) {
    for (auto& parameter : net[0]->parameters()) parameter.set_requires_grad(!frozen);
  };
  freeze(true);
  Ddp ddp(net);
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  const auto pass = [&](int number) {
    optimizer.zero_grad();
    loss(ddp, hvd::rank(), number).backward();
  };
  for (int epoch = 0; epoch < 2; ++epoch) {
    {
      const auto guard = ddp.join({.optimizer = &optimizer});
      for (int step = 0; step < 2 + 2 * hvd::rank(); ++step) {
        if (step == 3) freeze(false);
        pass(step);
        optimizer.step();
      }
    }
    if (epoch == 0 && hvd::size() > 1)
      CHECK(contains(error_of<hvd::Mismatch>([&] { pass(0); }), "has changed the parameters"));
    freeze(false);
    for (int number = 0; number < 3; ++number) {
      pass(number);
      {
        const torch::NoGradGuard no_gradient;
        for (std::size_t i = 0; i < net->parameters().size(); ++i)
          alone->parameters()[i].copy_(net->parameters()[i]);
      }
      alone->zero_grad();
      at::Tensor sum = torch::zeros({}, kDouble);
      for (const int rank : everyone()) sum = sum + loss(*alone, rank, number);
      (sum / hvd::size()).backward();
      for (std::size_t i = 0; i < net->parameters().size(); ++i)
        CHECK(difference(net->parameters()[i].grad(), alone->parameters()[i].grad()) < 1e-11);
      optimizer.step();
      CHECK(is_same_on_all_ranks(*net));
    }
  }
}

TEST_CASE(
    "what join() refuses: SyncBatchNorm, sharded optimizers, compressions with a memory, a second "
    "guard") {
  with_and_without_one_copy();
  const bool alone = hvd::size() == 1;
  const auto refused = [&](const auto& call, const std::string& part) {
    const std::string text = error_of<hvd::InvalidArgument>(call);
    CAPTURE(text);
    CHECK(contains(text, alone ? "(no error)" : part));
  };
  Sequential net = model(true);
  hvd::convert_sync_batchnorm(net);
  Ddp ddp(net);
  refused([&] { const auto guard = ddp.join(); }, "'1'");
  Sequential other = model(false);
  {
    Ddp compressed(other, {.compression = hvd::Compression::int8()});
    refused([&] { const auto guard = compressed.join(); }, "compression");
  }
  torch::optim::SGD sgd(other->parameters(), 0.1);
  {
    hvd::DistributedOptimizer sharded(
        sgd, other->named_parameters(),
        {.shard_optimizer_state = true, .share_parameters = one_copy});
    refused([&] { const auto guard = sharded.join(); }, "sharded");
  }
  hvd::DistributedOptimizer optimizer(sgd, other->named_parameters());
  const auto guard = optimizer.join();
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { const auto second = optimizer.join(); }),
                 "join()"));
}

TEST_CASE(
    "what happens if two models are in join() at once: each goes on with the ranks that are left") {
  Sequential one = model(true), two = model(false);
  Ddp first(one), second(two);
  torch::optim::SGD of_first(one->parameters(), 0.01), of_second(two->parameters(), 0.01);
  {
    const auto guard = first.join();
    const auto other = second.join({.optimizer = &of_second});
    for (int step = 0; step < batches(hvd::rank(), true); ++step) {
      first.zero_grad();
      second.zero_grad();
      loss(first, hvd::rank(), step).backward();
      loss(second, hvd::rank(), step).backward();
      of_first.step();
      of_second.step();
    }
  }
  CHECK(is_same_on_all_ranks(*one));
  CHECK(is_same_on_all_ranks(*two));
}

TEST_CASE("what happens in join() in a set of some ranks: the others are not asked") {
  const std::vector<int> ranks =
      hvd::size() > 2 ? std::vector<int>{1, hvd::size() - 1} : everyone();
  const auto set = hvd::add_process_set(ranks);
  if (set.included()) {
    Sequential net = model(true);
    Ddp ddp(net, {.gradient_predivide_factor = 2, .process_set = set});
    torch::optim::SGD optimizer(net->parameters(), 0.01);
    {
      const auto guard = ddp.join();
      for (int step = 0; step < 2 + set.rank(); ++step) {
        optimizer.zero_grad();
        loss(ddp, hvd::rank(), step).backward();
        optimizer.step();
      }
    }
    for (const auto& tensor : net->parameters()) {
      const at::Tensor all = hvd::allgather(tensor.detach().reshape({1, -1}), {.process_set = set});
      CHECK(torch::equal(all[0], all[all.size(0) - 1]));
    }
    CHECK(norm_of(net)->num_batches_tracked.item<std::int64_t>() ==
          1 + static_cast<std::int64_t>(ranks.size()));
  }
  hvd::remove_process_set(set);
}

TEST_CASE(
    "what happens in join() with sparse gradients: made dense they work; sparse, every rank hears "
    "that they do not") {
  for (const bool dense : {true, false}) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(7, 3).sparse(true));
    table->to(kDouble);
    DistributedDataParallel ddp(table, {.sparse_as_dense = dense});
    torch::optim::SGD optimizer(table->parameters(), 0.1);
    const auto train = [&] {
      const auto guard = ddp.join();
      for (int step = 0; step < (hvd::rank() == 0 ? 1 : 3); ++step) {
        optimizer.zero_grad();
        ddp.forward(torch::tensor({hvd::rank(), step}, at::kLong)).sum().backward();
        optimizer.step();
      }
    };
    if (dense || hvd::size() == 1) {
      train();
      CHECK(same_on_all_ranks(table->weight));
    } else if (hvd::rank() == 0) {
      CHECK(contains(error_of<hvd::RankFailed>(train), "left the guard"));
    } else {
      CHECK(contains(error_of<hvd::Joined>(train), "joined"));
    }
  }
}

}  // namespace
}  // namespace what_if_uneven
