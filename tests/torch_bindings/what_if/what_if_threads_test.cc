// What happens if I ... : validate in a thread beside the one that trains; catch a bad batch on one
// rank and go on; make one wrapper more.
#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "tests/torch_bindings/support.h"

namespace what_if_threads {
namespace {

using namespace hvd::test;

/// Ranks take their time differently, so that the order of two threads does.
void dawdle(int thread, int round) {
  if ((hvd::rank() * 5 + thread * 3 + round) % 4 == 0)
    std::this_thread::sleep_for(std::chrono::microseconds(300));
}

/// All that a program does without names of its own. Returns how much of it was another thread's.
int wrong_ones(int thread) {
  int wrong = 0;
  const auto ranks = static_cast<double>(hvd::size());
  for (int round = 0; round < 20; ++round) {
    const double mine = thread * 1000 + round;
    dawdle(thread, round);
    wrong += hvd::allreduce(torch::full({1}, mine, at::kDouble)).item<double>() == mine ? 0 : 1;
    const auto means = hvd::average_metrics({{"loss", mine}}, 1);
    wrong += means.at("loss") == mine ? 0 : 1;
    dawdle(thread, round + 1);
    hvd::EvaluationTally tally;
    tally.samples = 1;
    tally.loss = mine;
    const auto evaluation = tally.average();
    wrong +=
        evaluation.loss == mine && evaluation.samples == static_cast<std::int64_t>(ranks) ? 0 : 1;
    wrong += hvd::broadcast_object(std::to_string(mine), 0) == std::to_string(mine) ? 0 : 1;
    for (const auto& text : hvd::allgather_object(std::to_string(mine)))
      wrong += text == std::to_string(mine) ? 0 : 1;
    wrong += hvd::any(thread == 0) == (thread == 0) ? 0 : 1;
    torch::nn::Linear linear(torch::nn::LinearOptions(2, 1).bias(false));
    {
      const torch::NoGradGuard no_gradient;
      linear->weight.fill_(hvd::rank() == 0 ? mine : -1);
    }
    hvd::broadcast_parameters(*linear, 0);
    wrong += linear->weight.eq(mine).all().item<bool>() ? 0 : 1;
    // Forward and backward of a collective without a name.
    at::Tensor leaf = torch::full({3}, mine, at::TensorOptions(at::kDouble).requires_grad(true));
    (hvd::allreduce(leaf, {.op = hvd::ReduceOp::Sum}) * mine).sum().backward();
    wrong += leaf.grad().eq(mine * ranks).all().item<bool>() ? 0 : 1;
  }
  return wrong;
}

template <class Call>
std::string mismatch_of(const Call& call) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string text = error_of<hvd::Mismatch>(call);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
  return text;
}

}  // namespace

TEST_CASE(
    "what happens if I validate in a thread beside training, both without names: each gets its own "
    "results") {
  std::atomic<int> wrong{0};
  std::thread validation([&] { wrong += wrong_ones(1); });
  wrong += wrong_ones(0);
  validation.join();
  CHECK(wrong == 0);
}

TEST_CASE(
    "what happens if I train in a thread, and validate in another one that has ended when the next "
    "begins: all go on without names") {
  for (int i = 0; i < 2; ++i) {
    int wrong = 1;
    std::thread([&] { wrong = wrong_ones(1); }).join();
    CHECK(wrong == 0);
  }
}

TEST_CASE(
    "what happens if I catch a bad batch on one rank and go on: all are told who waits for what, "
    "and can go on together") {
  torch::nn::Sequential net = small_model();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  hvd::DistributedOptimizer optimizer(sgd, net->named_parameters());
  hvd::broadcast_parameters(*net, 0);
  const auto step = [&](int number) {
    optimizer.zero_grad();
    small_loss(net, hvd::rank(), number).backward();
    optimizer.step();
  };
  for (int i = 0; i < 3; ++i) step(i);
  if (hvd::size() > 1) {
    // Rank 0 leaves a step out, and is at the end of the epoch when the others are one step behind.
    const std::string error =
        hvd::rank() == 0 ? mismatch_of([] { hvd::barrier(); }) : mismatch_of([&] { step(3); });
    CHECK(error.find("the ranks wait for one another: rank 0 waits for barrier 'barrier.noname.") !=
          std::string::npos);
    CHECK(error.find("gradients.0") != std::string::npos);
  }
  CHECK_FALSE(hvd::any(false));
}

TEST_CASE("what happens if I make one wrapper more on one rank: all are told, and go on") {
  if (hvd::size() == 1) return;
  torch::nn::Sequential net = small_model();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  const std::string error = hvd::rank() == 0
                                ? mismatch_of([&] { hvd::DistributedDataParallel more(net); })
                                : mismatch_of([&] { hvd::barrier(); });
  CAPTURE(error);
  CHECK(error.find(std::string("; rank") + (hvd::size() == 2 ? " 1 waits for barrier '" : "s 1")) !=
        std::string::npos);
  CHECK(error.find("rank 0 waits for ") != std::string::npos);
  CHECK_FALSE(hvd::any(false));
  // Rank 0 is one wrapper ahead now, which those of the tests to come are not to be.
  if (hvd::rank() != 0) mismatch_of([&] { hvd::DistributedDataParallel even(net); });
  if (hvd::rank() == 0) mismatch_of([] { hvd::barrier(); });
  CHECK_FALSE(hvd::any(false));
}

}  // namespace what_if_threads
