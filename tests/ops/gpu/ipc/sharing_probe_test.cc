// Whether ranks can share a GPU is tried before their first batch, and not believed: all decide
// alike, whoever is refused what, and what was tried is let go. On the host table.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/gpu/locked_gpu_api.h"

namespace hvd::gpu::test {
namespace {

/// Ranks on one GPU, and nothing else of a world.
struct Sharers {
  explicit Sharers(int ranks) {
    std::vector<SharedControl*> all;
    for (int rank = 0; rank < ranks; ++rank) all.push_back(&controls.emplace_back());
    for (int rank = 0; rank < ranks; ++rank) {
      auto& device = devices.emplace_back(std::make_unique<HostDevice>(cluster, rank));
      device->current_device = rank;
      tables.push_back(locked(device->table(), mutexes.emplace_back()));
    }
    for (int rank = 0; rank < ranks; ++rank)
      probes.push_back(std::make_unique<SharingProbe>(
          tables[static_cast<std::size_t>(rank)], rank, all, static_cast<std::size_t>(rank),
          [this] { ++rings; }, [this] { return failed.load(); },
          [this, rank](const std::string& why) {
            const std::lock_guard lock(mutex);
            said.push_back(std::to_string(rank) + ": " + why);
          }));
  }
  /// What each rank decides; the last only looks, as its user does not use the GPU.
  std::vector<bool> decide() {
    std::vector<int> answers(probes.size(), -1);
    std::atomic<std::size_t> left{probes.size() - 1};
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank + 1 < probes.size(); ++rank)
      threads.emplace_back([&, rank] {
        answers[rank] = probes[rank]->possible() ? 1 : 0;
        --left;
      });
    while (left.load() > 0) {
      probes.back()->look();
      std::this_thread::yield();
    }
    for (auto& thread : threads) thread.join();
    probes.back()->look();
    answers.back() = probes.back()->possible() ? 1 : 0;
    return {answers.begin(), answers.end()};
  }

  HostCluster cluster;
  std::deque<SharedControl> controls;
  std::deque<std::mutex> mutexes;
  std::vector<std::unique_ptr<HostDevice>> devices;
  std::deque<GpuApi> tables;
  std::atomic<bool> failed{false};
  std::atomic<int> rings{0};
  std::mutex mutex;
  std::vector<std::string> said;
  std::vector<std::unique_ptr<SharingProbe>> probes;
};

}  // namespace

TEST_CASE(
    "sharing probe: ranks that can share find it out, also with one that only answers, and keep "
    "nothing of it") {
  Sharers three(3);
  three.probes.front()->look();  // nobody has asked
  CHECK(three.devices.front()->contexts.empty());
  CHECK(three.decide() == std::vector<bool>{true, true, true});
  CHECK(three.said.empty());
  CHECK(three.rings > 0);
  for (const auto& device : three.devices) {
    CHECK(device->leaks().empty());
    CHECK(device->calls("cudaMalloc") == 1);
    CHECK(device->calls("cudaIpcOpenMemHandle") == 2);
  }
  CHECK(three.cluster.misuses().empty());
  CHECK(three.probes.front()->possible());  // it is asked once
  CHECK(three.devices.front()->calls("cudaMalloc") == 1);
}

TEST_CASE("sharing probe: where one is refused anything, none shares, and one says why") {
  for (const std::string call :
       {"cudaMalloc", "cudaIpcGetMemHandle", "cudaEventCreateWithFlags", "cudaIpcGetEventHandle",
        "cudaIpcOpenMemHandle", "cudaIpcOpenEventHandle"})
    for (const std::size_t guilty : {0, 2}) {
      CAPTURE(call);
      CAPTURE(guilty);
      Sharers three(3);
      three.devices[guilty]->fail_call(call, 700);
      CHECK(three.decide() == std::vector<bool>{false, false, false});
      CHECK(three.said == std::vector<std::string>{std::to_string(guilty) + ": " + call +
                                                   " says host CUDA says 700"});
      for (const auto& device : three.devices) CHECK(device->leaks().empty());
      CHECK(three.cluster.misuses().empty());
    }
}

TEST_CASE("sharing probe: a wait that lasts is told of once, and who has not answered") {
  HostCluster cluster;
  HostDevice device(cluster, 0);
  SharedControl first{}, second{}, third{};
  second.probe = SharedControl::Probe::Exported;
  std::vector<std::vector<std::size_t>> told;
  std::atomic<bool> failed{false};
  const auto make = [&](std::chrono::milliseconds limit) {
    return std::make_unique<SharingProbe>(
        device.table(), 0, std::vector{&first, &second, &third}, 0, [] {},
        [&] { return failed.load(); }, Remark(),
        SharingPatience{limit, [&](const std::vector<std::size_t>& missing) {
                          told.push_back(missing);
                          failed = true;
                        }});
  };
  CHECK(make(std::chrono::milliseconds(5))->possible());
  CHECK(told == std::vector<std::vector<std::size_t>>{{2}});
  failed = false;
  std::thread world([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    failed = true;
  });
  CHECK(make(std::chrono::milliseconds(0))->possible());  // never
  world.join();
  CHECK(told.size() == 1);
}

TEST_CASE(
    "sharing probe: a rank alone tries nothing, and who waits for one that has died is let go with "
    "the world") {
  Sharers alone(1);
  CHECK(alone.probes.front()->possible());
  CHECK(alone.devices.front()->contexts.empty());
  Sharers two(2);
  std::thread world([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    two.failed = true;
  });
  CHECK(two.probes.front()->possible());
  world.join();
}

}  // namespace hvd::gpu::test
