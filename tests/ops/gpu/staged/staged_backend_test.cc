// The backend that stages tensors through the host, by itself, over a backend of host tensors made for the test. On the host table.
#include <doctest/doctest.h>

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hvd/errors.h"
#include "ops/gpu/staged/staged_backend.h"
#include "tests/support/host_gpu_api.h"

namespace hvd::nccl::test {
namespace {

/// Doubles floats, after so many calls that find nothing to do. Publishes nothing, as a backend without shared memory.
class Doubling : public Backend {
 public:
  int idle_calls = 0;
  std::vector<std::uint64_t> released;

  std::string_view name() const override { return "doubling"; }
  bool supports(const BatchTraits& traits) const override {
    return traits.device.kind == DeviceKind::Cpu && traits.kind == OpKind::Allreduce;
  }
  void release(const BatchTraits& /*traits*/, std::uint64_t location) noexcept override { released.push_back(location); }
  std::unique_ptr<Execution> launch(Batch batch) override { return std::make_unique<Doubled>(std::move(batch), idle_calls); }

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

  Stage() { traits.device = {DeviceKind::Cuda, 0}; }
  std::unique_ptr<StagedBackend> backend() {
    return std::make_unique<StagedBackend>(device.table(), 0, 0, std::vector<Backend*>{&host}, arena, 0, nullptr);
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

TEST_CASE("staged: tensors of a backend that publishes nothing are told apart, and come back when host and device are done") {
  Stage stage;
  stage.device.delay = 2;
  stage.host.idle_calls = 3;
  {
    const auto backend = stage.backend();
    std::vector<float> first{1, 2, 3}, second{10}, nothing;
    Batch batch;
    batch.traits = stage.traits;
    for (const auto& [name, values] : {std::pair("first", &first), std::pair("second", &second), std::pair("nothing", &nothing)}) {
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
    while (execution->advance() != Progress::Done) CHECK(execution->copying_out_since().has_value());
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

TEST_CASE("staged: a tensor that is not launched is let go once, and cannot be launched afterwards") {
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
  CHECK(stage.host.released == std::vector<std::uint64_t>{0});  // what the host's backend had returned
  batch.members[0].locations = {location};
  CHECK_THROWS_WITH_AS(static_cast<void>(backend->launch(std::move(batch))),
                       "a staged batch failed on rank 0 (cuda:0) for 't': a tensor was launched that was never prepared", BackendError);
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

}  // namespace hvd::nccl::test
