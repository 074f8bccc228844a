// The backend of ranks that share a GPU, by itself: memory that ends or that another rank still has
// open, refused calls, what comes after a failure. On the host table.
#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/errors.h"
#include "ops/gpu/ipc/shared_gpu_backend.h"
#include "tests/support/gpu/host_gpu_api.h"

namespace hvd::gpu::test {
namespace {

/// Rank 0 of so many on one GPU; the others exist in the shared memory only.
class Sharer {
 public:
  static constexpr std::uint32_t kSlots = 16;

  explicit Sharer(int ranks)
      : topology_(Topology::single_domain(0, ranks)),
        bytes_(Board::bytes_needed(ranks, kSlots)),
        memory_(static_cast<std::byte*>(::operator new(bytes_, kAlignment))) {
    std::memset(memory_.get(), 0, bytes_);
    Board::format({memory_.get(), bytes_}, ranks, kSlots);
    board_ = std::make_unique<Board>(std::span(memory_.get(), bytes_), 0);
    for (int rank = 0; rank < ranks; ++rank) controls.emplace_back();
    set.ranks = topology_.domain_ranks;
    set.rank = 0;
    traits.device = {DeviceKind::Cuda, 0};
    traits.op = ReduceOp::Sum;
    traits.set = &set;
  }

  std::unique_ptr<SharedGpuBackend> backend(SharedGpuOptions options = {}) {
    std::vector<SharedControl*> all;
    for (auto& control : controls) all.push_back(&control);
    return std::make_unique<SharedGpuBackend>(device.table(), 0, *board_, topology_, std::move(all),
                                              std::move(options));
  }
  /// The only batch, of one tensor of these values, in place.
  Batch batch(SharedGpuBackend& backend, std::vector<float>& values) {
    {
      const BoardLock lock(board());
      board().batches().open(1, 0);
    }
    BatchMember member;
    member.name = "t";
    member.input = member.output = values.data();
    member.count = static_cast<std::int64_t>(values.size());
    // as if the others had theirs at the same place
    member.locations.assign(set.ranks.size(), backend.prepare(traits, member));
    Batch made;
    made.sequence = 1;
    made.traits = traits;
    made.ranks = set.ranks;
    made.members.push_back(std::move(member));
    return made;
  }

  Board& board() { return *board_; }

  HostCluster cluster;
  HostDevice device{cluster, 0};
  std::deque<SharedControl> controls;
  ProcessSetInfo set;
  BatchTraits traits;

 private:
  static constexpr std::align_val_t kAlignment{4096};
  struct Deleter {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
  };
  const Topology topology_;
  const std::size_t bytes_;
  std::unique_ptr<std::byte, Deleter> memory_;
  std::unique_ptr<Board> board_;
};

}  // namespace

TEST_CASE("shared gpu: a batch that is done stays done") {
  Sharer alone(1);
  alone.traits.prescale_factor = 3;
  std::vector<float> values{1, 2, 5};
  {
    const auto backend = alone.backend();
    const auto execution = backend->launch(alone.batch(*backend, values));
    while (execution->advance() != Progress::Done) continue;
    CHECK(values == std::vector<float>{3, 6, 15});
    CHECK(execution->advance() == Progress::Done);
    CHECK(execution->is_enqueued());
  }
  CHECK(alone.device.leaks().empty());
  CHECK(alone.cluster.misuses().empty());
}

TEST_CASE(
    "shared gpu: who waits for other ranks is rung by the last, and asks again and again only for "
    "the device") {
  Sharer many(3);
  many.traits.kind = OpKind::Broadcast;
  many.traits.root = 0;
  const auto doorbells = [&many] {
    return std::array{
        many.board().bells().wait_doorbell().load(), many.board().bells().work_doorbell(0).load(),
        many.board().bells().work_doorbell(1).load(), many.board().bells().work_doorbell(2).load()};
  };
  SharedGpuOptions options;
  options.rest_limit = std::chrono::milliseconds(0);  // the others never close this rank's memory
  const auto backend = many.backend(options);
  std::vector<float> values{1, 2, 3};
  Batch batch = many.batch(*backend, values);
  auto& state = many.board().batches().state(1);
  SUBCASE("the first") {
    const auto before = doorbells();
    const auto execution = backend->launch(std::move(batch));
    CHECK(doorbells() == before);
    CHECK(execution->advance() == Progress::Idle);
    CHECK(execution->is_rung());
    state.finished = 3;
    CHECK(execution->advance() != Progress::Idle);
    CHECK_FALSE(execution->is_rung());
    while (execution->advance() != Progress::Done) continue;
  }
  SUBCASE("the last") {
    state.finished = 2;
    const auto before = doorbells();
    const auto execution = backend->launch(std::move(batch));
    const auto now = doorbells();
    CHECK(now[0] != before[0]);
    CHECK(now[1] == before[1]);  // its own
    CHECK(now[2] != before[2]);
    CHECK(now[3] != before[3]);
    while (execution->advance() != Progress::Done) continue;
  }
}

TEST_CASE(
    "shared gpu: what others may still read is not given to the next tensor before they are "
    "through with it") {
  Sharer two(2);
  two.traits.kind = OpKind::Broadcast;
  SharedGpuOptions options;
  options.rest_limit = std::chrono::milliseconds(0);
  const auto backend = two.backend(options);
  std::vector<float> values{1, 2, 5};
  Batch batch = two.batch(*backend, values);
  const std::uint64_t first = batch.members[0].locations[0];
  const auto execution = backend->launch(std::move(batch));
  CHECK(execution->advance() == Progress::Idle);  // the other rank is not there yet
  two.board().batches().state(1).finished.fetch_add(1);
  while (execution->advance() != Progress::Done) continue;
  BatchMember next;
  next.name = "next";
  next.input = next.output = values.data();
  next.count = 3;
  const std::uint64_t second = backend->prepare(two.traits, next);
  CHECK(second != first);
  two.board().batches().depart(1, 2);
  const std::uint64_t third = backend->prepare(two.traits, next);
  CHECK(third != first);
  CHECK(third != second);
  two.board().batches().depart(1, 2);  // the other rank
  CHECK(backend->prepare(two.traits, next) == first);
}

TEST_CASE("shared gpu: after a failure nothing is launched any more") {
  Sharer alone(1);
  const auto backend = alone.backend();
  std::vector<float> values{1};
  Batch batch = alone.batch(*backend, values);
  backend->abort();
  CHECK_THROWS_WITH_AS(static_cast<void>(backend->launch(std::move(batch))),
                       "a batch on the shared GPU failed on rank 0 (cuda:0) for 't': given up "
                       "after an earlier failure",
                       BackendError);
  CHECK(alone.device.enqueued.empty());
}

TEST_CASE(
    "shared gpu: memory that another rank has open is freed when that has closed it, or never") {
  SharedGpuOptions options;
  options.rest_limit = std::chrono::milliseconds(20);
  Sharer never(2);
  auto backend = never.backend(options);
  auto lent = backend->allocate(never.traits, 100);
  REQUIRE(lent != nullptr);
  lent.reset();
  backend.reset();
  CHECK(never.controls[0].closed.load());
  CHECK(never.device.live_memory() == 1);

  options.rest_limit = std::chrono::seconds(60);
  Sharer soon(2);
  backend = soon.backend(options);
  lent = backend->allocate(soon.traits, 100);
  lent.reset();
  std::thread other([&] {
    while (!soon.controls[0].closed.load()) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    soon.controls[1].closed = true;
  });
  backend.reset();
  other.join();
  CHECK(soon.device.live_memory() == 0);
}

TEST_CASE(
    "shared gpu: where the device does not come to rest nothing is let go, and the others' memory "
    "is never said to be closed") {
  for (const bool rests : {true, false}) {
    CAPTURE(rests);
    std::vector<float> values(4, 1);
    Sharer alone(1);
    SharedGpuOptions options;
    options.rest_limit = std::chrono::milliseconds(rests ? 60'000 : 20);
    auto backend = alone.backend(options);
    auto batch = alone.batch(*backend, values);
    batch.members.front().ready_event = alone.device.user_event(rests ? 3 : 1 << 30, {});
    auto execution = backend->launch(std::move(batch));
    CHECK(backend->abort() == rests);
    execution.reset();
    backend.reset();
    CHECK(alone.controls[0].closed.load() == rests);
    CHECK(alone.device.leaks() == (rests ? "" : "8 events 1 pieces of memory "));
  }
}

TEST_CASE(
    "shared gpu: events that another rank has open are destroyed when that has closed them, or "
    "never, also without any memory") {
  for (const bool closes : {false, true}) {
    CAPTURE(closes);
    SharedGpuOptions options;
    options.rest_limit = closes ? std::chrono::milliseconds(60'000) : std::chrono::milliseconds(20);
    Sharer two(2);
    HostDevice other{two.cluster, 1};
    auto backend = two.backend(options);
    two.traits.kind = OpKind::Broadcast;
    two.traits.root = 1;  // this rank brings nothing
    std::vector<float> values(4, 1);
    auto batch = two.batch(*backend, values);
    batch.members.front().locations.assign(2, std::uint64_t{1} << 60);
    auto execution = backend->launch(std::move(batch));
    CHECK(execution->advance() == Progress::Idle);
    CHECK(two.device.live_memory() == 0);
    CudaEvent* open = nullptr;
    REQUIRE(other.table().ipc_open_event(&open, two.controls[0].packed[0]) == CudaCode::Success);
    std::thread closing;
    if (closes)
      closing = std::thread([&] {
        while (!two.controls[0].closed.load()) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        other.table().event_destroy(open);
        two.controls[1].closed = true;
      });
    execution.reset();
    backend.reset();
    if (closing.joinable()) closing.join();
    CHECK(two.cluster.misuses().empty());
    CHECK(two.device.leaks() == (closes ? "" : "8 events "));
  }
}

TEST_CASE(
    "shared gpu: memory for users that is not to be had is none, and the first reason is kept") {
  Sharer alone(1);
  const auto backend = alone.backend();
  auto elsewhere = alone.traits;
  elsewhere.device.index = 1;
  CHECK(backend->allocate(elsewhere, 100) == nullptr);
  CHECK(alone.device.calls("cudaMalloc") == 0);
  alone.device.fail_call("cudaIpcGetMemHandle", 700);
  CHECK(backend->allocate(alone.traits, 100) == nullptr);
  CHECK(alone.device.live_memory() == 0);
  const std::string words =
      "cudaIpcGetMemHandle failed on rank 0 (cuda:0): host CUDA says 700 (CUDA error 700)";
  CHECK(backend->refusal().starts_with(words));
  alone.device.fail_call("cudaMalloc", 701);
  CHECK(backend->allocate(alone.traits, 100) == nullptr);
  CHECK(backend->refusal().starts_with(words));
  alone.device.memory_bytes = 0;
  CHECK(backend->allocate(alone.traits, 100) == nullptr);
  alone.device.memory_bytes = std::size_t{64} << 20;
  const auto memory = backend->allocate(alone.traits, 100);
  CHECK(memory != nullptr);  // none of it is for good
}

TEST_CASE(
    "shared gpu: a tensor without a place fails the batch, with as much as the device says about "
    "its memory") {
  for (const bool says : {true, false}) {
    CAPTURE(says);
    Sharer alone(1);
    alone.device.memory_bytes = 0;
    if (!says) alone.device.fail_call("cudaMemGetInfo", 1);
    const auto backend = alone.backend();
    std::vector<float> values(1 << 20);
    const std::string room = says ? ", 0.0 MiB of 8192.0 MiB are free" : "";
    CHECK_THROWS_WITH_AS(static_cast<void>(backend->launch(alone.batch(*backend, values))),
                         ("an allocation on the shared GPU failed on rank 0 (cuda:0) for 't': rank "
                          "0 has no place for 't' (4.0 MiB): out of memory" +
                          room)
                             .c_str(),
                         BackendError);
  }
}

TEST_CASE(
    "shared gpu: a tensor without a place on another rank fails the batch here; why is known there "
    "alone") {
  SharedGpuOptions options;
  options.rest_limit = std::chrono::milliseconds(0);
  Sharer two(2);
  const auto backend = two.backend(options);
  std::vector<float> values(1 << 20);
  Batch batch = two.batch(*backend, values);
  batch.members.front().locations[1] = std::uint64_t{1} << 62;
  CHECK_THROWS_WITH_AS(static_cast<void>(backend->launch(std::move(batch))),
                       "an allocation on the shared GPU failed on rank 0 (cuda:0) for 't': rank 1 "
                       "has no place for 't' (4.0 MiB)",
                       BackendError);
}

TEST_CASE(
    "shared gpu: sets that are not this backend's are left to others, and so is what the kernel "
    "does not do") {
  Sharer two(2);
  SharedGpuOptions options;
  options.rest_limit = std::chrono::milliseconds(0);
  options.takes = [](const ProcessSetInfo& set) { return set.id == 0; };
  const auto backend = two.backend(options);
  const auto supports = [&](DataType dtype, ReduceOp op) {
    two.traits.dtype = dtype;
    two.traits.op = op;
    return backend->supports(two.traits);
  };
  CHECK(supports(DataType::Float32, ReduceOp::Product));
  CHECK(supports(DataType::Bool, ReduceOp::Max));
  CHECK_FALSE(supports(DataType::Bool, ReduceOp::Sum));
  CHECK(supports(DataType::Complex128, ReduceOp::Average));
  CHECK_FALSE(supports(DataType::Complex64, ReduceOp::Min));
  CHECK_FALSE(supports(DataType::Float32, ReduceOp::Adasum));
  two.set.id = 1;
  CHECK_FALSE(supports(DataType::Float32, ReduceOp::Sum));
}

TEST_CASE("device pool: no more slabs than the other ranks can be told of") {
  HostCluster cluster;
  HostDevice device(cluster, 0);
  SharedControl control{};
  {
    DevicePool pool(CallContext{.table = &device.table(), .rank = 0, .device = 0, .tensors = {}},
                    control);
    std::vector<std::byte*> blocks;
    for (std::size_t slab = 0; slab < SharedControl::kSlabs; ++slab) {
      device.memory_bytes = kDeviceGranularity;  // so that each slab is the least that will do
      blocks.push_back(pool.allocate(kDeviceGranularity));
      REQUIRE(blocks.back() != nullptr);
      const auto place = pool.find(blocks.back());
      REQUIRE(place.has_value());
      CHECK(place->slab == slab);
      CHECK(pool.at(PoolPlace::of(place->word())) == blocks.back());
    }
    CHECK(pool.slabs() == SharedControl::kSlabs);
    device.memory_bytes = std::size_t{1} << 40;
    const int before = device.calls("cudaMalloc");
    CHECK(pool.allocate(1) == nullptr);
    CHECK(device.calls("cudaMalloc") == before);
    std::byte foreign{};
    CHECK_FALSE(pool.find(&foreign).has_value());
    pool.free(&foreign);  // nothing of this pool's
    pool.free(blocks[40]);
    CHECK(pool.allocate(100) == blocks[40]);
  }
  CHECK(device.live_memory() == 0);
}

}  // namespace hvd::gpu::test
