// The library as LibTorch programs see it: its life, process sets, join, counters.
#include <functional>

#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat, at::kInt;
using hvd::ReduceOp;

/// While no world runs: that is said first, whatever else is wrong with a call.
void check_nothing_runs() {
  const at::Tensor none, sparse = torch::eye(3).to_sparse(),
                         strange = torch::ones({2}, at::kBFloat16).to(at::kFloat8_e5m2);
  at::Tensor some = torch::ones({2});
  const auto refused = [](const std::function<void()>& call) {
    CHECK_THROWS_AS(call(), hvd::NotInitialized);
  };
  for (const at::Tensor& wrong : {none, sparse, strange}) {
    refused([&] { hvd::allreduce(wrong); });
    refused([&] { hvd::allreduce_(wrong); });
    refused([&] { hvd::allreduce_async_(wrong); });
    refused([&] { hvd::grouped_allreduce({some, wrong}); });
    refused([&] { hvd::grouped_allreduce_({some, wrong}); });
    refused([&] { hvd::allgather(wrong); });
    refused([&] { hvd::broadcast(wrong, {.root_rank = -3}); });
    refused([&] { hvd::broadcast_(wrong, {.root_rank = -3}); });
    refused([&] { hvd::alltoall(wrong); });
    refused([&] { hvd::reducescatter(wrong); });
    refused([&] { hvd::allgather_into(wrong, some); });
    refused([&] { hvd::alltoall_into(some, wrong); });
    refused([&] { hvd::allreduce_init(wrong); });
    refused([&] { hvd::allgather_init(wrong); });
    refused([&] { hvd::send(wrong, {.peer = -4, .tag = -1}); });
    refused([&] { hvd::recv_async(wrong, {.tag = -1}); });
  }
  refused([] { hvd::grouped_allreduce({}); });
  refused([&] { hvd::allreduce(some, {.compression = hvd::Compression::int8()}); });
  refused([&] { hvd::sparse_allreduce(some); });
  refused([&] { hvd::alltoall(some, {.splits = torch::ones({2})}); });
  refused([&] { hvd::grouped_reducescatter({some, some}, {.counts = {1}}); });
  refused([] { hvd::remove_process_set(hvd::global_process_set()); });
  refused([] { hvd::add_process_set({}); });
  float value = 0;
  const hvd::Buffer buffer{&value, hvd::DataType::Float32, {1}, {}},
      other{&value, hvd::DataType::Float64, {1}, {}};
  const hvd::Buffer on_gpu{&value, hvd::DataType::Float32, {1}, {hvd::DeviceKind::Cuda, 0}};
  refused([&] { hvd::allreduce(buffer, other); });
  refused([&] { hvd::allreduce(buffer, buffer, {.compression = hvd::Compression::int8()}); });
  refused([&] { hvd::grouped_allreduce({buffer}, {}); });
  refused([&] { hvd::allgather(on_gpu); });
  refused([&] { hvd::grouped_allgather(std::vector<hvd::Buffer>()); });
  refused([&] { hvd::allgather_into(other, buffer); });
  refused([&] { hvd::allreduce_init(buffer, other); });
  refused([&] { hvd::allgather_init(other, buffer); });
  refused([&] { hvd::send_async(on_gpu, {.peer = 0}); });
  torch::optim::SGD sgd(std::vector<at::Tensor>{some}, 0.1);
  refused([&] {
    hvd::DistributedOptimizer optimizer(sgd, hvd::NamedTensors{}, {.backward_passes_per_step = 0});
  });
}

TEST_CASE("life: init twice, topology, shutdown, init again") {
  const int rank = hvd::rank();
  const int size = hvd::size();
  hvd::init();
  CHECK(hvd::rank() == rank);
  CHECK(hvd::local_rank() == rank);
  CHECK(hvd::local_size() == size);
  CHECK(hvd::cross_rank() == 0);
  CHECK(hvd::cross_size() == 1);
  CHECK(hvd::is_homogeneous());
  CHECK(!hvd::backend_description().empty());
  CHECK(hvd::global_process_set().size() == size);
  CHECK(hvd::global_process_set().rank() == rank);
  CHECK(hvd::global_process_set().included());
  CHECK(hvd::global_process_set().id() == 0);

  const auto done = hvd::allreduce_async(rank_tensor(0), {.op = ReduceOp::Sum});
  const auto pending = hvd::allreduce_async(
      rank_tensor(0), {.name = "only rank " + std::to_string(rank), .op = ReduceOp::Sum});
  hvd::shutdown();
  CHECK(!hvd::is_initialized());
  CHECK(same(done.wait(), torch::full({3}, size * (size - 1) / 2, kFloat)));
  CHECK(pending.done());
  if (size > 1) {
    CHECK(contains(error_of<hvd::Shutdown>([&] { pending.wait(); }),
                   "only rank " + std::to_string(rank)));
    CHECK_THROWS_AS(pending.wait(), hvd::Shutdown);
  }
  CHECK_THROWS_AS(hvd::rank(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::size(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::local_rank(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::local_size(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::cross_rank(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::cross_size(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::is_homogeneous(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::stats(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::barrier(), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::allreduce(torch::ones({2})), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::allgather(torch::ones({2})), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::broadcast(torch::ones({2})), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::broadcast_object(1, 0), hvd::NotInitialized);
  CHECK_THROWS_AS(hvd::process_set(0), hvd::NotInitialized);
  check_nothing_runs();
  hvd::init();
  CHECK(hvd::rank() == rank);
  CHECK(hvd::size() == size);
  CHECK(hvd::stats().tensors_submitted == 0);
  CHECK(same(hvd::allreduce(rank_tensor(0), {.op = ReduceOp::Sum}), reduced_ranks(ReduceOp::Sum)));
}

TEST_CASE("process sets of the configuration") {
  const int size = hvd::size();
  std::vector<int> even;
  std::vector<int> odd;
  for (int r = 0; r < size; ++r) (r % 2 == 0 ? even : odd).push_back(r);
  hvd::Config config;
  config.process_sets = {even, {size - 1}};
  if (!odd.empty()) config.process_sets.push_back(odd);
  const Restarted world(config);
  const auto sets = static_cast<int>(config.process_sets.size());
  CHECK_THROWS_AS(hvd::process_set(sets + 1), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::process_set(-1), hvd::InvalidArgument);
  for (int id = 1; id <= sets; ++id) {
    const auto& ranks = config.process_sets[static_cast<std::size_t>(id - 1)];
    const hvd::ProcessSet set = hvd::process_set(id);
    const auto place = std::find(ranks.begin(), ranks.end(), hvd::rank());
    CHECK(set.id() == id);
    CHECK(set.size() == static_cast<int>(ranks.size()));
    CHECK(set.included() == (place != ranks.end()));
    CHECK(set.ranks() == ranks);
    if (!set.included()) {
      CHECK_THROWS_AS(hvd::allreduce(torch::ones({2}), {.process_set = set}), hvd::InvalidArgument);
      CHECK_THROWS_AS(hvd::allgather(torch::ones({2}), {.process_set = set}), hvd::InvalidArgument);
      CHECK_THROWS_AS(hvd::broadcast(torch::ones({2}), {.root_rank = ranks[0], .process_set = set}),
                      hvd::InvalidArgument);
      CHECK_THROWS_AS(hvd::barrier(set), hvd::InvalidArgument);
      continue;
    }
    CHECK(set.rank() == place - ranks.begin());
    hvd::barrier(set);
    CHECK(same(hvd::allreduce(data({5}, kDouble, hvd::rank()), {.name = "x", .process_set = set}),
               reduced(all_data({5}, kDouble, ranks), ReduceOp::Average)));
    CHECK(same(hvd::allgather(data({2}, kInt, hvd::rank()), {.name = "x", .process_set = set}),
               torch::cat(all_data({2}, kInt, ranks))));
    const int root = ranks.back();  // global
    CHECK(same(hvd::broadcast(data({5}, kInt, hvd::rank()),
                              {.name = "x", .root_rank = root, .process_set = set}),
               data({5}, kInt, root)));
    for (int r = 0; r < size; ++r)
      if (std::find(ranks.begin(), ranks.end(), r) == ranks.end())
        CHECK_THROWS_AS(hvd::broadcast(torch::ones({2}), {.root_rank = r, .process_set = set}),
                        hvd::InvalidArgument);
    CHECK(hvd::broadcast_object(hvd::rank() * 3, root, set) == root * 3);
    CHECK(hvd::allgather_object(hvd::rank(), set) == ranks);
    // Gradients stay in the set.
    const at::Tensor x = data({4}, kDouble, hvd::rank()).requires_grad_();
    (hvd::allgather(hvd::broadcast(x, {.root_rank = root, .process_set = set}),
                    {.process_set = set})
         .sum() *
     (hvd::rank() + 1))
        .backward();
    double mean = 0;
    for (const int r : ranks)
      mean += static_cast<double>(r + 1) / static_cast<double>(ranks.size());
    CHECK(torch::allclose(x.grad(), torch::full({4}, hvd::rank() == root ? mean : 0.0, kDouble)));
    const auto members = static_cast<std::int64_t>(ranks.size());
    const at::Tensor y = data({2 * members}, kDouble, hvd::rank()).requires_grad_();
    (hvd::allreduce(y, {.op = ReduceOp::Sum, .process_set = set}).sum() +
     hvd::reducescatter(y, {.op = ReduceOp::Sum, .process_set = set}).sum() +
     hvd::alltoall(y, {.process_set = set}).output.sum())
        .backward();
    CHECK(same(y.grad(), torch::full_like(y, 2.0 * static_cast<double>(members) + 1)));
    if (ranks.size() > 1)  // the text has global ranks
      CHECK(contains(error_of<hvd::Mismatch>([&] {
                       hvd::allreduce(torch::ones({hvd::rank() == root ? 2 : 3}),
                                      {.name = "x", .process_set = set});
                     }),
                     "rank " + std::to_string(root) + ": float32 [2]"));
  }
  // The same name in all sets at once; the global set works beside them.
  std::vector<std::pair<int, hvd::Handle<at::Tensor>>> handles;
  for (int id = 0; id <= sets; ++id)
    if (hvd::process_set(id).included())
      handles.emplace_back(
          id, hvd::allreduce_async(torch::ones({3}), {.name = "everywhere",
                                                      .op = ReduceOp::Sum,
                                                      .process_set = hvd::process_set(id)}));
  for (const auto& [id, handle] : handles)
    CHECK(same(handle.wait(), torch::full({3}, static_cast<float>(hvd::process_set(id).size()))));
  hvd::barrier();
}

TEST_CASE("process sets made and removed later, each operation on one") {
  const int n = hvd::size();
  if (n == 1) return;
  std::vector<int> some{0, n - 1};
  const hvd::ProcessSet set = hvd::add_process_set({n - 1, 0});
  CHECK(set.ranks() == some);
  CHECK(set.size() == 2);
  const bool included = hvd::rank() == 0 || last();
  CHECK(set.included() == included);
  CHECK(set.rank() == (hvd::rank() == 0 ? 0 : last() ? 1 : -1));
  const at::Tensor mine = torch::full({2}, hvd::rank() + 1.0);
  if (included) {
    CHECK(same(hvd::allreduce(mine, {.op = ReduceOp::Sum, .process_set = set}),
               torch::full({2}, n + 1.0)));
    CHECK(same(hvd::broadcast(mine, {.root_rank = n - 1, .process_set = set}),
               torch::full({2}, static_cast<double>(n))));
    CHECK(hvd::allgather(mine, {.process_set = set}).size(0) == 4);
    CHECK(same(hvd::alltoall(mine, {.process_set = set}).output,
               torch::tensor({1.0F, static_cast<float>(n)})));
    CHECK(same(hvd::reducescatter(mine, {.op = ReduceOp::Sum, .process_set = set}),
               torch::full({1}, n + 1.0)));
    CHECK(same(hvd::sparse_allreduce(mine.to_sparse(), {.op = ReduceOp::Sum, .process_set = set})
                   .to_dense(),
               torch::full({2}, n + 1.0)));
    CHECK(hvd::join(set) >= 0);
    hvd::barrier(set);
    if (n > 2)
      CHECK_THROWS_AS(hvd::broadcast(mine, {.root_rank = 1, .process_set = set}),
                      hvd::InvalidArgument);
  } else {
    CHECK_THROWS_AS(hvd::allreduce(mine, {.process_set = set}), hvd::InvalidArgument);
  }
  hvd::remove_process_set(set);
  CHECK_THROWS_AS(hvd::allreduce(mine, {.process_set = set}), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::add_process_set({0, n}), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::add_process_set({0, 0}), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::remove_process_set(hvd::global_process_set()), hvd::InvalidArgument);
}

TEST_CASE("join: uneven numbers of steps") {
  const int n = hvd::size();
  for (int step = 0; step <= hvd::rank(); ++step) {
    const at::Tensor mean = hvd::allreduce(torch::full({3}, 6.0), {.name = "grad"});
    CHECK(torch::allclose(mean, torch::full({3}, 6.0 * (n - step) / n)));
  }
  if (last() && n > 1) {
    CHECK(contains(error_of<hvd::Joined>([] { hvd::allgather(torch::ones({1}), {.name = "g"}); }),
                   "allgather 'g'"));
    CHECK_THROWS_AS(hvd::alltoall(torch::ones({hvd::size()}), {.name = "a"}), hvd::Joined);
    CHECK_THROWS_AS(hvd::reducescatter(torch::ones({1}), {.name = "r"}), hvd::Joined);
    hvd::barrier();
  }
  CHECK(hvd::join() == n - 1);
  CHECK(hvd::allgather(torch::ones({1}), {.name = "g"}).size(0) == n);
}

TEST_CASE("stats count what was done") {
  const auto before = hvd::stats();
  hvd::allreduce(torch::ones({100}));
  hvd::grouped_allreduce({torch::ones({10}), torch::ones({20})});
  hvd::broadcast(torch::ones({7}));
  const auto after = hvd::stats();
  CHECK(after.tensors_submitted - before.tensors_submitted == 4);
  CHECK(after.bytes_reduced - before.bytes_reduced == 4 * 130);
  CHECK(after.batches_run - before.batches_run == 3);
  CHECK(after.tensors_fused - before.tensors_fused == 2);
  CHECK(after.negotiation_rounds >= before.negotiation_rounds);
  if (hvd::size() > 1) CHECK(after.negotiation_rounds - before.negotiation_rounds >= 3);
  CHECK(after.bytes_to_other_hosts == before.bytes_to_other_hosts);
}

}  // namespace
