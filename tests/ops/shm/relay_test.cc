/// A relay and an exchange of pieces: whatever the owners and the readers do at once, each reader
/// gets what is there, and nobody depends on another one.

#include "ops/shm/memory/relay.h"

#include <doctest/doctest.h>

#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "ops/shm/memory/stream_copy.h"
#include "ops/shm/piece_exchange.h"
#include "tests/support/sanitized.h"

namespace hvd::test {
namespace {

using Bytes = std::vector<std::byte>;

Bytes pattern(std::size_t bytes, unsigned seed) {
  Bytes result(bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    result[i] = static_cast<std::byte>((i * 7 + i / 251 + seed) % 256);
  return result;
}

/// Reads pieces of `memory` where it is, and counts.
struct Reading {
  const Bytes& memory;
  std::size_t* bytes_read;
  bool operator()(std::size_t /*source*/, std::size_t skipped, std::span<std::byte> to) const {
    std::memcpy(to.data(), memory.data() + skipped, to.size());
    *bytes_read += to.size();
    return true;
  }
};

constexpr std::size_t kRing = 8 * Relay::kPieceBytes;

}  // namespace

TEST_CASE(
    "relay: pieces come in order, no more of them than the ring holds, and again when all readers "
    "have one") {
  const Bytes memory = pattern(kRing + Relay::kPieceBytes + 1, 1);
  const auto relay = std::make_unique<Relay>(2);
  std::uint64_t next = 0;
  Bytes first(memory.size()), second(memory.size());
  CHECK_FALSE(relay->take(0, first));  // nothing has been given
  for (int piece = 0; piece < 8; ++piece) CHECK(relay->give(memory, next));
  CHECK_FALSE(relay->give(memory, next));
  while (relay->take(0, first)) {
  }
  CHECK(relay->taken_by(0) == 8);
  CHECK(relay->taken_by_all() == 0);
  CHECK_FALSE(relay->give(memory, next));  // the other reader still needs what the ring has
  for (int piece = 0; piece < 8; ++piece) CHECK(relay->take(1, second));
  CHECK(relay->taken() == 16);
  CHECK(relay->give(memory, next));
  CHECK(relay->give(memory, next));
  CHECK_FALSE(relay->give(memory, next));  // there is no more
  for (int piece = 0; piece < 2; ++piece) CHECK((relay->take(0, first) && relay->take(1, second)));
  CHECK_FALSE(relay->take(0, first));
  CHECK(first == memory);
  CHECK(second == memory);
}

TEST_CASE("relay: what readers have got elsewhere is not given") {
  const Bytes memory = pattern(4 * Relay::kPieceBytes, 2);
  const auto relay = std::make_unique<Relay>(1);
  std::uint64_t next = 0;
  Bytes to(memory.size());
  relay->skip(0);
  relay->skip(0);
  CHECK(relay->give(memory, next));
  CHECK(next == 3);
  CHECK(relay->take(0, to));
  CHECK(std::memcmp(to.data() + 2 * Relay::kPieceBytes, memory.data() + 2 * Relay::kPieceBytes,
                    Relay::kPieceBytes) == 0);
  CHECK(to.front() == std::byte{0});
}

TEST_CASE("a copy past the caches is a copy, wherever it begins and ends") {
  const Bytes from = pattern(1000, 4);
  for (std::size_t begin = 0; begin < 20; ++begin)
    for (const std::size_t bytes : {0, 1, 15, 16, 63, 64, 65, 79, 80, 200, 900}) {
      Bytes to(1000, std::byte{9});
      stream_copy(to.data() + begin, from.data() + begin / 2, bytes);
      bool right = true;
      for (std::size_t i = 0; i < to.size(); ++i)
        right = right && to[i] == (i < begin || i >= begin + bytes ? std::byte{9}
                                                                   : from[i - begin + begin / 2]);
      CHECK(right);
    }
}

TEST_CASE("exchange: what is streamed past the caches arrives whole") {
  const Bytes memory = pattern((9 << 20) + 5, 5);
  const auto relay = std::make_unique<Relay>(1);
  std::thread other([&] {
    PieceExchange owner(true);
    owner.give(*relay, memory);
    owner.give_rest();
  });
  Bytes to(memory.size());
  std::size_t read = 0;
  PieceExchange reader(true, true);
  reader.take(0, 0, {relay.get(), 0}, to);
  CHECK(reader.take_all(Reading{memory, &read}));
  other.join();
  CHECK(to == memory);
}

TEST_CASE("exchange: a reader alone reads all by itself, an owner alone goes on after a moment") {
  for (const bool have_cores : {true, false})
    for (const std::size_t bytes :
         {std::size_t{1}, Relay::kPieceBytes, Relay::kPieceBytes + 1, std::size_t{3} << 20}) {
      const Bytes memory = pattern(bytes, 1);
      Bytes to(bytes);
      const auto alone = std::make_unique<Relay>(1);
      PieceExchange reader(have_cores);
      std::size_t read = 0;
      reader.take(0, 0, {alone.get(), 0}, to);
      CHECK(reader.take_all(Reading{memory, &read}));
      CHECK(to == memory);
      CHECK(read == bytes);
      PieceExchange late(have_cores);
      late.give(*alone, memory);
      CHECK(late.give_rest());  // nobody needs it any more

      const auto before = std::make_unique<Relay>(1);
      PieceExchange owner(have_cores);
      owner.give(*before, memory);
      CHECK_FALSE(owner.give_rest());  // nobody has begun
      Bytes after(bytes);
      PieceExchange rest(have_cores);
      rest.take(0, 0, {before.get(), 0}, after);
      read = 0;
      CHECK(rest.take_all(Reading{memory, &read}));
      CHECK(after == memory);
      // as much as the ring holds came from there
      CHECK(read == (bytes > kRing ? bytes - kRing : 0));
    }
}

TEST_CASE("exchange: a reader that cannot read what was not given says so") {
  const Bytes memory = pattern(3 << 20, 3);
  const auto relay = std::make_unique<Relay>(1);
  PieceExchange owner(true);
  owner.give(*relay, memory);
  owner.give_rest();
  Bytes to(memory.size());
  PieceExchange reader(true);
  reader.take(0, 0, {relay.get(), 0}, to);
  CHECK_FALSE(
      reader.take_all([](std::size_t, std::size_t, std::span<std::byte>) { return false; }));
  CHECK(std::memcmp(to.data(), memory.data(), kRing) == 0);
}

/// Each rank has something else for each other one (or the same for all), of another size, and
/// comes when it comes; some do not help at all.
TEST_CASE("exchange: ranks at once, in every rhythm") {
  constexpr unsigned kRanks = 3;
  for (unsigned seed = 0; seed < (kSanitized ? 20 : 150); ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const bool same_for_all = random() % 2 == 0;
    std::vector<std::vector<Bytes>> inputs(kRanks);  // by rank and reader
    std::vector<std::vector<std::unique_ptr<Relay>>> relays(kRanks);
    std::vector<unsigned> late(kRanks), helps(kRanks);
    for (unsigned owner = 0; owner < kRanks; ++owner) {
      late[owner] = random() % 3;
      helps[owner] = random() % 4;
      for (unsigned reader = 0; reader + 1 < kRanks; ++reader) {
        inputs[owner].push_back(same_for_all && reader > 0
                                    ? inputs[owner][0]
                                    : pattern(random() % (2 << 20), random()));
        relays[owner].push_back(std::make_unique<Relay>(same_for_all ? kRanks - 1 : 1));
      }
    }
    std::vector<std::vector<Bytes>> outputs(kRanks, std::vector<Bytes>(kRanks));
    const auto number = [](unsigned reader, unsigned owner) {
      return reader < owner ? reader : reader - 1;
    };
    const auto run = [&](unsigned self) {
      if (late[self] == 1) std::this_thread::yield();
      if (late[self] == 2) std::this_thread::sleep_for(std::chrono::microseconds(300));
      PieceExchange exchange(seed % 2 == 0, seed % 3 == 0);
      for (unsigned reader = 0; helps[self] > 0 && reader + 1 < kRanks; ++reader)
        if (!same_for_all || reader == 0)
          exchange.give(*relays[self][reader], inputs[self][reader]);
      for (unsigned owner = 0; owner < kRanks; ++owner) {
        if (owner == self) continue;
        const unsigned reader = number(self, owner);
        outputs[self][owner].resize(inputs[owner][reader].size());
        const RelayEnd end{relays[owner][same_for_all ? 0 : reader].get(),
                           same_for_all ? reader : 0};
        exchange.take(owner, 0, end, outputs[self][owner]);
      }
      CHECK(exchange.take_all([&](std::size_t owner, std::size_t skipped, std::span<std::byte> to) {
        std::memcpy(to.data(),
                    inputs[owner][number(self, static_cast<unsigned>(owner))].data() + skipped,
                    to.size());
        return true;
      }));
      exchange.give_rest();
    };
    std::vector<std::thread> ranks;
    for (unsigned self = 0; self < kRanks; ++self) ranks.emplace_back(run, self);
    for (auto& rank : ranks) rank.join();
    for (unsigned self = 0; self < kRanks; ++self)
      for (unsigned owner = 0; owner < kRanks; ++owner)
        if (owner != self) CHECK(outputs[self][owner] == inputs[owner][number(self, owner)]);
  }
}

}  // namespace hvd::test
