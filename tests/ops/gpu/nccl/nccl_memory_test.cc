// What the NCCL backend does with memory, on the host table: fusion buffers that are outgrown,
// blocks that are lent, what is left alone where the device does not come to rest. And what it
// leaves to others.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "hvd/errors.h"
#include "ops/gpu/api/call.h"
#include "ops/gpu/ipc/device_pool.h"
#include "ops/gpu/nccl/reduction_plan.h"
#include "tests/support/gpu/nccl_world.h"

namespace hvd::gpu::test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

/// Of so many floats each, all `value`.
std::vector<Tensor> filled(const std::vector<std::size_t>& counts, double value) {
  std::vector<Tensor> made(counts.size());
  for (std::size_t t = 0; t < counts.size(); ++t) {
    made[t].name = "t" + std::to_string(t);
    made[t].input = encoded(DataType::Float32, std::vector<double>(counts[t], value));
    made[t].output.resize(made[t].input.size());
  }
  return made;
}

void expect_all(const std::vector<Tensor>& tensors, double value) {
  for (const auto& tensor : tensors) {
    const auto got = decoded(DataType::Float32, tensor.output);
    expect(std::all_of(got.begin(), got.end(), [&](double number) { return number == value; }),
           tensor.name + " to be the ranks' sum");
  }
}

/// A backend without a world, for what needs no other rank.
struct Solitary {
  HostCluster cluster;
  HostDevice device{cluster, 0};
  ProcessSetInfo myself{0, {0}, 0};
  ProcessSetInfo two{1, {0, 1}, 0};

  std::unique_ptr<NcclBackend> backend(NcclOptions options = {}) const {
    return std::make_unique<NcclBackend>(
        device.table(), 0, [](const ProcessSetInfo&, Bytes mine) { return mine; },
        std::move(options));
  }
  static BatchTraits traits(OpKind kind, const ProcessSetInfo& set) {
    BatchTraits made;
    made.kind = kind;
    made.op = ReduceOp::Sum;
    made.device = {DeviceKind::Cuda, 0};
    made.set = &set;
    return made;
  }
};

}  // namespace

TEST_CASE(
    "nccl: windows are taken where an abort ends the kernels over them, and buffers elsewhere") {
  HostCluster cluster;
  HostDevice device(cluster, 0);
  for (const int version : {22700, 22809, 22906}) {
    device.nccl_version = version;
    CHECK_FALSE(has_windows(device.table()));
  }
  for (const int version : {22907, 23004}) {
    device.nccl_version = version;
    CHECK(has_windows(device.table()));
  }
  device.fail_call("ncclGetVersion", 3);
  CHECK_FALSE(has_windows(device.table()));
  device.lack_windows();
  CHECK_FALSE(has_windows(device.table()));
  for (const bool windows : {false, true}) {
    CHECK(registration_of(Registration::None, windows) == Registration::None);
    CHECK(registration_of(Registration::Buffer, windows) == Registration::Buffer);
  }
  CHECK(registration_of(Registration::Window, true) == Registration::Window);
  CHECK(registration_of(Registration::Window, false) == Registration::Buffer);
}

TEST_CASE(
    "nccl: outgrown fusion buffers go one after the other, each when the stream has passed it") {
  struct Work {
    std::atomic<bool> first_gate{false}, third_gate{false};
    std::vector<std::vector<Tensor>> batches;
  };
  for (const bool registered : {false, true}) {
    CAPTURE(registered);
    std::array<Work, 2> works;
    World world(2);
    if (registered) world.options.registration = Registration::Buffer;
    world.run([&](Rank& self) {
      auto& [first_gate, third_gate, batches] = works[static_cast<std::size_t>(self.rank)];
      const auto traits = self.traits(OpKind::Allreduce, DataType::Float32);
      for (const std::size_t count : {10, 700000, 3000000, 10})
        batches.push_back(filled({count, 3}, self.rank + 1));
      batches[0][0].ready_event = self.device.user_event(first_gate);
      batches[2][0].ready_event = self.device.user_event(third_gate);
      std::vector<std::unique_ptr<Execution>> executions;
      const auto launch = [&](std::size_t batch) {
        executions.push_back(self.backend->launch(Rank::batch(traits, batches[batch])));
      };
      for (const std::size_t batch : {0, 1, 2}) launch(batch);
      expect(self.device.live_memory() == 3, "all three while the first batch is under way");
      first_gate = true;
      self.finish(*executions[0]);
      self.finish(*executions[1]);
      launch(3);
      expect(self.device.live_memory() == 2,
             "the first to be freed, the second not: what comes after it waits");
      third_gate = true;
      self.finish(*executions[2]);
      self.finish(*executions[3]);
      for (const auto& tensors : batches) expect_all(tensors, 3);
      batches[0][0].ready_event = nullptr;
      self.run(traits, batches[0]);
      expect(self.device.live_memory() == 1, "one buffer in the end");
    });
  }
}

TEST_CASE("nccl: what a call takes of the memory is measured and told, as far as it can be") {
  HostCluster cluster;
  HostDevice device(cluster, 0);
  const CallContext site{.table = &device.table(), .rank = 0, .device = 0, .tensors = {}};
  const Remark nobody;
  MemoryUse(site, nobody).say("a buffer takes", 5);
  CHECK(device.calls("cudaMemGetInfo") == 0);
  std::vector<std::string> told;
  const Remark remark = [&told](const std::string& text) { told.push_back(text); };
  const MemoryUse use(site, remark);
  device.memory_bytes -= std::size_t{36} << 20;
  use.say("a buffer takes", std::size_t{32} << 20);
  CHECK(told == std::vector<std::string>{
                    "a buffer takes 36.0 MiB of cuda:0's memory (32.0 MiB were asked for)"});
  device.memory_bytes += std::size_t{37} << 20;
  use.say("a buffer takes", 5);  // somebody else has freed some
  device.fail_call("cudaMemGetInfo", 1);
  use.say("a buffer takes", 5);
  device.fail_call("cudaMemGetInfo", 1);
  const MemoryUse unknown(site, remark);
  unknown.say("a buffer takes", 5);
  CHECK(told.size() == 1);
  for (const Registration registration : {Registration::Window, Registration::Buffer}) {
    World world(2);
    world.options.registration = registration;
    std::mutex mutex;
    told.clear();
    world.options.remark = [&](const std::string& text) {
      const std::lock_guard lock(mutex);
      told.push_back(text);
    };
    for (auto& each : world.devices) each->registration_bytes = std::size_t{3} << 20;
    world.run([](Rank& self) {
      auto tensors = filled({10, 3}, 1);
      self.run(self.traits(OpKind::Allreduce, DataType::Float32), tensors);
    });
    std::sort(told.begin(), told.end());
    const std::string besides =
        registration == Registration::Window
            ? "a symmetric window of NCCL's over a fusion buffer takes besides"
            : "the registration of a fusion buffer with NCCL takes besides";
    std::vector<std::string> expected;
    for (const std::string gpu : {"cuda:0", "cuda:1"}) {
      expected.push_back("a fusion buffer of NCCL's takes 2.0 MiB of " + gpu +
                         "'s memory (2.0 MiB were asked for)");
      expected.push_back(besides + " 3.0 MiB of " + gpu + "'s memory (2.0 MiB were asked for)");
    }
    std::sort(expected.begin(), expected.end());
    CHECK(told == expected);
  }
}

TEST_CASE("nccl: out of memory on a device that does not say how much it has left") {
  World world(2);
  for (auto& device : world.devices) device->memory_bytes = 0;
  world.run([](Rank& self) {
    self.device.fail_call("cudaMemGetInfo", 1);
    auto tensors = filled({10, 3}, 1);
    std::string words;
    try {
      self.run(self.traits(OpKind::Allreduce, DataType::Float32), tensors);
    } catch (const BackendError& error) {
      words = error.what();
    }
    expect(words.find("2.0 MiB were asked for as fusion buffer; lower the fusion threshold") !=
               std::string::npos,
           "no guess at the room, got: " + words);
    self.backend->abort();
  });
}

TEST_CASE(
    "nccl: on a device that does not come to rest neither outgrown buffers are freed nor what was "
    "lent") {
  Solitary here;
  auto small = filled({10, 3}, 1), large = filled({700000, 3}, 1);
  for (auto* tensors : {&small, &large})
    (*tensors)[0].ready_event = here.device.user_event(1 << 30, {});
  {
    NcclOptions options;
    options.rest_limit = std::chrono::milliseconds(20);
    auto backend = here.backend(options);
    const auto sum = Solitary::traits(OpKind::Allreduce, here.two);
    auto out = backend->allocate(sum, kMiB);
    backend->allocate(sum, 5 * kMiB).reset();
    CHECK(here.device.live_memory() == 2);
    auto first =
        backend->launch(Rank::batch(Solitary::traits(OpKind::Broadcast, here.myself), small));
    auto second =
        backend->launch(Rank::batch(Solitary::traits(OpKind::Broadcast, here.myself), large));
    CHECK(second->advance() == Progress::Idle);
    CHECK(here.device.live_memory() == 4);
    backend.reset();
    out.reset();
  }
  CHECK(here.device.live_memory() == 4);
  CHECK(here.cluster.misuses() == std::vector<std::string>{"a stream destroyed with work pending"});
}

TEST_CASE("nccl: a device that cannot be asked counts as one that does not come to rest") {
  Solitary here;
  auto tensors = filled({10, 3}, 5);
  auto backend = here.backend();
  auto execution =
      backend->launch(Rank::batch(Solitary::traits(OpKind::Broadcast, here.myself), tensors));
  while (execution->advance() != Progress::Done) continue;
  expect_all(tensors, 5);
  here.device.fail_call("cudaEventCreateWithFlags", 700);
  backend.reset();
  CHECK_FALSE(here.device.fail_pending("cudaEventCreateWithFlags"));
  CHECK(here.device.live_memory() == 1);
  CHECK(here.cluster.misuses().empty());
}

TEST_CASE(
    "nccl: of idle blocks the smallest that is large enough is lent, and none that is far too "
    "large") {
  Solitary here;
  const auto traits = Solitary::traits(OpKind::Allreduce, here.two);
  {
    const auto backend = here.backend();
    CHECK(backend->allocate(traits, 0) == nullptr);
    CHECK(here.device.calls("cudaMalloc") == 0);
    auto huge = backend->allocate(traits, 64 * kMiB), six = backend->allocate(traits, 5 * kMiB),
         four = backend->allocate(traits, 3 * kMiB);
    const void* const at_six = six.get();
    const void* const at_four = four.get();
    CHECK(here.device.allocations == std::vector<std::size_t>{64 * kMiB, 6 * kMiB, 4 * kMiB});
    for (auto* block : {&huge, &six, &four}) block->reset();
    const auto first = backend->allocate(traits, 3 * kMiB),
               second = backend->allocate(traits, 3 * kMiB);
    CHECK(first.get() == at_four);
    CHECK(second.get() == at_six);
    CHECK(here.device.calls("cudaMalloc") == 3);
    const auto third = backend->allocate(traits, 3 * kMiB);
    CHECK(here.device.calls("cudaMalloc") == 4);
  }
  CHECK(here.device.live_memory() == 0);
}

TEST_CASE(
    "gpu memory: where there is none, what a front end keeps is given back, and it is tried once "
    "more") {
  struct Relief {
    explicit Relief(std::function<void()> call) { set_memory_relief(std::move(call)); }
    ~Relief() { set_memory_relief({}); }
    Relief(const Relief&) = delete;
    Relief& operator=(const Relief&) = delete;
  };
  CHECK_FALSE(relieve_memory());
  Solitary here;
  const auto traits = Solitary::traits(OpKind::Allreduce, here.two);
  {
    const auto backend = here.backend();
    here.device.memory_bytes = kMiB;
    int asked = 0;
    const Relief relief([&] {
      ++asked;
      here.device.memory_bytes = 8 * kMiB;
    });
    const auto lent = backend->allocate(traits, 6 * kMiB);  // of NCCL's
    CHECK(lent != nullptr);
    CHECK(asked == 1);
    here.device.memory_bytes = kMiB;
    SharedControl control{};
    DevicePool pool(
        CallContext{.table = &here.device.table(), .rank = 0, .device = 0, .tensors = {}}, control);
    CHECK(pool.allocate(3 * kMiB) != nullptr);  // of a shared GPU's
    CHECK(asked == 2);
    here.device.memory_bytes = kMiB;
    auto tensors = filled({10, 3}, 5);  // a fusion buffer
    const auto execution =
        backend->launch(Rank::batch(Solitary::traits(OpKind::Broadcast, here.myself), tensors));
    while (execution->advance() != Progress::Done) continue;
    CHECK(asked == 3);
    const Relief failing([] { throw std::runtime_error("LibTorch has a reason of its own"); });
    here.device.memory_bytes = kMiB;
    CHECK(backend->allocate(traits, 6 * kMiB) == nullptr);
  }
}

TEST_CASE("nccl: idle blocks make room for a larger one") {
  Solitary here;
  here.device.memory_bytes = 10 * kMiB;
  const auto traits = Solitary::traits(OpKind::Allreduce, here.two);
  const auto backend = here.backend();
  CHECK(backend->allocate(traits, 20 * kMiB) == nullptr);  // nothing is idle yet
  CHECK(backend->allocate(traits, 6 * kMiB) != nullptr);
  CHECK(here.device.live_memory() == 1);
  const auto larger = backend->allocate(traits, 8 * kMiB);
  CHECK(larger != nullptr);
  CHECK(here.device.live_memory() == 1);
  here.device.current() = 1;
  here.device.contexts.insert(1);
  here.device.fail_call("cudaSetDevice", 101);
  CHECK(backend->allocate(traits, kMiB) == nullptr);  // no such device
  CHECK_FALSE(here.device.fail_pending("cudaSetDevice"));
}

TEST_CASE(
    "nccl: what lies between tensors in the user's own memory is left alone, even where they lie "
    "as in the fusion buffer") {
  World world(2);
  world.run([](Rank& self) {
    const auto traits = self.traits(OpKind::Allreduce, DataType::Float32);
    const auto lent = self.backend->allocate(traits, 4096);
    struct alignas(kMemberAlignment) Line {
      std::array<float, kMemberAlignment / sizeof(float)> values;
    };
    for (const bool padded : {false, true}) {
      self.device.launches.clear();
      std::array<Line, 2> memory{};
      for (auto& line : memory) line.values.fill(static_cast<float>(-1 - self.rank));
      auto tensors = filled({3, 5}, 0);
      Batch batch = Rank::batch(traits, tensors);
      for (std::size_t t = 0; t < 2; ++t) {
        auto& values = memory[t].values;
        std::fill_n(values.begin(), batch.members[t].count, static_cast<float>(10 * self.rank + 1));
        batch.members[t].input = batch.members[t].output = values.data();
        batch.members[t].padded = padded;
      }
      self.finish(*self.backend->launch(std::move(batch)));
      for (std::size_t t = 0; t < 2; ++t) {
        const auto& values = memory[t].values;
        const auto end = values.begin() + (t == 0 ? 3 : 5);
        expect(std::all_of(values.begin(), end, [](float value) { return value == 12; }),
               "the sum of both ranks");
        expect(
            std::all_of(end, values.end(),
                        [&](float value) { return value == static_cast<float>(-1 - self.rank); }),
            "the rest as it was");
      }
      expect(self.device.launches.size() == 2, "packed and unpacked");
    }
  });
}

TEST_CASE(
    "nccl: an alltoall of nothing needs no call, and sets that are not this backend's are left to "
    "others") {
  World world(2);
  world.options.takes = [](const ProcessSetInfo& set) { return set.id == 0; };
  world.run([](Rank& self) {
    auto tensors = filled({0, 0}, 0);
    for (auto& tensor : tensors) tensor.counts = tensor.sends = {0, 0};
    self.run(self.traits(OpKind::Alltoall, DataType::Float32), tensors);
    expect(self.device.enqueued == std::vector<std::string>{"cudaEventRecord"},
           "nothing but the completion event");
    auto traits = self.traits(OpKind::Allreduce, DataType::Float32);
    expect(self.backend->supports(traits), "the set of all ranks");
    const ProcessSetInfo other{1, self.set.ranks, self.set.rank};
    traits.set = &other;
    expect(!self.backend->supports(traits), "no other");
  });
}

TEST_CASE("nccl: types that NCCL has no sum for must travel as another") {
  CHECK_THROWS_WITH_AS(static_cast<void>(nccl_type(DataType::Int16)), "NCCL cannot reduce int16",
                       InvalidArgument);
  CHECK_THROWS_AS(static_cast<void>(nccl_type(DataType::Complex64)), InvalidArgument);
  CHECK(plan_reduction({DataType::Int16, ReduceOp::Sum, 1, 1}, 2).wire == DataType::Int32);
}

}  // namespace hvd::gpu::test
