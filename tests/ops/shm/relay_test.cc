/// A relay: whatever the owner and the reader do at once, the reader gets what is there, and neither waits for the other.

#include "ops/shm/relay.h"

#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "tests/support/sanitized.h"

namespace hvd::test {
namespace {

std::vector<std::byte> pattern(std::size_t bytes, unsigned seed) {
  std::vector<std::byte> result(bytes);
  for (std::size_t i = 0; i < bytes; ++i) result[i] = static_cast<std::byte>((i * 7 + i / 251 + seed) % 256);
  return result;
}

struct Reading {
  const std::vector<std::byte>& memory;
  std::size_t read = 0;  ///< bytes that were not taken from the ring
  bool operator()(std::size_t skipped, std::byte* to, std::size_t bytes) {
    std::memcpy(to, memory.data() + skipped, bytes);
    read += bytes;
    return true;
  }
};

}  // namespace

TEST_CASE("relay: the reader alone reads all by itself, the owner alone goes on after a moment") {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{65536}, std::size_t{65537}, std::size_t{3} << 20}) {
    const auto memory = pattern(bytes, 1);
    std::vector<std::byte> to(bytes);
    const auto alone = std::make_unique<Relay>();
    Reading reading{memory};
    CHECK(alone->take(to, std::ref(reading)));
    CHECK(to == memory);
    CHECK(reading.read == bytes);
    alone->give(memory);  // nobody needs it any more

    const auto before = std::make_unique<Relay>();
    before->give(memory);
    std::vector<std::byte> after(bytes);
    Reading rest{memory};
    CHECK(before->take(after, std::ref(rest)));
    CHECK(after == memory);
    CHECK(rest.read < std::max<std::size_t>(bytes, 2));
    CHECK((bytes > 512 << 10) == (rest.read > 0));  // as much as the ring holds came from there
  }
}

TEST_CASE("relay: owner and reader at once, in every rhythm") {
  for (unsigned seed = 0; seed < (kSanitized ? 20 : 200); ++seed) {
    std::mt19937 random(seed);
    const std::size_t bytes = (std::size_t{1} << 20) + random() % (2 << 20);
    const auto memory = pattern(bytes, seed);
    const auto relay = std::make_unique<Relay>();
    std::vector<std::byte> to(bytes);
    std::thread owner([&, late = random() % 3] {
      if (late == 1) std::this_thread::yield();
      if (late == 2) std::this_thread::sleep_for(std::chrono::microseconds(100));
      relay->give(memory);
    });
    Reading reading{memory};
    const unsigned pause = random() % 3;
    const bool all = relay->take(to, [&](std::size_t skipped, std::byte* part, std::size_t size) {
      if (pause == 1) std::this_thread::yield();
      if (pause == 2 && skipped % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
      return reading(skipped, part, size);
    });
    owner.join();
    CHECK(all);
    CHECK(to == memory);
  }
}

TEST_CASE("relay: a reader that cannot read what was not given says so") {
  const auto memory = pattern(3 << 20, 3);
  const auto relay = std::make_unique<Relay>();
  relay->give(memory);
  std::vector<std::byte> to(memory.size());
  CHECK(!relay->take(to, [](std::size_t, std::byte*, std::size_t) { return false; }));
  CHECK(std::memcmp(to.data(), memory.data(), 512 << 10) == 0);
}

}  // namespace hvd::test
