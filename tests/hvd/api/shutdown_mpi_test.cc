/// shutdown() of some ranks while others go on.

#include <doctest/doctest.h>
#include <mpi.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "hvd/hvd.h"
#include "tests/support/error_of.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kElements = 5000;

/// Sums rank + 1 of all ranks, in a tensor of `values`.
bool sums_right(const std::string& name) {
  std::vector<float> values(kElements, static_cast<float>(rank() + 1));
  const Shape shape{kElements};
  allreduce({values.data(), DataType::Float32, shape, {}},
            {values.data(), DataType::Float32, shape, {}}, {.name = name, .op = ReduceOp::Sum});
  return values.front() == static_cast<float>(size() * (size() + 1) / 2) &&
         values.back() == values.front();
}

}  // namespace

TEST_CASE("shutdown() returns while others go on, who are told which rank has left") {
  for (const bool shares_memory : {true, false}) {
    CAPTURE(shares_memory);
    Config config;
    if (!shares_memory) config.shared_memory = SharedMemory::Off;
    init(config);
    const int ranks = size();
    if (!mpi_threads_supported()) return shutdown();
    for (int early = 0; early < ranks && ranks > 1; ++early) {
      CAPTURE(early);
      for (int round = 0; round < 4; ++round) CHECK(sums_right("before"));
      const bool leaves = rank() == early;
      if (leaves) {
        shutdown();
        CHECK(!is_initialized());
        MPI_Barrier(MPI_COMM_WORLD);  // which nobody comes to before it has
      } else {
        std::string text;
        for (const char* name : {"before", "new"}) {
          text = error_of<Shutdown>([&] { sums_right(name); });
          CHECK(text.find("rank " + std::to_string(early)) != std::string::npos);
        }
        MPI_Barrier(MPI_COMM_WORLD);
        if (early % 2 == 1) std::this_thread::sleep_for(400ms);
        shutdown();
      }
      init(config);  // the next one, once all have left the one before
      CHECK(sums_right("after"));
    }
    shutdown();
  }
}

TEST_CASE("shutdown() waits for what its rank has submitted, and that others submit later") {
  init(Config());
  const bool alone = size() == 1 || !mpi_threads_supported();
  if (!alone) {
    std::vector<float> values(kElements, static_cast<float>(rank() + 1));
    const Shape shape{kElements};
    if (rank() != 0) std::this_thread::sleep_for(600ms);
    const float sum = static_cast<float>(size() * (size() + 1) / 2);
    const auto handle = allreduce_async({values.data(), DataType::Float32, shape, {}},
                                        {values.data(), DataType::Float32, shape, {}},
                                        {.name = "late", .op = ReduceOp::Sum});
    if (rank() != 0) handle.wait();
    shutdown();
    handle.wait();
    CHECK(values.front() == sum);
    MPI_Barrier(MPI_COMM_WORLD);
  } else {
    shutdown();
  }
}

TEST_CASE(
    "several ranks leave one after the other, and the last ones still work on a set of their own") {
  init(Config());
  if (size() < 3 || !mpi_threads_supported()) return shutdown();
  std::vector<int> others;
  for (int other = 1; other < size(); ++other) others.push_back(other);
  const ProcessSet rest = add_process_set(others);
  if (rank() == 0) {
    shutdown();
    MPI_Barrier(MPI_COMM_WORLD);
  } else {
    MPI_Barrier(MPI_COMM_WORLD);
    for (int round = 0; round < 20; ++round) {
      std::vector<float> values(kElements, 1.0F);
      const Shape shape{kElements};
      allreduce({values.data(), DataType::Float32, shape, {}},
                {values.data(), DataType::Float32, shape, {}},
                {.name = "rest", .op = ReduceOp::Sum, .process_set = rest});
      CHECK(values.front() == static_cast<float>(size() - 1));
    }
    shutdown();
  }
}

TEST_CASE(
    "functions that follow what a rank has submitted have been called when its shutdown() returns, "
    "also while others go on") {
  for (const int way : {0, 1, 2, 3}) {
    CAPTURE(way);
    Config config;
    if (way % 2 == 1) config.shared_memory = SharedMemory::Off;
    init(config);
    if (size() == 1 || !mpi_threads_supported()) return shutdown();
    const bool all_at_once = way >= 2;
    const int number = all_at_once ? -1 : rank();
    std::vector<float> values(kElements, 1.0F);
    const Buffer buffer{values.data(), DataType::Float32, {kElements}, {}};
    std::atomic<bool> called{false};
    allreduce_async(buffer, buffer, {.name = "followed", .op = ReduceOp::Sum}).then([&called] {
      std::this_thread::sleep_for(1s);
      called = true;
    });
    // Rank 0 comes to it once it has left.
    if (number != 0) MPI_Barrier(MPI_COMM_WORLD);
    shutdown();
    CHECK(called);
    if (number == 0) MPI_Barrier(MPI_COMM_WORLD);
    while (!called) std::this_thread::sleep_for(1ms);
  }
}

TEST_CASE("a function that follows an operation may call shutdown() while another thread does") {
  init(Config());
  if (!mpi_threads_supported()) return shutdown();
  std::vector<float> values(kElements, static_cast<float>(rank() + 1));
  const float sum = static_cast<float>(size() * (size() + 1) / 2);
  const Buffer buffer{values.data(), DataType::Float32, {kElements}, {}};
  std::atomic<bool> begun{false}, called{false};
  allreduce_async(buffer, buffer, {.name = "ended twice", .op = ReduceOp::Sum}).then([&] {
    while (!begun) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(200ms);  // the other thread is in its shutdown() by then
    shutdown();
    called = true;
  });
  const auto before = std::chrono::steady_clock::now();
  begun = true;
  shutdown();
  CHECK(std::chrono::steady_clock::now() - before < 5s);  // 10 s where they wait for each other
  CHECK(values.front() == sum);
  CHECK(!is_initialized());
  while (!called) std::this_thread::sleep_for(1ms);
}

}  // namespace hvd::test
