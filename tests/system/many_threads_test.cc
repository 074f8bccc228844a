// Many threads of each rank, with one rank per domain: small operations that come back, some of
// which the ranks disagree about.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ops/p2p/direct_memory.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

/// Sends nothing: the test's own backend runs the batches.
class NoWire final : public PointToPoint {
 public:
  [[nodiscard]] std::string_view name() const override { return "none"; }
  [[nodiscard]] int rank() const override { return 0; }
  [[nodiscard]] int largest_tag() const override { return 1 << 30; }
  Posted send(std::span<const std::byte> /*bytes*/, int /*to*/, int /*tag*/,
              SendMode /*mode*/) override {
    return {};
  }
  Posted receive(std::span<std::byte> /*bytes*/, int /*from*/, int /*tag*/) override { return {}; }
  void test(std::span<Posted> /*posted*/, std::vector<Finished>& /*finished*/) override {}
  std::optional<Claimed> claim(int /*tag*/) override { return std::nullopt; }
  Posted receive_claimed(const Claimed& /*claimed*/, std::span<std::byte> /*bytes*/) override {
    return {};
  }
  [[nodiscard]] bool drop(Posted& /*posted*/) noexcept override { return false; }
  void keep(std::shared_ptr<void> /*memory*/) noexcept override {}
  bool flush() override { return true; }
};

/// Another backend with the direct memory that goes over wires.
class WithDirectMemory final : public Backend {
 public:
  WithDirectMemory(std::unique_ptr<Backend> backend, const EngineParts& parts)
      : backend_(std::move(backend)),
        context_(std::make_unique<NoWire>(), parts.topology, {}, nullptr, *parts.board,
                 parts.stats),
        memory_(context_) {}
  std::string_view name() const override { return backend_->name(); }
  bool supports(const BatchTraits& traits) const override { return backend_->supports(traits); }
  std::unique_ptr<Execution> launch(Batch batch) override {
    return backend_->launch(std::move(batch));
  }
  LeaderMemory* leader_memory() override { return &memory_; }

 private:
  std::unique_ptr<Backend> backend_;
  P2pContext context_;
  DirectMemory memory_;
};

}  // namespace

TEST_CASE(
    "many threads: operations that end in errors give their blocks back while others are under "
    "way") {
  constexpr int kThreads = 4;
  constexpr int kRounds = 150;
  ThreadWorld world({.size = 2, .domains = 2, .customize = [](int /*rank*/, EngineParts& parts) {
                       parts.backends.back() = std::make_unique<WithDirectMemory>(
                           std::move(parts.backends.back()), parts);
                     }});
  std::atomic<int> mismatches{0};
  std::atomic<int> wrong{0};
  std::atomic<int> fast{0};
  world.run([&](int rank, Engine& engine) {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < kThreads; ++thread)
      threads.emplace_back([&, thread] {
        for (int round = 0; round < kRounds; ++round) {
          std::vector<float> values(rank == 1 && round % 5 == 4 ? 8 : 4,
                                    static_cast<float>(rank + thread + round));
          const Submission submission =
              allreduce_of(values, "thread." + std::to_string(thread), DataType::Float32);
          try {
            if (engine.small_calls().try_run(call_of(submission))) {
              ++fast;
            } else {
              engine.wait(*engine.submit(submission, After::Wait));
            }
            wrong += values.front() == static_cast<float>(1 + 2 * (thread + round)) ? 0 : 1;
          } catch (const Mismatch&) {
            ++mismatches;
          }
        }
      });
  });
  CHECK(mismatches == 2 * kThreads * (kRounds / 5));
  CHECK(wrong == 0);
  CHECK(fast > 0);
}

}  // namespace hvd::test
