// Results in recycled memory: they are tensors like any others, whoever made their memory.
#include <sstream>
#include <thread>

#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kFloat;
using Tensors = std::vector<at::Tensor>;

// of each rank; of every collective's result at least 1 MiB
constexpr std::int64_t kRows = 300'000;

at::Tensor mine(int variant = 0) {
  return data({kRows * hvd::size(), 1}, kFloat, hvd::rank(), variant);
}
at::Tensor expected_scatter(int variant) {
  const at::Tensor whole = reduced(all_data({kRows * hvd::size(), 1}, kFloat, everyone(), variant),
                                   hvd::ReduceOp::Average);
  return whole.slice(0, kRows * hvd::rank(), kRows * (hvd::rank() + 1));
}
at::Tensor expected_exchange(int variant) {
  Tensors parts;
  for (const auto& all : all_data({kRows * hvd::size(), 1}, kFloat, everyone(), variant))
    parts.push_back(all.slice(0, kRows * hvd::rank(), kRows * (hvd::rank() + 1)));
  return torch::cat(parts);
}

TEST_CASE("results: right in a steady loop, in memory that comes back, and with the knob at 0") {
  for (const std::uint64_t kept : {std::uint64_t{64} << 20, std::uint64_t{0}}) {
    hvd::Config config = hvd::Config::from_environment();
    config.result_pool_bytes = kept;
    const Restarted restarted(config);
    void* place = nullptr;
    int came_back = 0;
    for (int step = 0; step < 4; ++step) {
      const at::Tensor gathered = hvd::allgather(mine(step), {.name = "g"});
      CHECK(
          same(gathered, torch::cat(all_data({kRows * hvd::size(), 1}, kFloat, everyone(), step))));
      came_back += gathered.data_ptr() == place ? 1 : 0;
      place = gathered.data_ptr();
      CHECK(same(hvd::alltoall(mine(step), {.name = "x"}).output, expected_exchange(step)));
      CHECK(same(hvd::reducescatter(mine(step), {.name = "s"}), expected_scatter(step)));
      CHECK(
          same(hvd::reducescatter_async(mine(step), {.name = "s"}).wait(), expected_scatter(step)));
      CHECK(hvd::grouped_allgather({mine(step), mine(step + 1)}, {.name = "gg"}).back().size(0) ==
            kRows * hvd::size() * hvd::size());
    }
    if (kept > 0) CHECK(came_back == 3);
  }
}

TEST_CASE(
    "results: storages can be resized, saved, viewed, kept after shutdown and freed in another "
    "thread") {
  at::Tensor held;
  {
    const Restarted restarted(hvd::Config::from_environment());
    at::Tensor result = hvd::reducescatter(mine());
    const at::Tensor expected = expected_scatter(0);
    CHECK(result.storage().nbytes() == result.nbytes());
    CHECK(result.storage().resizable());
    CHECK_FALSE(result.requires_grad());
    std::stringstream file;
    torch::save(result, file);
    at::Tensor loaded;
    torch::load(loaded, file);
    CHECK(same(loaded, expected));
    result.resize_({kRows + 1000, 1});
    CHECK(same(result.slice(0, 0, kRows), expected));
    result.slice(0, kRows).fill_(2);
    result.resize_({1000, 1});
    CHECK(same(result, expected.slice(0, 0, 1000)));

    at::Tensor reduced_plain = hvd::allreduce(mine());  // from the arena too
    reduced_plain.resize_({kRows * hvd::size() * 2, 1});
    CHECK(same(
        reduced_plain.slice(0, 0, kRows * hvd::size()),
        reduced(all_data({kRows * hvd::size(), 1}, kFloat, everyone()), hvd::ReduceOp::Average)));

    at::Tensor view = hvd::reducescatter(mine(1)).slice(0, 10, 20);
    for (int i = 0; i < 3; ++i) hvd::reducescatter(mine(2));
    CHECK(same(view, expected_scatter(1).slice(0, 10, 20)));
    at::Tensor other = hvd::reducescatter(mine(3));
    std::thread([&] { other.reset(); }).join();
    held = hvd::reducescatter(mine(4));
  }
  for (int i = 0; i < 3; ++i) hvd::reducescatter(mine(2));
  CHECK(same(held, expected_scatter(4)));
  // memory of a world that is gone
  const at::Tensor sum = hvd::allreduce(held, {.op = hvd::ReduceOp::Sum});
  CHECK(sum.size(0) == kRows);
  CHECK(same_on_all_ranks(sum));
}

TEST_CASE(
    "results: what holds them all does not take the memory of gradients; gradients pass them") {
  hvd::Config config = hvd::Config::from_environment();
  config.arena_bytes = std::uint64_t{64} << 20;
  const Restarted restarted(config);
  Tensors all;
  // 28 MiB of the 16 that results may have of the arena
  for (int i = 0; i < 24; ++i) all.push_back(hvd::reducescatter(mine(i)));
  bool right = true;
  for (int i = 0; i < 24; ++i)
    right = right && same(all[static_cast<std::size_t>(i)], expected_scatter(i));
  CHECK(right);
  const bool shares = hvd::allocate_shared(64) != nullptr;
  if (shares) CHECK(hvd::allocate_shared(std::size_t{24} << 20) != nullptr);

  at::Tensor input = mine().requires_grad_();
  hvd::allgather(input).sum().backward();
  CHECK(same(input.grad(), torch::ones_like(input)));
}

}  // namespace
