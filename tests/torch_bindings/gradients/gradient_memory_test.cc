// Gradients that autograd makes in shared memory: reduced where they are, and never somebody else's
// memory.
#include <c10/core/CPUAllocator.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <memory>
#include <string>

#include "tests/torch_bindings/wrapped_optimizers.h"

namespace gradient_memory_test {
namespace {

using namespace hvd::test;
using namespace hvd::test::wrapped;
using at::kFloat, at::kHalf;
using hvd::DistributedOptimizer;
using hvd::DistributedOptimizerOptions;

constexpr std::int64_t kWidth = 64;  // a gradient of 16 KiB

bool shares_memory() {
  return hvd::size() > 1 && hvd::local_size() == hvd::size() &&
         hvd::Config::from_environment().shared_memory == hvd::SharedMemory::Auto;
}

at::Tensor weight(int variant, at::ScalarType type = kFloat) {
  return data({kWidth, kWidth}, type, 0, variant).requires_grad_(true);
}
at::Tensor batch(int rank, int step, at::ScalarType type = kFloat) {
  return data({8, kWidth}, type, rank, step);
}
/// Exact for small weights and inputs, so that sums do not depend on their order.
at::Tensor loss_of(const std::vector<at::Tensor>& weights, int rank, int step) {
  at::Tensor x = batch(rank, step, weights.front().scalar_type());
  for (const auto& w : weights) x = torch::relu(x.mm(w)) / 64;
  return x.sum();
}

/// What one process makes of all ranks' losses: the mean of their gradients.
std::vector<at::Tensor> mean_gradients(const std::vector<at::Tensor>& weights, int step,
                                       int passes = 1) {
  std::vector<at::Tensor> means;
  for (const auto& w : weights) means.push_back(torch::zeros_like(w));
  for (int r = 0; r < hvd::size(); ++r) {
    std::vector<at::Tensor> own;
    for (const auto& w : weights) own.push_back(w.detach().clone().requires_grad_(true));
    for (int pass = 0; pass < passes; ++pass) {
      const auto given = torch::autograd::grad({loss_of(own, r, step + pass)}, own);
      for (std::size_t i = 0; i < means.size(); ++i) means[i] += given[i] / hvd::size();
    }
  }
  return means;
}

void check_gradients(const std::vector<at::Tensor>& weights,
                     const std::vector<at::Tensor>& expected) {
  for (std::size_t i = 0; i < weights.size(); ++i) {
    REQUIRE(weights[i].grad().defined());
    CHECK(difference(weights[i].grad(), expected[i]) <=
          1e-6 * (1 + expected[i].abs().max().item<double>()));
    CHECK(same_on_all_ranks(weights[i].grad()));
  }
}

/// Memory that this process shares with others and has touched.
std::size_t shared_bytes() {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;)
    if (word == "RssShmem:") {
      std::size_t kilobytes = 0;
      file >> kilobytes;
      return kilobytes << 10;
    }
  return 0;
}

TEST_CASE("memory that wrappers of many sizes had goes back to the system with them") {
  const auto train = [](std::int64_t width, bool sharded) {
    torch::nn::Sequential model(torch::nn::Linear(width, width),
                                torch::nn::Linear(width, width / 2));
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    hvd::broadcast_parameters(*model, 0);
    DistributedOptimizer wrapper(optimizer, model->named_parameters(),
                                 {.shard_optimizer_state = sharded});
    for (int step = 0; step < 2; ++step) {
      wrapper.zero_grad();
      model->forward(torch::ones({2, width})).sum().backward();
      wrapper.step();
    }
  };
  train(64, false);
  train(64, true);
  hvd::barrier();
  const std::size_t before = shared_bytes();
  for (int i = 0; i < 8; ++i) train(600 + 120 * (i * 3 % 8), i % 4 == 3);
  hvd::barrier();
  // Of up to 13 MiB of gradients for each rank; the rings and small blocks that broadcasts use
  // stay.
  CHECK(shared_bytes() < before + static_cast<std::size_t>(hvd::size()) * (std::size_t{3} << 20));
}

TEST_CASE("a CPU allocator that the program sets later is used") {
  struct Counting final : c10::Allocator {
    c10::DataPtr allocate(std::size_t bytes) override {
      ++count;
      return before->allocate(bytes);
    }
    [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return before->raw_deleter(); }
    void copy_data(void* to, const void* from, std::size_t bytes) const override {
      default_copy_data(to, from, bytes);
    }
    c10::Allocator* before = c10::GetCPUAllocator();
    int count = 0;
  };
  const std::vector<at::Tensor> weights{weight(1), weight(2)};
  const auto wrapped = sgd(weights);
  DistributedOptimizer optimizer(*wrapped, {});
  static Counting counting;
  c10::SetCPUAllocator(&counting);
  const int before = counting.count;
  const auto expected = mean_gradients(weights, 0);
  loss_of(weights, hvd::rank(), 0).backward();
  optimizer.synchronize();
  check_gradients(weights, expected);
  CHECK(counting.count > before);
  c10::SetCPUAllocator(counting.before);
  CHECK(c10::GetCPUAllocator() == counting.before);
}

TEST_CASE("a gradient is reduced where backward made it, if nobody keeps it") {
  const std::vector<at::Tensor> weights{weight(1), weight(2)};
  const auto wrapped = sgd(weights);
  DistributedOptimizer optimizer(*wrapped);
  std::vector<const void*> made(2);
  for (std::size_t i = 0; i < 2; ++i)
    weights[i].register_hook(
        [&made, i](const at::Tensor& given) { made[i] = given.const_data_ptr(); });
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const auto expected = mean_gradients(weights, step);
    const auto before = hvd::stats();
    loss_of(weights, hvd::rank(), step).backward();
    optimizer.synchronize();
    if (shares_memory()) {
      for (std::size_t i = 0; i < 2; ++i) CHECK(weights[i].grad().const_data_ptr() == made[i]);
      CHECK(hvd::stats().bytes_zero_copy - before.bytes_zero_copy == 2 * kWidth * kWidth * 4);
    }
    check_gradients(weights, expected);
    optimizer.step();
    CHECK(same_on_all_ranks(weights[0]));
  }
}

TEST_CASE("what a hook keeps stays this rank's gradient, on one rank and on all") {
  bool all = false;
  SUBCASE("one rank keeps") {}
  SUBCASE("all keep") { all = true; }
  const std::vector<at::Tensor> weights{weight(1), weight(2)};
  const auto wrapped = sgd(weights);
  DistributedOptimizer optimizer(*wrapped);
  std::vector<at::Tensor> kept(2), copies(2);
  for (std::size_t i = 0; i < 2; ++i)
    weights[i].register_hook([&, i](const at::Tensor& given) {
      if (all || hvd::rank() == 0) kept[i] = given;
      copies[i] = given.clone();
    });
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto expected = mean_gradients(weights, step);
    loss_of(weights, hvd::rank(), step).backward();
    optimizer.synchronize();
    check_gradients(weights, expected);
    for (std::size_t i = 0; i < 2; ++i)
      if (kept[i].defined()) CHECK(torch::equal(kept[i], copies[i]));
    optimizer.step();
  }
}

TEST_CASE("one gradient that autograd gives to two parameters") {
  const std::vector<at::Tensor> weights{weight(1), weight(2)};
  const auto wrapped = sgd(weights);
  DistributedOptimizer optimizer(*wrapped);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const at::Tensor factor = data({kWidth, kWidth}, kFloat, hvd::rank(), step);
    ((weights[0] + weights[1].view({-1}).view({kWidth, kWidth})) * factor).sum().backward();
    optimizer.synchronize();
    const at::Tensor mean =
        reduced(all_data({kWidth, kWidth}, kFloat, everyone(), step), hvd::ReduceOp::Average);
    for (const auto& w : weights) CHECK(same(w.grad(), mean));
    CHECK(!weights[0].grad().is_alias_of(weights[1].grad()));
    optimizer.step();
  }
}

TEST_CASE(
    "gradients that a user puts there, one in two places or kept, are not reduced where they are") {
  const std::vector<at::Tensor> weights{weight(1), weight(2)};
  const auto wrapped = sgd(weights);
  DistributedOptimizerOptions options;
  options.op = hvd::ReduceOp::Sum;
  DistributedOptimizer optimizer(*wrapped, {}, options);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const at::Tensor factor = data({kWidth, kWidth}, kFloat, hvd::rank(), step);
    const at::Tensor sum =
        reduced(all_data({kWidth, kWidth}, kFloat, everyone(), step), hvd::ReduceOp::Sum);
    at::Tensor given = torch::autograd::grad({(weights[0] * factor).sum()}, {weights[0]})[0];
    const at::Tensor kept = step == 2 ? given : at::Tensor();
    weights[0].mutable_grad() = given;
    weights[1].mutable_grad() = step == 1 ? given.view({-1}).view({kWidth, kWidth}) : given;
    given.reset();
    optimizer.synchronize();
    for (const auto& w : weights) CHECK(same(w.grad(), sum));
    CHECK(!weights[0].grad().is_alias_of(weights[1].grad()));
    if (kept.defined()) CHECK(same(kept, factor));
    optimizer.step();
  }
}

TEST_CASE("gradients of passes that were not reduced, views of one memory") {
  struct Two : torch::nn::Module {
    Two() : a(register_parameter("a", weight(1))), b(register_parameter("b", weight(2))) {}
    at::Tensor forward(const at::Tensor& factor) {
      return ((a.view({-1}) + b.view({-1})) * factor).sum();
    }
    at::Tensor a, b;
  };
  const auto two = std::make_shared<Two>();
  hvd::DistributedDataParallel<Two> ddp(two);
  for (int step = 0; step < 3; ++step) {
    two->zero_grad();
    const auto factors = all_data({kWidth * kWidth}, kFloat, everyone(), step);
    {
      const auto guard = ddp.no_sync();
      ddp.forward(factors[static_cast<std::size_t>(hvd::rank())]).backward();
    }
    ddp.forward(torch::zeros({kWidth * kWidth})).backward();
    const at::Tensor mean = reduced(factors, hvd::ReduceOp::Average).view({kWidth, kWidth});
    for (const auto& w : {two->a, two->b}) CHECK(difference(w.grad(), mean) < 1e-6);
  }
}

TEST_CASE("gradients that are added up: in the optimizer's passes, and without zero_grad()") {
  const std::vector<at::Tensor> weights{weight(1), weight(2)};
  const auto wrapped = sgd(weights);
  DistributedOptimizerOptions options;
  options.backward_passes_per_step = 2;
  DistributedOptimizer optimizer(*wrapped, {}, options);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto expected = mean_gradients(weights, step, 2);
    for (int pass = 0; pass < 2; ++pass) loss_of(weights, hvd::rank(), step + pass).backward();
    optimizer.synchronize();
    check_gradients(weights, expected);
    optimizer.step();
  }
}

TEST_CASE(
    "gradients that are zeroed and not dropped, and those of parameters without one on some "
    "ranks") {
  const std::vector<at::Tensor> weights{weight(1), weight(2)};
  const auto wrapped = sgd(weights);
  DistributedOptimizer optimizer(*wrapped);
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
    const bool has_second = (hvd::rank() + step) % 2 == 0;
    (loss_of({weights[0]}, hvd::rank(), step) + (has_second ? weights[1].sum() : torch::zeros({})))
        .backward();
    optimizer.synchronize();
    check_gradients({weights[0]}, mean_gradients({weights[0]}, step));
    int given = 0;
    for (int r = 0; r < hvd::size(); ++r) given += (r + step) % 2 == 0 ? 1 : 0;
    if (given > 0) {
      REQUIRE(weights[1].grad().defined());
      CHECK(difference(weights[1].grad(), torch::full({kWidth, kWidth}, static_cast<double>(given) /
                                                                            hvd::size())) < 1e-6);
    }
    optimizer.step();
  }
}

TEST_CASE(
    "values of a backward pass that are as large as a gradient, more of them than there is room "
    "for") {
  const at::Tensor w = weight(1);
  const auto wrapped = sgd({w});
  DistributedOptimizer optimizer(*wrapped);
  std::vector<at::Tensor> kept;  // of all backward passes, each of the parameter's size
  std::vector<at::Tensor> copies;
  for (int step = 0; step < 8; ++step) {
    optimizer.zero_grad();
    at::Tensor x = w;
    for (int i = 0; i < 6; ++i) {
      x = x * 0.5 + data({kWidth, kWidth}, kFloat, hvd::rank(), i);
      x.register_hook([&](const at::Tensor& given) {
        const at::Tensor made = given * 1.0;
        kept.push_back(made);
        copies.push_back(made.cpu().to(at::kDouble));
      });
    }
    (x * (hvd::rank() + 1 + step)).sum().backward();
    optimizer.synchronize();
    double mean = 0;
    for (int r = 0; r < hvd::size(); ++r) mean += (r + 1.0 + step) / 64 / hvd::size();
    CHECK(difference(w.grad(), torch::full({kWidth, kWidth}, mean)) < 1e-6);
    optimizer.step();
  }
  for (std::size_t i = 0; i < kept.size(); ++i)
    CHECK(torch::equal(kept[i].to(at::kDouble), copies[i]));
}

TEST_CASE("memory that is taken without its deleter in a backward pass") {
  const at::Tensor w = weight(1);
  const auto wrapped = sgd({w});
  DistributedOptimizer optimizer(*wrapped);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    at::Tensor x = w * 2;
    x.register_hook([](const at::Tensor& given) {
      c10::Allocator& allocator = *c10::GetCPUAllocator();
      void* const memory = allocator.raw_allocate(given.nbytes());
      std::memset(memory, 1, given.nbytes());
      allocator.raw_deallocate(memory);
      void* const small = allocator.raw_allocate(24);
      allocator.raw_deallocate(small);
    });
    (x * (hvd::rank() + 1)).sum().backward();
    optimizer.step();
    CHECK(difference(w.grad(),
                     torch::full({kWidth, kWidth}, static_cast<double>(hvd::size() + 1))) < 1e-6);
  }
}

TEST_CASE("gradients live on after shutdown(), and a new world makes its own") {
  at::Tensor gradient, copy;
  for (int world = 0; world < 3; ++world) {
    const at::Tensor w = weight(1);
    const auto wrapped = sgd({w});
    {
      DistributedOptimizer optimizer(*wrapped);
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        const auto expected = mean_gradients({w}, step);
        loss_of({w}, hvd::rank(), step).backward();
        optimizer.synchronize();
        check_gradients({w}, expected);
        if (gradient.defined()) CHECK(torch::equal(gradient, copy));
        optimizer.step();
      }
    }
    gradient = w.grad();
    copy = gradient.clone();
    hvd::shutdown();
    w.mutable_grad() = at::Tensor();
    loss_of({w}, 0, 0).backward();  // in no world
    CHECK(torch::equal(gradient, copy));
    hvd::init();
  }
}

TEST_CASE("a child that is forked trains on by itself, and the rank does not see it") {
  if (at::get_num_threads() > 1) return;  // the C++ library's threads do not come along
  const at::Tensor w = weight(1);
  const auto wrapped = sgd({w});
  DistributedOptimizer optimizer(*wrapped);
  loss_of({w}, hvd::rank(), 0).backward();
  optimizer.step();
  optimizer.zero_grad();
  const auto expected = mean_gradients({w}, 1);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const at::Tensor own = data({kWidth, kWidth}, kFloat, 0, 9).requires_grad_(true);
    for (int i = 0; i < 3; ++i) {
      own.mutable_grad() = at::Tensor();
      (own * 3).sum().backward();
    }
    bool refused = false;
    try {
      loss_of({w}, 0, 1).backward();
    } catch (const hvd::NotInitialized&) {
      refused = true;
    }
    _exit(own.grad().eq(3).all().item<bool>() && refused ? 0 : 1);
  }
  loss_of({w}, hvd::rank(), 1).backward();
  optimizer.synchronize();
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  check_gradients({w}, expected);
  optimizer.step();
}

TEST_CASE(
    "layouts, types and conjugates: the parameter's own strides, half precision, complex "
    "gradients") {
  const at::Tensor last = data({16, 8, 4, 4}, kFloat, 0, 1)
                              .contiguous(at::MemoryFormat::ChannelsLast)
                              .requires_grad_(true);
  const at::Tensor half = data({kWidth, kWidth}, kHalf, 0, 2).requires_grad_(true);
  const at::Tensor complex = data({kWidth, kWidth}, at::kComplexFloat, 0, 3).requires_grad_(true);
  const auto wrapped = sgd({last, half, complex}, 0.01, 0);
  DistributedOptimizer optimizer(*wrapped);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const at::Tensor a = data(last.sizes(), kFloat, hvd::rank(), step),
                     b = data(half.sizes(), kHalf, hvd::rank(), step),
                     c = data(complex.sizes(), at::kComplexFloat, hvd::rank(), step);
    ((last * a).sum() + (half * b).sum().to(kFloat) + torch::real((complex * c).sum())).backward();
    optimizer.synchronize();
    CHECK(last.grad().strides() == last.strides());
    CHECK(same(last.grad().contiguous(),
               reduced(all_data(last.sizes(), kFloat, everyone(), step), hvd::ReduceOp::Average)));
    CHECK(same(half.grad(),
               reduced(all_data(half.sizes(), kHalf, everyone(), step), hvd::ReduceOp::Average)));
    const at::Tensor mean = reduced(all_data(complex.sizes(), at::kComplexFloat, everyone(), step),
                                    hvd::ReduceOp::Average);
    CHECK(difference(torch::view_as_real(complex.grad().resolve_conj()),
                     torch::view_as_real(mean.conj().resolve_conj())) < 1e-6);
    optimizer.step();
  }
}

TEST_CASE("gradients that come conjugated on some ranks only are reduced by their values") {
  for (const bool are_views : {true, false})
    for (const int shards : {0, 1, 2}) {
      CAPTURE(are_views);
      CAPTURE(shards);
      const at::Tensor w =
          data({kWidth, kWidth}, at::kComplexFloat, 0).clone().requires_grad_(true);
      const auto loss = [&](int rank, int step) {
        const at::Tensor c = data(w.sizes(), at::kComplexFloat, rank, step);
        return torch::real((rank % 2 == 0 ? w.conj() * c : w * c).sum());
      };
      const auto wrapped = sgd({w}, 0.01, 0);
      DistributedOptimizer optimizer(*wrapped, {{"w", w}},
                                     {.shard_optimizer_state = shards > 0,
                                      .shard_gradients = shards > 1,
                                      .gradients_are_views = are_views});
      for (int step = 0; step < 3; ++step) {
        at::Tensor sum = torch::zeros_like(w).detach();
        for (const int rank : everyone()) sum += torch::autograd::grad({loss(rank, step)}, {w})[0];
        const at::Tensor expected = w.detach() - 0.01 * sum / hvd::size();
        optimizer.zero_grad();
        loss(hvd::rank(), step).backward();
        optimizer.step();
        CHECK(difference(torch::view_as_real(w.detach()), torch::view_as_real(expected)) < 1e-5);
        CHECK(same_on_all_ranks(w));
      }
    }
}

}  // namespace
}  // namespace gradient_memory_test
