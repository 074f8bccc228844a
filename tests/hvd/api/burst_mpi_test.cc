/// Many small allreduces at once on raw buffers, as users submit them: that they are right, and
/// travel together.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "hvd/hvd.h"

namespace hvd::test {
namespace {

constexpr std::size_t kTensors = 100;

struct Burst {
  std::vector<std::vector<float>> inputs, outputs;
  Burst(std::size_t elements, int round) {
    for (std::size_t i = 0; i < kTensors; ++i) {
      inputs.emplace_back(elements);
      outputs.emplace_back(elements, -1.0F);
      for (std::size_t j = 0; j < elements; ++j) inputs[i][j] = value(rank(), i, j, round);
    }
  }
  static float value(int of, std::size_t i, std::size_t j, int round) {
    return 1.0F / static_cast<float>(1 + 3 * of + static_cast<int>(i + j % 7) + round);
  }
  [[nodiscard]] Handle<void> start(std::size_t i) {
    const Shape shape{static_cast<std::int64_t>(inputs[i].size())};
    return allreduce_async(
        {inputs[i].data(), DataType::Float32, shape, {}},
        {outputs[i].data(), DataType::Float32, shape, {}},
        {.name = "burst." + std::to_string(inputs[i].size()) + "." + std::to_string(i),
         .op = ReduceOp::Max});
  }
  [[nodiscard]] bool is_right(int round) const {
    for (std::size_t i = 0; i < kTensors; ++i)
      for (std::size_t j = 0; j < outputs[i].size(); ++j)
        if (outputs[i][j] != value(0, i, j, round)) return false;
    return true;
  }
};

}  // namespace

TEST_CASE("a burst of small allreduces is right, and stats() says that it has travelled together") {
  for (const bool shares_memory : {true, false}) {
    CAPTURE(shares_memory);
    Config config;
    if (!shares_memory) config.shared_memory = SharedMemory::Off;
    init(config);
    for (const std::size_t elements : {50, 4096}) {
      CAPTURE(elements);
      const auto before = stats();
      for (int round = 0; round < 12; ++round) {
        Burst burst(elements, round);
        std::vector<Handle<void>> handles(kTensors);
        // Each rank has an order of its own, and waits in another.
        for (std::size_t i = 0; i < kTensors; ++i) {
          const std::size_t at = (i * 7 + static_cast<std::size_t>(13 * rank())) % kTensors;
          handles[at] = burst.start(at);
        }
        for (std::size_t i = 0; i < kTensors; ++i) handles[(i * 11 + 5) % kTensors].wait();
        CHECK(burst.is_right(round));
      }
      const auto after = stats();
      CHECK(after.tensors_submitted - before.tensors_submitted == 12 * kTensors);
      if (size() > 1) CHECK(after.tensors_fused - before.tensors_fused > 2 * kTensors);
    }
    shutdown();
  }
}

}  // namespace hvd::test
