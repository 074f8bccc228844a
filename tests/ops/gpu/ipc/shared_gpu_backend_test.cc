// Ranks that share a GPU, and tensors staged through the host: whole engines as threads, over the
// host table. What is launched, by whom; what happens when a call is refused, memory ends, NCCL
// meets an error or a rank dies: an error on every rank, and no hang.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/errors.h"
#include "ops/gpu/staged/staged_backend.h"
#include "tests/support/engine_probe.h"
#include "tests/support/gpu/locked_gpu_api.h"
#include "tests/support/thread_world.h"

namespace hvd::gpu::test {
namespace {

using hvd::test::ThreadWorld;
using hvd::test::WorldOptions;

WorldOptions options_of(Route way, int ranks, LockedDevices& devices) {
  WorldOptions options;
  options.size = ranks;
  options.limit = std::chrono::seconds(120);
  options.add_backends = [way, &devices](int rank, EngineParts& parts,
                                         const std::shared_ptr<Arena>& arena) {
    devices.add_backends(way, rank, parts, arena);
  };
  return options;
}

std::vector<float> values_of(int rank, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<float>(rank + 1) * 0.37F + static_cast<float>(i % 97);
  return values;
}

/// A group of tensors of this rank's, summed in place.
Submission sum_of(int rank, std::vector<std::vector<float>>& tensors, const std::string& name,
                  ReduceOp op = ReduceOp::Sum) {
  Submission submission;
  submission.name = name;
  submission.op = op;
  submission.device = {DeviceKind::Cuda, rank};
  for (auto& values : tensors)
    submission.tensors.push_back({values.data(),
                                  values.data(),
                                  DataType::Float32,
                                  {static_cast<std::int64_t>(values.size())},
                                  nullptr,
                                  true});
  return submission;
}

/// Tensors of batches that may have failed: what is enqueued behind a rank that gave up may touch
/// them as long as the backends live. Declared before the world.
class Kept {
 public:
  void take(std::vector<std::vector<float>> tensors) {
    const std::lock_guard lock(mutex_);
    tensors_.push_back(std::move(tensors));
  }

 private:
  std::mutex mutex_;
  std::vector<std::vector<std::vector<float>>> tensors_;
};

std::string failure_of(Engine& engine, Submission submission) {
  try {
    engine.wait(*engine.submit(std::move(submission), After::Wait));
  } catch (const BackendError& error) {
    return std::string("BackendError: ") + error.what();
  } catch (const RankFailed& error) {
    return std::string("RankFailed: ") + error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return {};
}

int calls(LockedDevices& devices, int ranks, const std::string& name) {
  int sum = 0;
  for (int rank = 0; rank < ranks; ++rank) sum += devices.device(rank).calls(name);
  return sum;
}

}  // namespace

TEST_CASE(
    "shared gpu: a batch of many tensors is one launch each way and one reduction for all ranks") {
  constexpr int kRanks = 4;
  LockedDevices devices(kRanks);
  {
    ThreadWorld world(options_of(Route::SharedGpu, kRanks, devices));
    world.run([](int rank, Engine& engine) {
      std::vector<std::vector<float>> tensors;
      for (std::size_t i = 0; i < 161; ++i) tensors.push_back(values_of(rank, 1 + i * 7));
      CHECK(failure_of(engine, sum_of(rank, tensors, "burst")).empty());
      for (std::size_t i = 0; i < 161; ++i) {
        std::vector<float> expected = values_of(0, 1 + i * 7);
        for (int other = 1; other < kRanks; ++other) {
          const auto more = values_of(other, expected.size());
          for (std::size_t k = 0; k < expected.size(); ++k) expected[k] += more[k];
        }
        CHECK(tensors[i] == expected);  // bit for bit: in rank order
      }
    });
  }
  CHECK(calls(devices, kRanks, "launch_shared_reduce") == 1);
  CHECK(calls(devices, kRanks, "launch_batched_copy") == 2 * kRanks);
  for (int rank = 0; rank < kRanks; ++rank) CHECK(devices.device(rank).calls("cudaMalloc") == 1);
}

TEST_CASE("tensors that live in memory of the backend are neither packed nor unpacked") {
  constexpr int kRanks = 3;
  constexpr std::size_t kTensors = 20;
  for (const Route way : {Route::SharedGpu, Route::Nccl}) {
    CAPTURE(static_cast<int>(way));
    LockedDevices devices(kRanks);
    {
      ThreadWorld world(options_of(way, kRanks, devices));
      world.run([](int rank, Engine& engine) {
        const auto length = [](std::size_t tensor) { return 10 + 7 * tensor; };
        std::size_t bytes = 0;
        for (std::size_t t = 0; t < kTensors; ++t)
          bytes += aligned_to_member(length(t) * sizeof(float));
        Submission like;
        like.name = "gradients";
        like.op = ReduceOp::Sum;
        like.device = {DeviceKind::Cuda, rank};
        const auto memory = engine.allocate(like, DataType::Float32, bytes);
        REQUIRE(memory != nullptr);
        for (int round = 0; round < 6; ++round) {
          Submission submission = like;
          auto* at = static_cast<std::byte*>(memory.get());
          for (std::size_t t = 0; t < kTensors;
               ++t, at += aligned_to_member(length(t - 1) * sizeof(float))) {
            auto* numbers = reinterpret_cast<float*>(at);
            std::fill(numbers, numbers + length(t),
                      static_cast<float>(rank + round) + static_cast<float>(t));
            submission.tensors.push_back({numbers,
                                          numbers,
                                          DataType::Float32,
                                          {static_cast<std::int64_t>(length(t))},
                                          nullptr,
                                          true});
            submission.tensors.back().padded = true;
          }
          const auto tensors = submission.tensors;
          CHECK(failure_of(engine, std::move(submission)).empty());
          for (std::size_t t = 0; t < kTensors; ++t) {
            const auto* numbers = static_cast<const float*>(tensors[t].output);
            const float sum = 3 + 3 * (static_cast<float>(round) + static_cast<float>(t));
            CHECK(std::all_of(numbers, numbers + length(t),
                              [&](float value) { return value == sum; }));
          }
        }
        like.op = ReduceOp::Adasum;
        // is staged: it would gain nothing
        CHECK(engine.allocate(like, DataType::Float32, bytes) == nullptr);
        like.device = {};
        CHECK(engine.allocate(like, DataType::Float32, bytes) == nullptr);
      });
    }
    CHECK(calls(devices, kRanks, "launch_shared_reduce") == (way == Route::SharedGpu ? 6 : 0));
    CHECK(calls(devices, kRanks, "launch_batched_copy") == 0);
  }
}

TEST_CASE("shared gpu: any refused call is a BackendError on every rank") {
  const std::vector<std::pair<std::string, int>> cases{{"cudaMalloc", 1},
                                                       {"cudaIpcGetMemHandle", 1},
                                                       {"cudaIpcGetEventHandle", 1},
                                                       {"cudaIpcOpenMemHandle", 1},
                                                       {"cudaIpcOpenEventHandle", 1},
                                                       {"cudaStreamCreateWithPriority", 1},
                                                       {"cudaEventCreateWithFlags", 1},
                                                       {"cudaStreamWaitEvent", 1},
                                                       {"cudaEventRecord", 2},
                                                       {"cudaEventQuery", 1},
                                                       {"launch_shared_reduce", 1},
                                                       {"launch_batched_copy", 2}};
  for (const auto& [call, nth] : cases) {
    CAPTURE(call);
    constexpr int kRanks = 3;
    LockedDevices devices(kRanks);
    Kept kept;
    // Which rank comes last and works for all is not known beforehand.
    const bool of_the_last = call.find("Open") != std::string::npos || call.starts_with("launch") ||
                             call == "cudaStreamWaitEvent";
    for (int rank = 0; rank < kRanks; ++rank)
      if (of_the_last || rank == 1) devices.device(rank).fail_call(call, 700, nth);
    ThreadWorld world(options_of(Route::SharedGpu, kRanks, devices));
    std::vector<std::string> words(kRanks);
    world.run([&](int rank, Engine& engine) {
      std::string& said = words[static_cast<std::size_t>(rank)];
      // a rank may be done with a batch that fails on another
      for (int round = 0; round < 50 && said.empty(); ++round) {
        std::vector<std::vector<float>> tensors{values_of(rank, 100), values_of(rank, 33)};
        said = failure_of(engine, sum_of(rank, tensors, "layer"));
        kept.take(std::move(tensors));
      }
    });
    for (const auto& said : words) {
      CAPTURE(said);
      CHECK(said.starts_with("BackendError: "));
      const bool told = said.find(call) != std::string::npos ||
                        said.find("has no place for") != std::string::npos;
      CHECK(told);
      const bool is_sharing = call.starts_with("cudaIpc") && said.find(call) != std::string::npos;
      CHECK((!is_sharing || said.find("HVD_GPU_BACKEND=staged") != std::string::npos));
    }
  }
}

TEST_CASE(
    "shared gpu: where memory cannot be shared after all, tensors go through the host, also where "
    "a rank waits for other things") {
  for (const bool refused : {false, true}) {
    CAPTURE(refused);
    constexpr int kRanks = 3;
    LockedDevices devices(kRanks);
    devices.probes = true;
    if (refused) devices.device(1).fail_call("cudaIpcOpenMemHandle", 700);
    {
      ThreadWorld world(options_of(Route::SharedGpu, kRanks, devices));
      world.run([&](int rank, Engine& engine) {
        float word = 1;
        const auto on_host = [&] {
          Submission submission;
          submission.name = "host";
          submission.op = ReduceOp::Sum;
          submission.tensors.push_back({&word, &word, DataType::Float32, {1}, nullptr, true});
          return submission;
        };
        std::vector<std::vector<float>> tensors{
            std::vector<float>(100, static_cast<float>(rank + 1))};
        // Rank 2 uses its GPU when the others have done what comes behind it.
        if (rank == 2) CHECK(failure_of(engine, on_host()).empty());
        const auto pending = engine.submit(sum_of(rank, tensors, "layer"), After::Return);
        if (rank != 2) CHECK(failure_of(engine, on_host()).empty());
        engine.wait(*pending);
        CHECK(tensors[0] == std::vector<float>(100, 6));
        CHECK(word == 3);
      });
    }
    CHECK((calls(devices, kRanks, "launch_shared_reduce") == 0) == refused);
    CHECK((calls(devices, kRanks, "cudaMemcpyAsync") > 0) == refused);
  }
}

TEST_CASE(
    "shared gpu: a GPU that is full on one rank is said on all, after trying the least that would "
    "do") {
  constexpr int kRanks = 2;
  LockedDevices devices(kRanks);
  Kept kept;
  devices.device(1).memory_bytes = std::size_t{3} << 20;
  ThreadWorld world(options_of(Route::SharedGpu, kRanks, devices));
  std::vector<std::string> words(kRanks);
  world.run([&](int rank, Engine& engine) {
    std::vector<std::vector<float>> small{values_of(rank, 1000)};
    CHECK(failure_of(engine, sum_of(rank, small, "small")).empty());
    std::vector<std::vector<float>> large{values_of(rank, 1 << 20)};
    words[static_cast<std::size_t>(rank)] = failure_of(engine, sum_of(rank, large, "large"));
    kept.take(std::move(large));
  });
  CHECK(devices.device(1).allocations ==
        std::vector<std::size_t>{std::size_t{32} << 20, std::size_t{2} << 20, std::size_t{32} << 20,
                                 std::size_t{4} << 20});
  for (const auto& said : words) {
    CAPTURE(said);
    CHECK(said.find("rank 1 has no place for 'large' (4.0 MiB)") != std::string::npos);
  }
}

TEST_CASE(
    "gpu backends: who works on a stream waits until all is enqueued, not for the device, and may "
    "come back under the same name") {
  for (const Route way : {Route::SharedGpu, Route::Nccl}) {
    CAPTURE(static_cast<int>(way));
    constexpr int kRanks = 3;
    LockedDevices devices(kRanks);
    std::atomic<bool> gate{false};  // what the tensors' own kernels wait for
    std::vector<void*> events;
    for (int rank = 0; rank < kRanks; ++rank)
      events.push_back(devices.device(rank).user_event(gate));
    std::barrier all_have_waited(kRanks, [&]() noexcept { gate = true; });
    ThreadWorld world(options_of(way, kRanks, devices));
    world.run([&](int rank, Engine& engine) {
      const auto done = [](const HandleState& pending) {
        while (!pending.done.load()) std::this_thread::sleep_for(std::chrono::microseconds(100));
      };
      std::vector<std::vector<float>> first{values_of(rank, 100), values_of(rank, 33)};
      std::vector<std::vector<float>> second{std::vector<float>(100, static_cast<float>(rank)),
                                             values_of(rank, 33)};
      const auto on_stream = [&](std::vector<std::vector<float>>& tensors) {
        Submission submission = sum_of(rank, tensors, "layer");
        submission.on_stream = true;
        for (auto& tensor : submission.tensors)
          tensor.ready_event = events[static_cast<std::size_t>(rank)];
        return submission;
      };
      const auto pending = engine.submit(on_stream(first), After::Return);
      engine.wait(*pending);  // returns, although the device has not begun
      CHECK_FALSE(pending->done.load());
      CHECK(engine.poll(*pending));
      CHECK(pending->completions.size() == 1);
      CHECK(pending->completions.front().event != nullptr);
      CHECK(first[0] == values_of(rank, 100));
      const auto later = engine.submit(on_stream(second), After::Return);
      CHECK_FALSE(engine.poll(*later));
      std::vector<std::vector<float>> third = second;
      // nobody has waited for the second
      CHECK_THROWS_AS(engine.submit(on_stream(third), After::Return), DuplicateName);
      all_have_waited.arrive_and_wait();
      engine.wait(*later);
      done(*pending);
      done(*later);
      std::vector<float> expected = values_of(0, 100);
      for (int other = 1; other < kRanks; ++other) {
        const auto more = values_of(other, 100);
        for (std::size_t k = 0; k < expected.size(); ++k) expected[k] += more[k];
      }
      CHECK(first[0] == expected);
      CHECK(second[0] == std::vector<float>(100, 3));
    });
  }
}

TEST_CASE(
    "nccl: a batch is enqueued behind the one that the device is at work on, and no more of a set "
    "than two") {
  for (const int domains : {1, 2, 3}) {
    CAPTURE(domains);
    constexpr int kRanks = 3;
    LockedDevices devices(kRanks);
    std::atomic<bool> gate{false};
    std::vector<void*> events;
    for (int rank = 0; rank < kRanks; ++rank)
      events.push_back(devices.device(rank).user_event(gate));
    std::barrier all_have_looked(kRanks, [&]() noexcept { gate = true; });
    WorldOptions options = options_of(Route::Nccl, kRanks, devices);
    options.domains = domains;
    ThreadWorld world(options);
    world.run([&](int rank, Engine& engine) {
      std::vector<std::vector<std::vector<float>>> tensors;
      for (int i = 0; i < 4; ++i)
        tensors.push_back({std::vector<float>(50, static_cast<float>(rank + i))});
      const auto submit = [&](std::size_t i) {
        Submission submission = sum_of(rank, tensors[i], "layer " + std::to_string(i));
        submission.on_stream = true;
        submission.tensors.front().ready_event = events[static_cast<std::size_t>(rank)];
        return engine.submit(std::move(submission), After::Return);
      };
      const auto first = submit(0);
      engine.wait(*first);
      const auto second = submit(1);
      engine.wait(*second);  // enqueued, although the device has not begun with the first
      CHECK_FALSE(first->done.load());
      const auto third = submit(2), fourth = submit(3);
      for (int i = 0; i < 20; ++i) {
        CHECK_FALSE(engine.poll(*third));
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      all_have_looked.arrive_and_wait();
      for (const auto& pending : {first, second, third, fourth}) {
        engine.wait(*pending);
        while (!pending->done.load()) std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      for (std::size_t i = 0; i < 4; ++i)
        CHECK(tensors[i][0] == std::vector<float>(50, 3.0F + 3.0F * static_cast<float>(i)));
    });
  }
}

TEST_CASE("gpu backends: an error that the device meets after wait() is the next operation's") {
  for (const Route way : {Route::SharedGpu, Route::Nccl}) {
    CAPTURE(static_cast<int>(way));
    constexpr int kRanks = 3;
    LockedDevices devices(kRanks);
    // behind a closed gate nothing comes to rest
    devices.rest_limit = std::chrono::milliseconds(0);
    Kept kept;
    std::atomic<bool> gate{false};
    std::vector<void*> events;
    for (int rank = 0; rank < kRanks; ++rank)
      events.push_back(devices.device(rank).user_event(gate));
    std::barrier all_have_waited(kRanks);
    ThreadWorld world(options_of(way, kRanks, devices));
    world.run([&](int rank, Engine& engine) {
      std::vector<std::vector<float>> tensors{values_of(rank, 100)};
      Submission submission = sum_of(rank, tensors, "layer");
      submission.on_stream = true;
      submission.tensors.front().ready_event = events[static_cast<std::size_t>(rank)];
      const auto pending = engine.submit(std::move(submission), After::Return);
      engine.wait(*pending);
      all_have_waited.arrive_and_wait();
      if (rank == 1) devices.fail_call(rank, "cudaEventQuery", 700);
      while (!pending->done.load()) std::this_thread::sleep_for(std::chrono::microseconds(100));
      CHECK(pending->status.code() == Status::Code::BackendError);
      std::vector<std::vector<float>> more{values_of(rank, 10)};
      const std::string said = failure_of(engine, sum_of(rank, more, "next"));
      CAPTURE(said);
      CHECK(said.starts_with("BackendError: cudaEventQuery"));
      CHECK(said.find("failed on rank 1 (cuda:1) for 'layer'") != std::string::npos);
      kept.take(std::move(tensors));
      kept.take(std::move(more));
    });
  }
}

TEST_CASE("gpu backends: a rank that dies during a collective is RankFailed on the others") {
  for (const Route way : {Route::SharedGpu, Route::Nccl, Route::Staged}) {
    CAPTURE(static_cast<int>(way));
    constexpr int kRanks = 3;
    LockedDevices devices(kRanks);
    Kept kept;
    ThreadWorld world(options_of(way, kRanks, devices));
    world.run(
        [&](int rank, Engine& engine) {
          std::vector<std::vector<float>> tensors{values_of(rank, 100)};
          std::string said = failure_of(engine, sum_of(rank, tensors, "before"));
          if (rank == 2) return EngineProbe::die(engine);
          // else rank 2 died before this one had its result
          if (said.empty()) said = failure_of(engine, sum_of(rank, tensors, "after"));
          kept.take(std::move(tensors));
          CAPTURE(said);
          CHECK(said.starts_with("RankFailed: "));
          CHECK(said.find("rank 2") != std::string::npos);
        },
        false);
  }
}

TEST_CASE(
    "shared gpu: a rank that dies with its work undone: wait() throws on the others, and nothing "
    "waits for its events") {
  constexpr int kRanks = 3;
  LockedDevices devices(kRanks);
  Kept kept;
  // the kernel before rank 2's tensors, which ends with its process
  const std::atomic<bool> never{false};
  void* const unhappened = devices.device(2).user_event(never);
  std::barrier all_have_waited(kRanks);
  {
    ThreadWorld world(options_of(Route::SharedGpu, kRanks, devices));
    world.run(
        [&](int rank, Engine& engine) {
          std::vector<std::vector<float>> tensors{values_of(rank, 100)};
          Submission submission = sum_of(rank, tensors, "layer");
          submission.on_stream = true;
          if (rank == 2) submission.tensors.front().ready_event = unhappened;
          const auto pending = engine.submit(std::move(submission), After::Return);
          engine.wait(*pending);  // enqueued: the streams wait for rank 2's event
          all_have_waited.arrive_and_wait();
          kept.take(std::move(tensors));
          if (rank == 2) return EngineProbe::die(engine);
          while (!pending->done.load()) std::this_thread::sleep_for(std::chrono::microseconds(100));
          CHECK_THROWS_AS(engine.wait(*pending), RankFailed);
          std::vector<std::vector<float>> more{values_of(rank, 10)};
          CHECK(failure_of(engine, sum_of(rank, more, "next")).starts_with("RankFailed: "));
        },
        false);
  }
  // it would wait for ever
  for (int rank = 0; rank < 2; ++rank)
    CHECK(devices.device(rank).calls("cudaIpcCloseMemHandle") == 0);
}

TEST_CASE(
    "gpu backends: what a device still works on after a failure is kept for ever, what it has done "
    "with is let go") {
  for (const Route way : {Route::Nccl, Route::SharedGpu})
    for (const bool rests : {true, false}) {
      if (rests && way == Route::SharedGpu) continue;  // there nobody waits (LockedDevices)
      CAPTURE(static_cast<int>(way));
      CAPTURE(rests);
      constexpr int kRanks = 2;
      // What a device works on for ever is there for as long as the process, as is the device. The
      // list is never destroyed: leaks are looked for after static objects have gone.
      static auto& reachable = *new std::vector<void*>;
      auto& devices = *new LockedDevices(kRanks);
      reachable.push_back(&devices);
      devices.rest_limit = std::chrono::milliseconds(rests ? 10'000 : 20);
      auto& gate = *new std::atomic<bool>(false);  // a kernel of the user's
      reachable.push_back(&gate);
      std::array<std::weak_ptr<void>, kRanks> kept;
      std::barrier all(kRanks);
      {
        ThreadWorld world(options_of(way, kRanks, devices));
        world.run(
            [&](int rank, Engine& engine) {
              auto tensors = std::make_shared<std::vector<std::vector<float>>>();
              tensors->push_back(values_of(rank, 100));
              Submission submission = sum_of(rank, *tensors, "layer");
              submission.on_stream = true;
              submission.keep_alive = tensors;
              kept[static_cast<std::size_t>(rank)] = tensors;
              submission.tensors.front().ready_event = devices.gated_event(rank, gate);
              {
                const auto pending = engine.submit(std::move(submission), After::Return);
                tensors.reset();
                engine.wait(*pending);
                all.arrive_and_wait();
                if (rests) gate = true;
                if (rank == 1) devices.fail_call(rank, "cudaEventQuery", 700);
                while (!pending->done.load())
                  std::this_thread::sleep_for(std::chrono::microseconds(100));
              }
              all.arrive_and_wait();
            },
            false);
      }
      for (const auto& tensors : kept) CHECK(tensors.expired() == rests);
    }
}

TEST_CASE(
    "nccl: batches go to the streams in turn, each with communicators of its own, in one order on "
    "all ranks") {
  constexpr int kRanks = 3;
  LockedDevices devices(kRanks);  // with two streams
  {
    ThreadWorld world(options_of(Route::Nccl, kRanks, devices));
    world.run([](int rank, Engine& engine) {
      for (int round = 0; round < 6; ++round) {
        std::vector<std::vector<float>> tensors{
            std::vector<float>(50, static_cast<float>(rank + round)), values_of(rank, 7)};
        CHECK(failure_of(engine, sum_of(rank, tensors, "layer")).empty());
        CHECK(tensors[0] == std::vector<float>(50, static_cast<float>(3 + 3 * round)));
      }
    });
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    auto& device = devices.device(rank);
    CHECK(device.calls("cudaStreamCreateWithPriority") == 2);
    CHECK(device.calls("ncclCommInitRankConfig") == 2);
    CHECK(device.calls("ncclMemAlloc") == 2);
    CHECK(device.calls("ncclCommRegister") == 0);
    CHECK(device.calls("ncclAllReduce") == 6);
    CHECK(device.leaks().empty());
  }
}

TEST_CASE(
    "nccl: a rank that has joined is left out by a communicator of the others, and its zeros "
    "count") {
  constexpr int kRanks = 3;
  LockedDevices devices(kRanks);
  ThreadWorld world(options_of(Route::Nccl, kRanks, devices));
  world.run([](int rank, Engine& engine) {
    const auto join = [&] {
      Submission joining;
      joining.kind = OpKind::Join;
      engine.wait(*engine.submit(std::move(joining), After::Wait));
    };
    if (rank == 1) return join();
    for (const auto& [op, expected] :
         std::vector<std::pair<ReduceOp, float>>{{ReduceOp::Sum, 10.0F},
                                                 {ReduceOp::Average, 10.0F / 3},
                                                 {ReduceOp::Min, 0.0F},
                                                 {ReduceOp::Max, 6.0F},
                                                 {ReduceOp::Product, 0.0F}}) {
      std::vector<std::vector<float>> tensors{std::vector<float>(9, static_cast<float>(4 + rank))};
      CHECK(failure_of(engine, sum_of(rank, tensors, "after rank 1 has joined", op)).empty());
      CHECK(tensors[0] == std::vector<float>(9, expected));
    }
    join();
  });
}

TEST_CASE("nccl: what one rank meets while a batch is in flight is a BackendError on every rank") {
  const std::vector<std::function<void(HostDevice&)>> troubles{
      // NCCL's own, noticed between the calls
      [](HostDevice& device) { device.async_error_after = 4; },
      // a kernel of the user's
      [](HostDevice& device) { device.fail_call("cudaEventQuery", 700, 2); },
      // of the fusion buffer
      [](HostDevice& device) { device.memory_bytes = std::size_t{1} << 20; },
      [](HostDevice& device) { device.fail_call("ncclGroupEnd", 3); }};
  for (std::size_t trouble = 0; trouble < troubles.size(); ++trouble) {
    CAPTURE(trouble);
    constexpr int kRanks = 3;
    LockedDevices devices(kRanks);
    Kept kept;
    for (int rank = 0; rank < kRanks; ++rank) devices.device(rank).delay = 2;
    troubles[trouble](devices.device(1));
    ThreadWorld world(options_of(Route::Nccl, kRanks, devices));
    std::vector<std::string> words(kRanks);
    world.run([&](int rank, Engine& engine) {
      std::string& said = words[static_cast<std::size_t>(rank)];
      for (int round = 0; round < 50 && said.empty(); ++round) {
        std::vector<std::vector<float>> tensors{values_of(rank, 100), values_of(rank, 33)};
        said = failure_of(engine, sum_of(rank, tensors, "layer"));
        std::vector<std::vector<float>> all(2, std::vector<float>(kRanks * 100));
        if (said.empty()) {
          Submission gather = sum_of(rank, tensors, "rows");
          gather.kind = OpKind::Allgather;
          for (std::size_t i = 0; i < 2; ++i) gather.tensors[i].output = nullptr;
          gather.allocate = [&](std::size_t index, std::int64_t) {
            return static_cast<void*>(all[index].data());
          };
          said = failure_of(engine, std::move(gather));
        }
        kept.take(std::move(tensors));
        kept.take(std::move(all));
      }
    });
    for (const auto& said : words) {
      CAPTURE(said);
      CHECK(said.starts_with("BackendError: "));
    }
  }
}

TEST_CASE("staged: Adasum of GPU tensors is the host's, whatever the way of the others") {
  for (const Route way : {Route::Nccl, Route::SharedGpu, Route::Staged}) {
    constexpr int kRanks = 3;
    LockedDevices devices(kRanks);
    {
      ThreadWorld world(options_of(way, kRanks, devices));
      world.run([&](int rank, Engine& engine) {
        std::vector<std::vector<float>> on_device{values_of(rank, 500)}, on_host = on_device;
        Submission staged = sum_of(rank, on_device, "staged", ReduceOp::Adasum);
        bool ready = false;
        staged.tensors[0].ready_event = devices.device(rank).user_event(3, [&] { ready = true; });
        CHECK(failure_of(engine, std::move(staged)).empty());
        CHECK(ready);
        Submission plain = sum_of(rank, on_host, "plain", ReduceOp::Adasum);
        plain.device = {};
        CHECK(failure_of(engine, std::move(plain)).empty());
        CHECK(on_device == on_host);
      });
    }
    for (int rank = 0; rank < kRanks; ++rank)
      CHECK(devices.device(rank).calls("cudaMemcpyAsync") == 2);
  }
}

TEST_CASE("staged: results are put where the stream has done what came before the operation") {
  constexpr int kRanks = 3;
  LockedDevices devices(kRanks);
  ThreadWorld world(options_of(Route::Staged, kRanks, devices));
  world.run([&](int rank, Engine& engine) {
    std::vector<std::vector<float>> tensors{values_of(rank, 500)};
    const auto roots = values_of(1, 500);
    Submission submission = sum_of(rank, tensors, "parameters");
    submission.kind = OpKind::Broadcast;
    submission.root = 1;
    // a kernel that is still queued, and that would overwrite what came too early
    bool filled = false;
    if (rank != 1)
      submission.tensors[0].ready_event = devices.device(rank).user_event(20, [&] {
        std::fill(tensors[0].begin(), tensors[0].end(), -1.0F);
        filled = true;
      });
    CHECK(failure_of(engine, std::move(submission)).empty());
    CHECK(filled == (rank != 1));
    CHECK(tensors[0] == roots);
  });
}

TEST_CASE(
    "staged: refused calls are errors, and a tensor that is never ready is given up with the "
    "world") {
  for (const std::string call :
       {"cudaMemcpyAsync", "cudaStreamWaitEvent", "cudaEventRecord", "cudaEventQuery"}) {
    CAPTURE(call);
    LockedDevices devices(1);
    devices.device(0).fail_call(call, 700);
    ThreadWorld world(options_of(Route::Staged, 1, devices));
    world.run([&](int rank, Engine& engine) {
      std::vector<std::vector<float>> tensors{values_of(rank, 10)};
      Submission submission = sum_of(rank, tensors, "t");
      submission.tensors[0].ready_event = devices.device(0).user_event(1, {});
      const std::string said = failure_of(engine, std::move(submission));
      CAPTURE(said);
      CHECK(said.find(call) != std::string::npos);
    });
  }
  HostCluster cluster;
  HostDevice device(cluster, 0);
  alignas(64) std::array<std::byte, 4096> memory{};
  auto arena = std::make_shared<Arena>(memory);
  struct Host : Backend {
    std::string_view name() const override { return "host"; }
    bool supports(const BatchTraits& traits) const override {
      return traits.device.kind == DeviceKind::Cpu;
    }
    std::unique_ptr<Execution> launch(Batch) override { return nullptr; }
  } host;
  StagedBackend backend(device.table(), 0, 0, {&host}, arena, 0,
                        {[] {
                           return Status{Status::Code::RankFailed, "rank 1 has died"};
                         },
                         nullptr});
  BatchTraits traits;
  traits.op = ReduceOp::Sum;
  traits.device.kind = DeviceKind::Cuda;
  float value = 1;
  BatchMember member;
  member.name = "never";
  member.input = member.output = &value;
  member.count = 1;
  member.ready_event = device.user_event(1 << 30, {});
  CHECK_THROWS_WITH_AS(backend.prepare(traits, member), "rank 1 has died", RankFailed);
  CHECK(device.calls("cudaMemcpyAsync") == 0);  // it would block there, where nothing could end it
}

TEST_CASE("placement: who shares a GPU with whom decides how a set's tensors travel") {
  struct Machines {
    std::vector<int> hosts, domains;
  };
  const Machines one_host{{0, 0, 0, 0}, {0, 0, 0, 0}}, two_hosts{{0, 0, 1, 1}, {0, 0, 1, 1}},
      no_shared_memory{{0, 0, 0, 0}, {0, 1, 2, 3}};
  const auto placed = [](const Machines& machines, const std::vector<std::string>& gpus,
                         std::optional<Route> wanted = std::nullopt) {
    return std::make_unique<Placement>(machines.hosts, machines.domains, gpus, true, wanted);
  };
  const auto way = [&](const Machines& machines, const std::vector<std::string>& gpus,
                       std::optional<Route> wanted = std::nullopt) {
    return placed(machines, gpus, wanted)->route_of({0, 1, 2, 3});
  };
  CHECK(way(one_host, {"a", "b", "c", "d"}) == Route::Nccl);
  CHECK(way(one_host, {"a", "a", "a", "a"}) == Route::SharedGpu);
  CHECK(way(one_host, {"a", "a", "b", "b"}) == Route::Staged);
  CHECK(way(one_host, {"a", "b", "c", ""}) == Route::Staged);
  // a number means something on its own host only
  CHECK(way(two_hosts, {"a", "b", "a", "b"}) == Route::Nccl);
  CHECK(way(two_hosts, {"a", "a", "a", "a"}) == Route::Staged);
  CHECK(way(no_shared_memory, {"a", "a", "a", "a"}) == Route::Staged);
  CHECK(way(no_shared_memory, {"a", "b", "c", "d"}) == Route::Nccl);
  CHECK(way(one_host, {"a", "b", "c", "d"}, Route::Staged) == Route::Staged);
  CHECK(way(one_host, {"a", "b", "c", "d"}, Route::SharedGpu) == Route::Nccl);
  CHECK(way(one_host, {"a", "a", "a", "a"}, Route::Nccl) == Route::SharedGpu);

  const auto pairs = placed(one_host, {"a", "a", "b", "b"});
  CHECK(pairs->sharers_of(3) == std::vector<int>{2, 3});
  CHECK(placed(one_host, {"a", "a", "b", ""})->sharers_of(3).empty());
  CHECK(placed(no_shared_memory, {"a", "a", "a", "a"})->sharers_of(1) == std::vector<int>{1});
  CHECK(pairs->route_of({0, 1}) == Route::SharedGpu);
  CHECK(pairs->route_of({1, 2}) == Route::Nccl);
  CHECK(pairs->route_of({0}) == Route::Nccl);
  CHECK(placed(one_host, {"a", "a", "b", "b"}, Route::SharedGpu)->route_of({0}) ==
        Route::SharedGpu);
  CHECK(pairs->route_of_set(3, {0, 1}) == Route::SharedGpu);
  // the number of a set that was removed, given again
  CHECK(pairs->route_of_set(3, {0, 2}) == Route::Nccl);

  CHECK(pairs->describe() == "2 ranks share a GPU, staged through host memory");
  CHECK(placed(one_host, {"a", "a", "a", "a"})->describe() ==
        "4 ranks share a GPU, through CUDA IPC");
  CHECK(placed(one_host, {"a", "b", "c", "d"})->describe() == "one rank per GPU, NCCL");
  CHECK(placed(one_host, {"", "", "", ""})->describe() == "no GPU found");

  const Placement without_nccl({0, 0, 0, 0}, {0, 0, 0, 0}, {"a", "a", "b", "c"}, false);
  CHECK(without_nccl.route_of({1, 2, 3}) == Route::Staged);
  CHECK(without_nccl.route_of({0, 1}) == Route::SharedGpu);
  CHECK(without_nccl.route_of({3}) == Route::SharedGpu);
  CHECK(Placement({0, 0}, {0, 0}, {"a", "b"}, false).describe() == "staged through host memory");
  CHECK(Placement({0, 0}, {0, 1}, {"a", "b"}, false, Route::Nccl).route_of({0, 1}) ==
        Route::Staged);

  const Placement without_ipc({0, 0, 0}, {0, 0, 0}, {"a", "a", "b"}, true, Route::SharedGpu, false);
  CHECK(without_ipc.route_of({0, 1}) == Route::Staged);
  CHECK(without_ipc.route_of({1, 2}) == Route::Nccl);
  CHECK(without_ipc.describe() == "2 ranks share a GPU, staged through host memory");

  // NCCL takes several ranks of a GPU, where it is asked for on all of them
  CHECK(way(one_host, {"+a", "+a", "+a", "+a"}, Route::Nccl) == Route::Nccl);
  CHECK(placed(one_host, {"+a", "+a", "+a", "+a"}, Route::Nccl)->describe() ==
        "4 ranks share a GPU, NCCL");
  CHECK(way(one_host, {"+a", "+a", "+b", "+b"}, Route::Nccl) == Route::Nccl);
  CHECK(way(one_host, {"+a", "+a", "+a", "a"}, Route::Nccl) == Route::SharedGpu);
  CHECK(way(one_host, {"+a", "+a", "+a", "+a"}) == Route::SharedGpu);
  CHECK(way(one_host, {"+a", "+b", "c", "+d"}) == Route::Nccl);

  HostCluster cluster;
  HostDevice device(cluster, 0);
  device.nccl_version = 23000;
  CHECK(gpu_id(device.table(), 0) == "host GPU 0");
  CHECK(gpu_id(device.table(), 0, true) == "+host GPU 0");
  device.nccl_version = 22907;
  CHECK(gpu_id(device.table(), 0, true) == "host GPU 0");
  CHECK(can_share(device.table(), 0));
  device.fail_call("cudaDeviceGetAttribute", 1);
  CHECK_FALSE(can_share(device.table(), 0));
  device.ipc = false;
  CHECK_FALSE(can_share(device.table(), 0));
  CHECK(can_share(device.table(), -1));
  CHECK_FALSE(has_multicast(device.table(), 0));
  device.multicast = true;
  CHECK(has_multicast(device.table(), 0));
  CHECK_FALSE(has_multicast(device.table(), -1));
  device.fail_call("cuDeviceGetAttribute", 1);
  CHECK_FALSE(has_multicast(device.table(), 0));
  device.devices = 2;
  CHECK(device_of(device.table(), 3) == 1);
  CHECK(gpu_id(device.table(), 1) == "host GPU 1");
  device.devices = 0;
  CHECK(device_of(device.table(), 3) == -1);
  CHECK(make_current(device.table(), -1, 0).empty());
  CHECK(device.contexts.empty());
  CHECK(gpu_id(device.table(), -1).empty());
}

TEST_CASE(
    "placement: kernels run within their major version, and PTX on what comes after; a GPU without "
    "any is told") {
  const std::string_view built = "75-real,80-real,90-real,90-virtual";
  for (const int capability : {75, 80, 86, 89, 90, 100, 103, 120})
    CHECK(runs_on(built, capability));
  CHECK_FALSE(runs_on(built, 70));
  CHECK_FALSE(runs_on("80-real,90-real,90-virtual", 75));
  CHECK_FALSE(runs_on("86-real", 80));
  CHECK_FALSE(runs_on("80-real", 90));
  CHECK(runs_on("80-virtual", 90));
  CHECK_FALSE(runs_on("90-virtual", 80));
  CHECK(runs_on("80", 90));
  CHECK_FALSE(runs_on("80", 75));
  for (const std::string_view exact : {"90a", "90a-real", "90a-virtual"}) {
    CHECK(runs_on(exact, 90));
    for (const int capability : {80, 89, 100, 120}) CHECK_FALSE(runs_on(exact, capability));
  }
  for (const std::string_view family : {"100f", "100f-real", "100f-virtual"}) {
    for (const int capability : {100, 103}) CHECK(runs_on(family, capability));
    for (const int capability : {90, 110, 120}) CHECK_FALSE(runs_on(family, capability));
  }
  CHECK(runs_on("90a-real,80-virtual", 100));
  CHECK(runs_on("all-major", 75));
  CHECK(runs_on("native", 75));
  CHECK_FALSE(runs_on("", 75));
  HostCluster cluster;
  HostDevice device(cluster, 0);
  CHECK(lack_of_kernels(device.table(), 0, built).empty());
  device.capability = 75;
  CHECK(lack_of_kernels(device.table(), 0, built).empty());
  CHECK(lack_of_kernels(device.table(), 0, "80-real,90-virtual")
            .starts_with("cuda:0 has compute capability 7.5, and this build has kernels for "
                         "80-real,90-virtual alone"));
  CHECK(lack_of_kernels(device.table(), -1, "80-real").empty());
  device.fail_call("cudaDeviceGetAttribute", 1);
  CHECK(lack_of_kernels(device.table(), 0, "80-real").empty());
  CHECK(device.contexts.empty());
  CHECK(gpu_architectures().empty() == (linked_gpu_api() == nullptr));
}

TEST_CASE(
    "placement: the rank's GPU becomes the current one where that makes no context; who has used "
    "another is told") {
  HostCluster cluster;
  HostDevice device(cluster, 1);
  const auto& table = device.table();
  CHECK(make_current(table, 0, 0).empty());  // it is already
  CHECK(make_current(table, 1, 1).empty());
  CHECK(device.current() == 0);
  CHECK(device.contexts.empty());
  device.contexts = {1};
  CHECK(make_current(table, 1, 1).empty());
  CHECK(device.current() == 1);
  device.contexts = {0, 1};
  device.current() = 0;
  const std::string remark = make_current(table, 1, 1);
  CAPTURE(remark);
  CHECK(
      remark.starts_with("rank 1 has worked on cuda:0 before hvd::init(), and its GPU is cuda:1"));
  CHECK(device.current() == 1);
  device.current() = 0;
  device.fail_call("cudaGetDevice", 1);
  CHECK(make_current(table, 1, 1).empty());
  for (const int nth : {1, 2}) {
    device.current() = 0;
    device.fail_call("cuDevicePrimaryCtxGetState", 1, nth);
    CHECK(make_current(table, 1, 1).empty() == (nth == 2));
    CHECK(device.current() == nth - 1);
  }
}

}  // namespace hvd::gpu::test
