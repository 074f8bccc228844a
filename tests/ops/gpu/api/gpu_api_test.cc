// The table on host memory refuses what CUDA refuses: what is launched, recorded or allocated while
// another device is current.
#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/gpu/host_gpu_api.h"

namespace hvd::gpu::test {
namespace {

/// The host devices of a host with two GPUs, of which this is the second.
struct Second {
  HostCluster cluster;
  HostDevice device{cluster, 1};
  CudaStream* stream = nullptr;
  CudaEvent* event = nullptr;

  Second() {
    device.current_device = 1;
    REQUIRE(device.table().stream_create(&stream) == CudaCode::Success);
    REQUIRE(device.table().event_create(&event) == CudaCode::Success);
  }
};

}  // namespace

TEST_CASE("host table: what belongs to a device is refused while another one is current") {
  const float from = 1;
  float to = 0;
  std::uint32_t* mark = nullptr;
  const std::vector<CopyItem> items{{&from, &to, 1}};
  const CopyJob copy{.items = items, .from = DataType::Float32, .to = DataType::Float32};
  const std::vector<PoisonItem> outputs{{&to, sizeof to}};
  void* memory = nullptr;
  CudaEvent* elsewhere = nullptr;
  struct Case {
    std::string what;
    std::function<bool(Second&)> call;  ///< whether it was accepted
  };
  const std::vector<Case> cases{
      {"a copy",
       [&](Second& on) {
         return on.device.table().batched_copy(copy, on.stream) == CudaCode::Success;
       }},
      {"a mark",
       [&](Second& on) {
         return on.device.table().poison(
                    {.items = outputs, .mark = mark, .dtype = DataType::Float32}, on.stream) ==
                CudaCode::Success;
       }},
      {"cudaEventRecord",
       [&](Second& on) {
         return on.device.table().event_record(on.event, on.stream) == CudaCode::Success;
       }},
      {"cudaEventRecord of an event made there",
       [&](Second& on) {
         REQUIRE(on.device.table().event_create(&elsewhere) == CudaCode::Success);
         REQUIRE(on.device.table().set_device(1) == CudaCode::Success);
         return on.device.table().event_record(elsewhere, on.stream) == CudaCode::Success;
       }},
      {"cudaMalloc",
       [&](Second& on) {
         return on.device.table().device_malloc(&memory, 64) == CudaCode::Success;
       }},
      {"ncclMemAlloc",
       [&](Second& on) { return on.device.table().mem_alloc(&memory, 64) == NcclCode::Success; }},
  };
  for (const Case& tried : cases) {
    CAPTURE(tried.what);
    for (const bool right : {true, false}) {
      CAPTURE(right);
      Second on;
      REQUIRE(on.device.table().host_malloc(reinterpret_cast<void**>(&mark), 4) ==
              CudaCode::Success);
      REQUIRE(on.device.table().set_device(right ? 1 : 0) == CudaCode::Success);
      const bool accepted = tried.call(on);
      const bool refused = !accepted || !on.cluster.misuses().empty();
      CHECK(refused == !right);
    }
  }
}

}  // namespace hvd::gpu::test
