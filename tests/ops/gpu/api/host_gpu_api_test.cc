// The virtual GPU of the tests (tests/support/gpu/host_gpu_api.h) notices what it must: uses of
// memory without an order, memory that is poison or gone, calls on the wrong device; and its
// schedules differ in what they may differ in.
#include <doctest/doctest.h>

#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/support/gpu/host_gpu_api.h"

namespace hvd::gpu::test {
namespace {

/// A device, its streams and some of its memory.
struct Bench {
  explicit Bench(Schedule::Kind kind = Schedule::Kind::Delayed, std::uint64_t seed = 0) {
    device.schedule = {kind, seed};
    for (auto& stream : streams) device.table().stream_create(&stream);
    for (auto& at : memory) device.table().device_malloc(&at, kBytes);
  }
  ~Bench() {
    for (CudaEvent* event : events) device.table().event_destroy(event);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void copy(std::size_t stream, const void* from, void* to) {
    CHECK(device.table().memcpy_async(to, from, kBytes, streams.at(stream)) == CudaCode::Success);
  }
  CudaEvent* record(std::size_t stream) {
    device.table().event_create(&events.emplace_back());
    device.table().event_record(events.back(), streams.at(stream));
    return events.back();
  }
  void wait(std::size_t stream, CudaEvent* event) {
    device.table().stream_wait_event(streams.at(stream), event);
  }
  void synchronize(CudaEvent* event) {
    while (device.table().event_query(event) == CudaCode::NotReady) continue;
  }
  void synchronize() {
    for (std::size_t stream = 0; stream < streams.size(); ++stream) synchronize(record(stream));
  }
  /// Whether there is one error, which has both names.
  bool names(std::string_view one, std::string_view other) {
    const auto errors = cluster.order().errors();
    return errors.size() == 1 && errors.front().find(one) != std::string::npos &&
           errors.front().find(other) != std::string::npos;
  }
  float first(std::size_t piece) const {
    float value = 0;
    std::memcpy(&value, memory.at(piece), sizeof value);
    return value;
  }

  static constexpr std::size_t kBytes = 64;
  HostCluster cluster;
  HostDevice device{cluster, 0};
  std::array<CudaStream*, 3> streams{};
  std::array<void*, 3> memory{};
  std::vector<CudaEvent*> events;
  std::vector<float> ones = std::vector<float>(kBytes / sizeof(float), 1),
                     twos = std::vector<float>(kBytes / sizeof(float), 2);
};

constexpr std::array kAll{Schedule::Kind::Delayed, Schedule::Kind::Late, Schedule::Kind::Random,
                          Schedule::Kind::Eager, Schedule::Kind::Starved};

}  // namespace

TEST_CASE(
    "virtual gpu: two uses without an order are an error that names both, whatever the data are "
    "and whichever ran first") {
  for (const auto kind : kAll) {
    CAPTURE(static_cast<int>(kind));
    SUBCASE("write and read") {
      Bench bench(kind);
      bench.copy(0, bench.ones.data(), bench.memory[0]);
      bench.copy(1, bench.memory[0], bench.memory[1]);
      bench.synchronize();
      CHECK(bench.names("cudaMemcpyAsync 1 on stream 0 of rank 0",
                        "cudaMemcpyAsync 2 on stream 1 of rank 0"));
    }
    SUBCASE("write and write, of the same bytes") {
      Bench bench(kind);
      bench.copy(0, bench.ones.data(), bench.memory[0]);
      bench.copy(1, bench.ones.data(), bench.memory[0]);
      bench.synchronize();
      CHECK(bench.names("cudaMemcpyAsync 1", "cudaMemcpyAsync 2"));
    }
    SUBCASE("in a part only") {
      Bench bench(kind);
      bench.copy(0, bench.ones.data(), bench.memory[0]);
      bench.device.table().memcpy_async(
          bench.memory[1], static_cast<std::byte*>(bench.memory[0]) + 60, 4, bench.streams[1]);
      bench.synchronize();
      CHECK(bench.names("cudaMemcpyAsync 1", "cudaMemcpyAsync 2"));
    }
    SUBCASE("read and read are no conflict, nor are neighbours") {
      Bench bench(kind);
      bench.copy(0, bench.ones.data(), bench.memory[0]);
      bench.synchronize();
      bench.copy(0, bench.memory[0], bench.memory[1]);
      bench.copy(1, bench.memory[0], bench.memory[2]);
      bench.synchronize();
      CHECK(bench.cluster.order().errors().empty());
    }
  }
}

TEST_CASE(
    "virtual gpu: events order streams, one behind the other, and the host that has seen one") {
  for (const auto kind : kAll) {
    CAPTURE(static_cast<int>(kind));
    Bench bench(kind);
    bench.copy(0, bench.ones.data(), bench.memory[0]);
    bench.wait(1, bench.record(0));
    bench.copy(1, bench.memory[0], bench.memory[1]);
    bench.wait(2, bench.record(1));
    bench.copy(2, bench.twos.data(), bench.memory[0]);
    bench.synchronize(bench.record(2));
    bench.copy(0, bench.memory[0], bench.memory[2]);
    bench.synchronize();
    CHECK(bench.cluster.order().errors().empty());
    CHECK(bench.first(1) == 1);
    CHECK(bench.first(2) == 2);
  }
}

TEST_CASE(
    "virtual gpu: a wait is for the record that was there, not for a later one, nor for an event "
    "that is never recorded") {
  Bench bench;
  CudaEvent* const event = bench.record(0);
  bench.copy(0, bench.ones.data(), bench.memory[0]);
  bench.wait(1, event);
  bench.copy(1, bench.memory[0], bench.memory[1]);
  bench.device.table().event_record(event, bench.streams[0]);
  bench.synchronize();
  CHECK(bench.names("cudaMemcpyAsync 1", "cudaMemcpyAsync 2"));
}

TEST_CASE("virtual gpu: a host thread knows what it has seen, or is told") {
  Bench bench(Schedule::Kind::Eager);
  bench.cluster.order().one_host = false;
  bench.copy(0, bench.ones.data(), bench.memory[0]);
  bench.synchronize();
  const UseOfMemory use{.name = "another thread", .reads = {{bench.memory[0], 4}}};
  const int subject = 0;
  std::thread([&] { bench.cluster.order().host_uses(use); }).join();
  CHECK(bench.names("another thread", "cudaMemcpyAsync 1"));
  bench.cluster.order().tell(&subject);
  std::thread([&] {
    bench.cluster.order().hear(&subject);
    bench.cluster.order().host_uses(use);
  }).join();
  CHECK(bench.cluster.order().errors().size() == 1);
}

TEST_CASE(
    "virtual gpu: memory is poison until it is written, and again when it was freed; who comes too "
    "late is named") {
  Bench bench(Schedule::Kind::Late);
  std::vector<std::uint8_t> poison(sizeof(float), PoisonedMemory::kByte);
  CHECK(std::memcmp(bench.memory[0], poison.data(), poison.size()) == 0);
  bench.copy(0, bench.ones.data(), bench.memory[0]);
  bench.synchronize();
  CHECK(bench.first(0) == 1);
  SUBCASE("a copy of what nobody has written") {
    bench.cluster.order().knows_all_writes = true;
    bench.copy(0, bench.memory[2], bench.memory[1]);
    bench.synchronize();
    CHECK(bench.names("cudaMemcpyAsync 2", "which nobody has written"));
  }
  SUBCASE("freed before a kernel has got there") {
    bench.copy(0, bench.memory[0], bench.memory[1]);
    bench.device.table().device_free(bench.memory[0]);
    bench.synchronize();
    CHECK(bench.names("cudaMemcpyAsync 2", "after cudaFree on rank 0"));
    CHECK(std::memcmp(bench.memory[1], poison.data(), poison.size()) == 0);
  }
  SUBCASE("freed while nobody knows that the kernel is over") {
    Bench eager(Schedule::Kind::Eager);
    eager.copy(0, eager.ones.data(), eager.memory[0]);
    eager.device.table().device_free(eager.memory[0]);
    CHECK(eager.names("cudaMemcpyAsync 1", "cudaFree on rank 0"));
  }
  SUBCASE("beyond the end") {
    bench.device.table().memcpy_async(bench.memory[1], bench.memory[0], Bench::kBytes + 1,
                                      bench.streams[0]);
    bench.synchronize();
    CHECK(bench.cluster.order().errors().size() == 2);  // of both ranges
  }
}

TEST_CASE(
    "virtual gpu: late runs what is asked for alone, eager everything, and a starved stream waits "
    "until it is asked for") {
  const auto runs = [](Schedule::Kind kind, std::uint64_t seed) {
    Bench bench(kind, seed);
    for (std::size_t stream = 0; stream < 3; ++stream)
      bench.copy(stream, bench.ones.data(), bench.memory[stream]);
    std::string before;
    for (std::size_t stream = 0; stream < 3; ++stream)
      before += bench.first(stream) == 1 ? 'x' : '.';
    bench.synchronize(bench.record(1));
    std::string after;
    for (std::size_t stream = 0; stream < 3; ++stream)
      after += bench.first(stream) == 1 ? 'x' : '.';
    bench.synchronize();
    return before + " " + after;
  };
  CHECK(runs(Schedule::Kind::Late, 0) == "... .x.");
  CHECK(runs(Schedule::Kind::Eager, 0) == "xxx xxx");
  CHECK(runs(Schedule::Kind::Starved, 2) == "xx. xx.");
  CHECK(runs(Schedule::Kind::Starved, 1) == "x.x xxx");
  CHECK(runs(Schedule::Kind::Random, 5) == runs(Schedule::Kind::Random, 5));
}

TEST_CASE("virtual gpu: a schedule is named in a word and a seed") {
  for (const auto kind : kAll) CHECK(schedule_of(text_of({kind, 17})).kind == kind);
  CHECK(text_of({Schedule::Kind::Late, 17}) == "late:17");
  CHECK(schedule_of("random:9").seed == 9);
  CHECK_THROWS_AS(schedule_of("soon:1"), std::invalid_argument);
}

TEST_CASE("virtual gpu: a call that is left out succeeds and does nothing, and is missed") {
  for (const auto kind : {Omissions::Kind::Wait, Omissions::Kind::Record}) {
    for (const int number : {1, 2}) {
      Bench bench(Schedule::Kind::Eager);
      bench.cluster.omissions().leave_out({kind, 0, number});
      bench.copy(0, bench.ones.data(), bench.memory[0]);
      bench.wait(1, bench.record(0));
      bench.copy(1, bench.memory[0], bench.memory[1]);
      bench.synchronize();
      CHECK(bench.cluster.order().errors().size() == (number == 1 ? 1 : 0));
      CHECK(bench.cluster.omissions().place().empty() ==
            (kind == Omissions::Kind::Wait && number == 2));
    }
  }
  Bench bench;
  bench.cluster.omissions().leave_out({Omissions::Kind::Device, 0, 1});
  bench.device.current() = 7;
  bench.device.table().set_device(0);
  CHECK(bench.device.current() == 7);
}

TEST_CASE(
    "what one voice of the host has learned the other does not know, unless it is the second") {
  std::array<char, 64> memory{};
  const UseOfMemory write{.name = "writer", .writes = {{memory.data(), memory.size()}}};
  const UseOfMemory read{.name = "reader", .reads = {{memory.data(), memory.size()}}};
  for (const bool first_learns : {false, true}) {
    HappensBefore order;
    order.watch(memory.data(), memory.size(), "memory");
    const std::size_t stream = order.add_stream();
    Clock clock;
    clock.tick(stream);
    order.stream_uses(stream, clock, write);
    order.speak_as(first_learns ? 0 : 1);
    order.learn(clock);
    order.speak_as(first_learns ? 1 : 0);
    order.host_uses(read);
    order.speak_as(0);
    CHECK(order.errors().empty() == first_learns);
  }
}

TEST_CASE(
    "memory that the host hands on is free of what any voice of it knows to be over, and of "
    "nothing else") {
  std::array<char, 64> memory{};
  HappensBefore order;
  order.watch(memory.data(), memory.size(), "memory");
  const std::size_t stream = order.add_stream();
  Clock clock;
  clock.tick(stream);
  order.stream_uses(stream, clock, {.name = "writer", .writes = {{memory.data(), 32}}});
  order.speak_as(1);
  order.learn(clock);
  order.speak_as(0);
  clock.tick(stream);
  order.stream_uses(stream, clock, {.name = "late writer", .writes = {{memory.data() + 32, 32}}});
  order.hand_on(memory.data(), memory.size());
  order.host_uses({.name = "next", .writes = {{memory.data(), memory.size()}}});
  REQUIRE(order.errors().size() == 1);
  CHECK(order.errors()[0].find("bytes 32 to 64") != std::string::npos);
}

}  // namespace hvd::gpu::test
