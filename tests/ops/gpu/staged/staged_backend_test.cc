// The backend that stages tensors through the host, by itself, over a backend of host tensors made
// for the test. On the host table.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <future>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/errors.h"
#include "ops/gpu/staged/staged_backend.h"
#include "tests/support/gpu/host_gpu_api.h"

namespace hvd::gpu::test {
namespace {

/// Doubles floats, after so many calls that find nothing to do. Publishes nothing, as a backend
/// without shared memory.
class Doubling : public Backend {
 public:
  int idle_calls = 0;
  std::vector<std::uint64_t> released;

  std::string_view name() const override { return "doubling"; }
  bool supports(const BatchTraits& traits) const override {
    return traits.device.kind == DeviceKind::Cpu && traits.kind == OpKind::Allreduce;
  }
  void release(const BatchTraits& /*traits*/, std::uint64_t location) noexcept override {
    released.push_back(location);
  }
  std::unique_ptr<Execution> launch(Batch batch) override {
    return std::make_unique<Doubled>(std::move(batch), idle_calls);
  }

 private:
  class Doubled : public Execution {
   public:
    Doubled(Batch batch, int idle_calls) : batch_(std::move(batch)), idle_calls_(idle_calls) {}
    Progress advance() override {
      if (idle_calls_-- > 0) return Progress::Idle;
      for (const auto& member : batch_.members)
        for (std::int64_t i = 0; i < member.count; ++i)
          static_cast<float*>(member.output)[i] = 2 * static_cast<const float*>(member.input)[i];
      return Progress::Done;
    }

   private:
    const Batch batch_;
    int idle_calls_;
  };
};

struct Stage {
  HostCluster cluster;
  HostDevice device{cluster, 0};
  std::vector<std::byte> memory = std::vector<std::byte>(1 << 16);
  std::shared_ptr<Arena> arena = std::make_shared<Arena>(aligned());
  Doubling host;
  BatchTraits traits;

  Stage() {
    traits.op = ReduceOp::Sum;
    traits.device = {DeviceKind::Cuda, 0};
  }
  std::unique_ptr<StagedBackend> backend() {
    return std::make_unique<StagedBackend>(device.table(), 0, 0, std::vector<Backend*>{&host},
                                           arena, 0, WorldFailure{});
  }
  static BatchMember member(std::string_view name, std::vector<float>& values) {
    BatchMember made;
    made.name = name;
    made.input = made.output = values.data();
    made.count = static_cast<std::int64_t>(values.size());
    return made;
  }

 private:
  std::span<std::byte> aligned() {
    void* begin = memory.data();
    std::size_t room = memory.size();
    auto* at = static_cast<std::byte*>(std::align(64, 1 << 15, begin, room));
    return {at, std::size_t{1} << 15};
  }
};

}  // namespace

TEST_CASE(
    "staged: tensors of a backend that publishes nothing are told apart, and come back when host "
    "and device are done") {
  Stage stage;
  stage.device.delay = 2;
  stage.host.idle_calls = 3;
  {
    const auto backend = stage.backend();
    std::vector<float> first{1, 2, 3}, second{10}, nothing;
    Batch batch;
    batch.traits = stage.traits;
    for (const auto& [name, values] : {std::pair("first", &first), std::pair("second", &second),
                                       std::pair("nothing", &nothing)}) {
      batch.members.push_back(Stage::member(name, *values));
      BatchMember& member = batch.members.back();
      member.locations = {backend->prepare(stage.traits, member)};
      CHECK(member.copied);
      CHECK(member.locations[0] != 0);
      for (std::size_t other = 0; other + 1 < batch.members.size(); ++other)
        CHECK(member.locations[0] != batch.members[other].locations[0]);
    }
    CHECK(stage.device.calls("cudaMemcpyAsync") == 2);  // the last has nothing to copy
    first = {-1, -1, -1};                               // was copied
    const auto execution = backend->launch(std::move(batch));
    for (int i = 0; i < 3; ++i) CHECK(execution->advance() == Progress::Idle);
    CHECK_FALSE(execution->copying_out_since().has_value());
    while (execution->advance() != Progress::Done)
      CHECK(execution->copying_out_since().has_value());
    CHECK(execution->advance() == Progress::Done);
    CHECK(first == std::vector<float>{2, 4, 6});
    CHECK(second == std::vector<float>{20});
    CHECK(stage.device.calls("cudaMemcpyAsync") == 4);
    CHECK(execution->completion_event() == nullptr);  // done is done for the host, too
  }
  CHECK(stage.device.leaks().empty());
  CHECK(stage.arena->used_bytes() == 0);
  CHECK(stage.cluster.misuses().empty());
}

TEST_CASE(
    "staged: a tensor that is not launched is let go once, and cannot be launched afterwards") {
  Stage stage;
  const auto backend = stage.backend();
  const std::size_t before = stage.arena->used_bytes();
  std::vector<float> values(100, 1);
  Batch batch;
  batch.traits = stage.traits;
  batch.members.push_back(Stage::member("t", values));
  const std::uint64_t location = backend->prepare(stage.traits, batch.members[0]);
  CHECK(stage.arena->used_bytes() > before);
  backend->release(stage.traits, location);
  CHECK(stage.arena->used_bytes() == before);
  backend->release(stage.traits, location);
  // what the host's backend had returned
  CHECK(stage.host.released == std::vector<std::uint64_t>{0});
  batch.members[0].locations = {location};
  CHECK_THROWS_WITH_AS(static_cast<void>(backend->launch(std::move(batch))),
                       "a staged batch failed on rank 0 (cuda:0) for 't': a tensor was launched "
                       "that was never prepared",
                       BackendError);
}

namespace {

/// An arena with room for slabs, whose memory has an owner.
struct Room {
  HostCluster cluster;
  HostDevice device{cluster, 0};
  static constexpr std::size_t kBytes = std::size_t{100} << 20;
  std::shared_ptr<void> memory{::operator new(kBytes, std::align_val_t(4096)), [](void* taken) {
                                 ::operator delete(taken, std::align_val_t(4096));
                               }};
  std::shared_ptr<Arena> arena =
      std::make_shared<Arena>(std::span(static_cast<std::byte*>(memory.get()), kBytes));
  [[nodiscard]] std::shared_ptr<PinnedPool> pool() {
    return std::make_shared<PinnedPool>(device.table(), 0, arena, memory);
  }
  [[nodiscard]] std::size_t registered() const {
    std::size_t bytes = 0;
    for (const auto& [begin, size] : device.pinned) bytes += size;
    return bytes;
  }
};

TEST_CASE("staged: memory that a copy is still to write is nobody else's, though it is given up") {
  for (const bool rests : {false, true}) {
    CAPTURE(rests);
    Room room;
    Doubling host;
    BatchTraits traits;
    traits.op = ReduceOp::Sum;
    traits.device = {DeviceKind::Cuda, 0};
    std::vector<float> values{1, 2, 3};
    {
      StagedBackend backend(room.device.table(), 0, 0, {&host}, room.arena, 0,
                            {[] {
                               return Status{Status::Code::RankFailed, "rank 1 has died"};
                             },
                             nullptr},
                            room.memory);
      backend.rest_limit = std::chrono::milliseconds(rests ? 60'000 : 20);
      const void* const first = backend.host_block(16).memory.get();
      BatchMember member = Stage::member("late", values);
      member.ready_event = room.device.user_event(rests ? 3 : 1 << 30, {});
      CHECK_THROWS_WITH_AS(backend.prepare(traits, member), "rank 1 has died", RankFailed);
      CHECK(room.device.calls("cudaMemcpyAsync") == 1);
      CHECK((backend.host_block(16).memory.get() == first) == rests);
    }
    CHECK(room.device.pinned.empty() == rests);
  }
}

}  // namespace

TEST_CASE(
    "staged: memory is registered with CUDA once, when it is first needed, in slabs of its own") {
  Room room;
  {
    const auto pool = room.pool();
    CHECK(room.device.calls("cudaHostRegister") == 0);
    std::vector<std::byte*> blocks;
    for (int round = 0; round < 3; ++round) {
      for (const std::size_t bytes :
           {std::size_t{0}, std::size_t{1}, std::size_t{100'000}, std::size_t{9} << 20})
        blocks.push_back(pool->allocate(bytes));
      for (std::byte* const block : blocks) {
        REQUIRE(block != nullptr);
        CHECK(reinterpret_cast<std::uintptr_t>(block) % 64 == 0);
        pool->free(block);
      }
      blocks.clear();
    }
    CHECK(room.device.calls("cudaHostRegister") == 1);
    CHECK(room.registered() == std::size_t{32} << 20);
    std::byte* const large = pool->allocate(std::size_t{40} << 20);  // more than the first slab has
    REQUIRE(large != nullptr);
    CHECK(room.device.calls("cudaHostRegister") == 2);
    CHECK(pool->allocate(std::size_t{40} << 20) == nullptr);         // no more room in the arena
    std::byte* const exact = pool->allocate(std::size_t{20} << 20);  // of the first slab
    REQUIRE(exact != nullptr);
    std::byte* const rest = pool->allocate(std::size_t{27} << 20);  // the least that would do
    REQUIRE(rest != nullptr);
    CHECK(room.registered() <= Room::kBytes);
    for (std::byte* const block : {large, exact, rest}) pool->free(block);
    CHECK(room.device.calls("cudaHostUnregister") == 0);
  }
  CHECK(room.device.leaks().empty());
  CHECK(room.arena->used_bytes() == 0);
  CHECK(room.cluster.misuses().empty());
}

TEST_CASE(
    "staged: where CUDA registers nothing, tensors go through memory as it is; it is asked once, "
    "and nothing is kept") {
  Room room;
  room.device.fail_call("cudaHostRegister", 801);
  {
    std::vector<std::string> told;
    PinnedPool pool(room.device.table(), 0, room.arena, room.memory,
                    [&told](const std::string& why) { told.push_back(why); });
    CHECK(pool.allocate(100) == nullptr);
    CHECK(pool.allocate(100) == nullptr);
    CHECK(told == std::vector<std::string>{"cudaHostRegister says host CUDA says 801"});
    CHECK(room.device.calls("cudaHostRegister") == 1);
    CHECK(room.arena->used_bytes() == 0);
  }
  CHECK(room.device.calls("cudaHostUnregister") == 0);
  room.device.fail_call("cudaHostRegister", 801);
  CHECK(room.pool()->allocate(100) == nullptr);  // nobody is told
  room.device.fail_call("cudaHostRegister", 801);
  Doubling host;
  BatchTraits traits;
  traits.op = ReduceOp::Sum;
  traits.device = {DeviceKind::Cuda, 0};
  StagedBackend backend(room.device.table(), 0, 0, {&host}, room.arena, 0, {}, room.memory);
  std::vector<float> values{1, 2, 3};
  BatchMember member = Stage::member("t", values);
  backend.release(traits, backend.prepare(traits, member));
  CHECK(room.device.pinned.empty());
}

TEST_CASE("staged: memory that CUDA does not let go of stays, mapped, and holds nobody up") {
  std::promise<void> gate, gone;
  std::shared_future<void> open(gate.get_future());
  {
    Room room;
    GpuApi table = room.device.table();
    table.host_unregister = [open, inner = table.host_unregister](void* base) {
      open.wait();
      return inner(base);
    };
    std::shared_ptr<void> owner(room.memory.get(), [&gone](void* /*unused*/) { gone.set_value(); });
    {
      PinnedPool pool(table, 0, room.arena, std::move(owner), {}, std::chrono::milliseconds(1));
      REQUIRE(pool.allocate(100) != nullptr);
    }
    CHECK(room.arena->used_bytes() > 0);  // nobody else gets it
    auto is_gone = gone.get_future();
    CHECK(is_gone.wait_for(std::chrono::seconds(0)) == std::future_status::timeout);
    gate.set_value();
    is_gone.wait();  // the thread that was left goes, and what it has kept
    CHECK(room.device.pinned.empty());
  }
}

TEST_CASE(
    "staged: a tensor in registered memory is copied behind the user's stream without a wait in "
    "between, and comes back whole") {
  Room room;
  Doubling host;
  BatchTraits traits;
  traits.op = ReduceOp::Sum;
  traits.device = {DeviceKind::Cuda, 0};
  {
    StagedBackend backend(room.device.table(), 0, 0, {&host}, room.arena, 0, {}, room.memory);
    std::vector<float> values(1000, 3);
    bool copied_first = false;
    BatchMember member = Stage::member("t", values);
    member.ready_event = room.device.user_event(3, [&] {
      copied_first = room.device.calls("cudaMemcpyAsync") == 1;
      std::fill(values.begin(), values.end(), 4.0F);
    });
    Batch batch;
    batch.traits = traits;
    member.locations = {backend.prepare(traits, member)};
    batch.members.push_back(member);
    CHECK(copied_first);  // was enqueued before the event had happened
    const auto execution = backend.launch(std::move(batch));
    while (execution->advance() != Progress::Done) continue;
    CHECK(values == std::vector<float>(1000, 8));
  }
  CHECK(room.device.leaks().empty());
  CHECK(room.arena->used_bytes() == 0);
  CHECK(room.cluster.misuses().empty());
}

TEST_CASE("staged: what no backend of the host does, this one does not either") {
  Stage stage;
  const auto backend = stage.backend();
  CHECK(backend->supports(stage.traits));
  stage.traits.kind = OpKind::Allgather;
  CHECK_FALSE(backend->supports(stage.traits));
  stage.traits.kind = OpKind::Allreduce;
  stage.traits.device = {};
  CHECK_FALSE(backend->supports(stage.traits));
}

}  // namespace hvd::gpu::test
