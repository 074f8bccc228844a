/// Submissions that are refused: their memory is the program's again when no lock is held, for its
/// release may call the library.

#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/engine/engine.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

/// Returns what owns memory, and calls the engine when it is released.
std::shared_ptr<void> calling_owner(Engine& engine, std::shared_ptr<HandleState> other,
                                    std::atomic<int>& released) {
  const auto release = [&engine, other = std::move(other)](std::atomic<int>* count) {
    static_cast<void>(engine.poll(*other));
    engine.then(*other, [] {});  // takes the engine's mutex in any case
    ++*count;
  };
  return std::shared_ptr<void>(&released, release);
}

Submission owned_allreduce(std::vector<float>& values, std::string name,
                           std::shared_ptr<void> owner) {
  auto submission = allreduce_of(values, std::move(name), DataType::Float32);
  submission.keep_alive = std::move(owner);
  return submission;
}

/// Has no room for anything.
class FullBackend final : public Backend {
 public:
  std::string_view name() const override { return "full"; }
  bool supports(const BatchTraits& traits) const override {
    return traits.dtype == DataType::Float32;
  }
  std::uint64_t prepare(const BatchTraits& /*traits*/, BatchMember& /*member*/) override {
    throw BackendError("no room");
  }
  std::unique_ptr<Execution> launch(Batch /*batch*/) override { throw BackendError("no room"); }
};

}  // namespace

TEST_CASE("memory of a submission whose name is in flight is released outside the engine's mutex") {
  for (const auto after : {After::Return, After::Wait, After::Repeat}) {
    std::atomic<int> released{0};
    std::atomic<bool> refused{false};
    ThreadWorld world({.size = 2, .domains = 1, .config = {}});
    world.run([&](int rank, Engine& engine) {
      std::vector<float> values(10, 1.0F);
      std::vector<float> others(10, 1.0F);
      while (rank == 1 && !refused) std::this_thread::yield();  // it stays in flight until then
      const auto pending = engine.submit(allreduce_of(values, "a", DataType::Float32));
      if (rank == 0) {
        CHECK_THROWS_AS(
            engine.submit(owned_allreduce(others, "a", calling_owner(engine, pending, released)),
                          after),
            DuplicateName);
        CHECK(released == 1);
        refused = true;
      }
      engine.wait(*pending);
      CHECK(values[0] == 2);
    });
  }
}

TEST_CASE("memory of a submission after shutdown() is released outside the engine's mutex") {
  std::atomic<int> released{0};
  ThreadWorld world({.size = 1, .domains = 1, .config = {}});
  world.run(
      [&](int, Engine& engine) {
        std::vector<float> values(10, 1.0F);
        const auto pending = engine.submit(allreduce_of(values, "a", DataType::Float32));
        engine.wait(*pending);
        engine.shutdown();
        CHECK_THROWS_AS(
            engine.submit(owned_allreduce(values, "b", calling_owner(engine, pending, released))),
            Shutdown);
        CHECK(released == 1);
      },
      false);
}

TEST_CASE("memory of a submission that no backend has room for is released outside the mutex") {
  std::atomic<int> released{0};
  ThreadWorld world(
      {.size = 1, .domains = 1, .config = {}, .customize = [](int, EngineParts& parts) {
         parts.backends.insert(parts.backends.begin(), std::make_unique<FullBackend>());
       }});
  world.run([&](int, Engine& engine) {
    std::vector<double> before(10, 1.0);
    std::vector<float> values(10, 1.0F);
    const auto pending = engine.submit(allreduce_of(before, "a", DataType::Float64));
    for (const auto* const name : {"b", ""})
      CHECK_THROWS_AS(
          engine.submit(owned_allreduce(values, name, calling_owner(engine, pending, released))),
          BackendError);
    CHECK(released == 2);
    engine.wait(*pending);
  });
}

}  // namespace hvd::test
